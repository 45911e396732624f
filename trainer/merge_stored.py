"""Merge an adapter into the files of its base model tensor by tensor, for models that no host holds in memory."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file

from trainer.distributed.pipeline_stage import empty_model, stored_names
from trainer.distributed.pipeline_weights import WeightFiles
from trainer.errors import UserError
from trainer.model import base_dtype

if TYPE_CHECKING:
    from trainer.config import RunSpec


def stored_merge(spec: RunSpec, adapter: Path) -> tuple[Any, Iterator[tuple[str, torch.Tensor]]]:
    """Return the model without memory for its weights, and its merged weights by name, one at a time in host memory.

    Args:
        adapter: the folder of a LoRA adapter that a pipeline has trained.

    Raises:
        UserError: this host lacks files of the base model, or the adapter changes a weight that the files do not have.
    """
    model, parts = empty_model(spec)
    files = WeightFiles(spec.model)
    if not files.complete:
        raise UserError(
            f"merge: this host lacks weight files of {spec.model}: copy them to the first host and start the run again, or set merge=false"
        )
    names = {name: files.find(aliases) for name, aliases in stored_names(model, parts, [model])[0].items()}
    if absent := next((name for name, stored in names.items() if not stored), ""):
        raise UserError(f"merge: {spec.model} has no tensor {absent}: copy or download the model again")
    factors = _factors(adapter)
    if tied := sorted({*factors} - {name.removesuffix(".weight") for name in names}):
        raise UserError(
            f"merge: {tied[0]} shares its weights with the embedding: set merge=false, or leave it out of lora_targets"
        )
    return model, _merged(spec, model, files, names, factors)


def _factors(adapter: Path) -> dict[str, tuple[float, torch.Tensor, torch.Tensor]]:
    """Return the scale and the factors A, shape (r, in), and B, shape (out, r), of every adapted module, by its name."""
    config = json.loads((adapter / "adapter_config.json").read_text(encoding="utf-8"))
    tensors = load_file(adapter / "adapter_model.safetensors")
    found = {}
    for name, down in tensors.items():
        if name.endswith(".lora_A.weight"):
            up = tensors[name.replace(".lora_A.", ".lora_B.")]
            module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            found[module] = (config["lora_alpha"] / down.shape[0], down, up)
    return found


def _merged(
    spec: RunSpec,
    model: Any,
    files: WeightFiles,
    names: dict[str, str],
    factors: dict[str, tuple[float, torch.Tensor, torch.Tensor]],
) -> Iterator[tuple[str, torch.Tensor]]:
    from transformers.pytorch_utils import Conv1D

    for name, value in files.read(names):
        module = name.removesuffix(".weight")
        if module in factors:
            scale, down, up = factors[module]
            change = up.float() @ down.float() * scale
            value = value.float() + (change.T if isinstance(model.get_submodule(module), Conv1D) else change)
        yield name, value.to(base_dtype(spec)).contiguous()
