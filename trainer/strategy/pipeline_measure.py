"""The division of a model's layers over the ranks of a pipeline, from what every rank measures when it starts."""

import copy
import os
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from trainer.common.errors import UserError, model_errors
from trainer.config import RunSpec
from trainer.costs.cost import micro_batches
from trainer.costs.host_memory import available_bytes
from trainer.distributed.pipelines import Pipelines
from trainer.model_files.model_shape import shape_of
from trainer.models.model import base_dtype
from trainer.strategy.pipeline_split import LayerCosts, RankFacts, divide_layers, given_layers
from trainer.strategy.pipeline_stage import Division, parts_of

_PASSES = 4  # at least; the first one is not counted
_SECONDS = 1.5  # of all passes: long beside the slices in which a quota divides a core
_MANY = 40  # passes after which a shorter time is enough
_SHORT = 0.5  # seconds: five slices of a quota of the usual 100 ms
_PLACES = 512  # maximum tokens of a pass; beyond that, time is proportional


def divide_model(spec: RunSpec, pipelines: Pipelines, costs: Sequence[LayerCosts]) -> Division:
    """Return the layers of every stage: as the spec says, or by speed and free memory. Every rank calls it.

    All pipelines have the same division. The slowest rank of a stage, and the one with least memory, determine it.
    `costs`: for full rows, and then for ever smaller ones: the rows of the dataset are not known yet. The first that
    fit count. Raises UserError: the ranks have too little memory even for the last costs, or the numbers of the spec do
    not match the model.
    """
    layers, world, stages = shape_of(spec).layers, pipelines.world, pipelines.stages
    if spec.pipeline_layers:
        return Division(tuple(given_layers(spec.pipeline_layers, stages.size, layers)), stages.rank)
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    seconds = layer_seconds(spec, world.device) if spec.balance == "auto" and world.size > 1 else 0.0
    room = available_bytes(world.device.type, processes)
    measured = world.gather([seconds, room])
    facts = []
    for ranks in zip(*pipelines.ranks, strict=True):
        speeds, rooms = zip(*(measured[rank] for rank in ranks), strict=True)
        facts.append(RankFacts(max(map(float, speeds)) if all(speeds) else 0.0, min(map(float, rooms))))
    micro = micro_batches(spec, len(pipelines.ranks))
    too_large: list[UserError] = []
    for smaller in costs:
        try:
            division = Division(tuple(divide_layers(layers, facts, smaller, micro)), stages.rank)
        except UserError as error:
            too_large.append(error)
            continue
        if too_large and world.rank == 0:
            print(
                f"warning: the memory may not suffice for rows of {spec.seq_length} tokens with a loss on each of them: "
                "if a rank runs out of it, set a smaller batch_size"
            )
        return division
    raise too_large[0]


def layer_seconds(spec: RunSpec, device: torch.device) -> float:
    """Return the seconds of one decoder layer of the spec's model, forward and backward, on this rank, with random weights."""
    config: Any = copy.deepcopy(AutoConfig.from_pretrained(spec.model, trust_remote_code=False))
    parts = parts_of(spec, str(config.model_type))
    config.num_hidden_layers, config.vocab_size, config.pad_token_id = 1, 8, 0
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:1]
    with model_errors(spec.model):
        model = (
            AutoModelForCausalLM.from_config(config, dtype=base_dtype(spec), trust_remote_code=False).to(device).train()
        )
    decoder = getattr(model, parts.decoder)
    if spec.lora_r:  # adapters are small: the backward pass computes the gradient of the input alone
        model.requires_grad_(False)
    places = min(spec.seq_length, _PLACES)
    ids = torch.zeros(max(1, min(spec.batch_size, _PLACES // places)), places, dtype=torch.int64, device=device)
    embedding = getattr(decoder, parts.embedding)
    embedding.register_forward_hook(lambda _module, _input, output: output.detach().requires_grad_())
    times: list[float] = []
    while len(times) < _PASSES or sum(times[1:]) < (_SECONDS if len(times) < _MANY else _SHORT):
        begin = time.perf_counter()
        with torch.autocast(device.type, torch.bfloat16, enabled=spec.precision == "bf16-mixed"):
            output = decoder(input_ids=ids, use_cache=False).last_hidden_state
        output.float().sum().backward()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - begin)
    return statistics.fmean(times[1:])
