"""What a layer stores for its backward pass, as torch reports it, against the plan's figure."""

from pathlib import Path
from typing import Any

import pytest
from tables import table

pytest.importorskip("torch")

import torch

from trainer.config import RunSpec
from trainer.costs.cost import RowStats, activation_bytes, autocast_bytes
from trainer.data.tiny import CONFIG, make_tiny
from trainer.method.module_with_loss import ModelWithLoss
from trainer.model_files.model_shape import shape_of
from trainer.models.model import load_model
from trainer.spec import make_spec
from trainer.strategy import plan_of
from trainer.strategy.base import Batch

ROWS, PLACES = 2, 240  # their product is no dimension of a weight
SIZES = table("saved_activations")["sizes"]


def model_folder(folder: Path, layers: int) -> Path:
    """Write a model of the tests' sizes with random weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    make_tiny([], folder, 1)
    config = AutoConfig.for_model(**(CONFIG | SIZES | {"num_hidden_layers": layers, "vocab_size": 512}))
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def stored_bytes(folder: Path, fields: dict[str, Any]) -> tuple[int, int, RunSpec]:
    """Return the bytes that a forward pass stores: of activations, and of 16-bit copies of weights."""
    spec = make_spec({"model": str(folder), "batch_size": ROWS, "seq_length": PLACES, "packing": True} | fields, "here")
    model = load_model(spec, torch.device("cpu")).train()
    own = {p.untyped_storage().data_ptr() for p in (*model.parameters(), *model.buffers())}
    shapes = {tuple(p.shape[::order]) for p in model.parameters() for order in (1, -1)}
    stored: dict[int, tuple[int, bool]] = {}
    kept = []

    def note(value: torch.Tensor) -> torch.Tensor:
        storage = value.untyped_storage()
        if storage.data_ptr() not in own:
            kept.append(value)  # else its address would be used again
            stored[storage.data_ptr()] = storage.nbytes(), tuple(value.shape) in shapes
        return value

    half = {"bf16-mixed": torch.bfloat16, "fp16-mixed": torch.float16}.get(spec.precision)
    ids = torch.randint(0, 512, (ROWS, PLACES))
    positions = (torch.arange(PLACES) % (PLACES // 4)).repeat(ROWS, 1)
    with (
        torch.autograd.graph.saved_tensors_hooks(note, lambda value: value),
        torch.autocast("cpu", dtype=half or torch.bfloat16, enabled=half is not None),
    ):
        ModelWithLoss(model)(*Batch(ids, positions, ids.clone()))
    sizes = (
        [size for size, weight in stored.values() if not weight],
        [size for size, weight in stored.values() if weight],
    )
    return sum(sizes[0]), sum(sizes[1]), spec


@pytest.mark.parametrize(
    "fields", table("saved_activations")["a_layer"], ids=lambda fields: "-".join(map(str, fields.values()))
)
def test_a_layer_stores_what_the_plan_says(tmp_path: Path, fields: dict[str, Any]) -> None:
    """Within 7 %. The difference of two and three layers leaves out the embedding and the head."""
    if fields.get("quantize"):
        pytest.importorskip("bitsandbytes")
    (two, two_copies, fewer), (three, three_copies, spec) = (
        stored_bytes(model_folder(tmp_path / str(layers), layers), fields) for layers in (2, 3)
    )
    shape = shape_of(spec)
    assert three - two == pytest.approx(
        activation_bytes(spec, shape, RowStats.full(spec), cuda=True)[0] / shape.layers, rel=0.07
    )
    if not spec.gradient_checkpointing and not spec.lora_r:
        number = plan_of(spec).bytes_per_weight(spec)
        planned = autocast_bytes(spec, shape, number) - autocast_bytes(fewer, shape_of(fewer), number)
        assert three_copies - two_copies == pytest.approx(planned, rel=0.01)
