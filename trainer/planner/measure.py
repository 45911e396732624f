"""Measure the speed of this device for a run: a few micro-batches of the model with one layer and with several, on random weights."""

import copy
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from trainer.config import TINY, RunSpec
from trainer.costs.cost import RowStats
from trainer.data.tiny import CONFIG, VOCABULARY
from trainer.distributed.world import World
from trainer.method.module_with_loss import ModelWithLoss
from trainer.models.model import add_lora, apply_liger, fast_kernels, isolates_packed_samples
from trainer.strategy.base import Batch
from trainer.strategy.ddp import DDP

_LAYERS = 3  # layers of the larger of the two models, at least
_LIMIT = 8.0  # seconds for the measurement of both models
_SHORT = 1.0  # seconds of a micro-batch of the larger model, at most, if it has more than _LAYERS layers
_SMALL = 256 << 20  # bytes of its weights, at most, in that case
_ROUNDS = (3, 9)  # at least and at most
_PLACES = 8192  # maximum places in a micro-batch; beyond that, time is proportional


def _model(spec: RunSpec, config: Any, layers: int, device: torch.device) -> torch.nn.Module:
    config = copy.deepcopy(config)
    config.num_hidden_layers = layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:layers]
    bf16 = spec.lora_r and spec.precision == "bf16-mixed"
    options: dict[str, Any] = {"dtype": torch.bfloat16 if bf16 else torch.float32}
    kernels = fast_kernels(spec, device)
    if "flash attention" in kernels:
        options["attn_implementation"] = "flash_attention_2"
    model = AutoModelForCausalLM.from_config(config, **options, trust_remote_code=False)
    if "liger" in kernels:
        apply_liger(model)
    if spec.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if spec.lora_r:
        model = add_lora(spec, model, partial=True)  # a target may name a layer by its number
    return model.to(device).train()


def _seconds(strategies: Sequence[DDP], batch: Batch, limit: float) -> list[tuple[float, float]]:
    """Return the median seconds of a micro-batch and of an optimizer step of each, without the first of each.

    They take turns, because the speed of a machine changes: only their difference counts in the end. `limit`: seconds
    for more than the fewest rounds.
    """
    times: list[list[tuple[float, float]]] = [[] for _ in strategies]
    began = time.perf_counter()
    least, most = _ROUNDS
    while len(times[0]) < least or (len(times[0]) < most and time.perf_counter() - began < limit):
        for strategy, found in zip(strategies, times, strict=True):
            device = strategy.world.device
            marks = [time.perf_counter()]
            strategy.backward(batch, batch.labels.numel(), True)
            marks.append(_now(device))
            strategy.step(1e-4)
            found.append((marks[1] - marks[0], _now(device) - marks[1]))
    kept = [one[1:] for one in times]
    return [(statistics.median(part for part, _ in one), statistics.median(step for _, step in one)) for one in kept]


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _config(spec: RunSpec) -> Any:
    if spec.model == TINY:
        return AutoConfig.for_model(**(CONFIG | {"vocab_size": VOCABULARY}))
    return AutoConfig.from_pretrained(spec.model, trust_remote_code=False)


def keeps_samples_apart(spec: RunSpec) -> bool:
    """Return whether the model keeps the samples of a packed row apart, from a few layers with random weights on the CPU."""
    config = _config(spec)
    torch.manual_seed(spec.seed)
    plain = spec.model_copy(update={"lora_r": 0, "precision": "32-true", "gradient_checkpointing": False})
    model = _model(plain, config, min(config.num_hidden_layers, _LAYERS), torch.device("cpu"))
    return isolates_packed_samples(model, config.vocab_size)


def measure(spec: RunSpec, rows: RowStats, device: torch.device) -> tuple[float, float]:
    """Return the seconds of a full micro-batch, forward and backward, and of an optimizer step, on `device` alone."""
    config = _config(spec)
    torch.manual_seed(spec.seed)
    places = max(8, round(rows.places))
    count = max(1, min(spec.batch_size, _PLACES // places))
    ids = torch.randint(0, config.vocab_size, (count, places), device=device)
    # Positions that restart give packed rows their attention mask.
    sample = max(4, places // 4) if spec.packing else places
    positions = (torch.arange(places, device=device) % sample).repeat(count, 1)
    labels = ids.clone()
    labels[:, : round(places * (1 - rows.trained))] = -100
    batch = Batch(ids, positions, labels)
    world = World(0, 1, 0, 0, device)
    total = config.num_hidden_layers

    def strategy_with(layers: int) -> DDP:
        return DDP(spec, world, ModelWithLoss(_model(spec, config, layers, device)))

    small = strategy_with(1)
    ((part, _),) = _seconds([small], batch, 0.0)
    size = sum(parameter.nbytes for parameter in small.module.parameters())
    # The whole model if it is small: an error of a part of it counts several times.
    layers = min(total, max(_LAYERS, min(int(_SHORT / part), _SMALL // size)))
    (part, step), (more, more_step) = _seconds([small, strategy_with(layers)], batch, _LIMIT)
    scale = (total - 1) / max(1, layers - 1)
    batches = spec.batch_size / count
    return (part + max(0.0, more - part) * scale) * batches, step + max(0.0, more_step - step) * scale
