"""Read a LoRA adapter of peft without torch: plain factors of linear layers, each scaled by alpha / rank."""

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import safetensors

from trainer.common.errors import UserError, first_line
from trainer.common.formats import quoted

_TENSOR = re.compile(r"base_model\.model\.([A-Za-z0-9_.]{1,200})\.lora_([AB])\.weight")
_TYPES = {"F64": np.float64, "F32": np.float32, "F16": np.float16}
# Settings of peft that plain factors cannot express. The merged model of peft expresses all of them.
_UNSUPPORTED = (
    "use_dora", "alpha_pattern", "modules_to_save", "lora_bias", "fan_in_fan_out", "target_parameters",
    "trainable_token_indices", "use_qalora", "alora_invocation_tokens", "arrow_config", "layer_replication",
)  # fmt: skip


class AdapterError(UserError):
    """An adapter cannot be written as GGUF; the merged model can be deployed instead."""


def read_plain_adapter(folder: Path) -> tuple[float, dict[str, tuple[np.ndarray, np.ndarray]]]:
    """Return the numerator of the scale, and the float32 factors A [r, in] and B [out, r] by module, sorted.

    The update of a module is ``alpha / r * B @ A`` with its own r. `folder`: holds `adapter_config.json` and
    `adapter_model.safetensors`. Raises AdapterError: the files are not valid, or the adapter is not of this plain form.
    """
    path = folder / "adapter_config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        raw = safetensors.deserialize((folder / "adapter_model.safetensors").read_bytes())
    except (OSError, ValueError, RecursionError, safetensors.SafetensorError) as error:
        raise AdapterError(f"{folder}: {first_line(error)}") from None
    alpha = _alpha(config, path)
    tensors = {}
    for name, entry in raw:
        match = _TENSOR.fullmatch(name)
        if not match:
            raise AdapterError(f"{folder}: GGUF cannot express the tensor {quoted(name)}; set deploy_as=merged")
        tensors[match[1], match[2]] = float32_array(entry)
    if not tensors:
        raise AdapterError(f"{folder}: adapter_model.safetensors has no tensors")
    factors = {}
    for name in sorted({name for name, _ in tensors}):
        if (name, "A") not in tensors or (name, "B") not in tensors:
            raise AdapterError(f"{folder}: {quoted(name)} has one of lora_A and lora_B only")
        a, b = tensors[name, "A"], tensors[name, "B"]
        if a.ndim != 2 or b.ndim != 2 or a.shape[0] != b.shape[1]:
            raise AdapterError(
                f"{folder}: {quoted(name)} has the shapes A {a.shape} and B {b.shape}; expected [r, in] and [out, r]"
            )
        factors[name] = (a, b)
    return alpha, factors


def _alpha(config: Any, path: Path) -> float:
    """Return the numerator of the scale from adapter_config.json. Raises AdapterError."""
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        raise AdapterError(f"{path}: it is no configuration of a LoRA adapter")
    for key in _UNSUPPORTED:
        if config.get(key):
            raise AdapterError(f"{path}: GGUF cannot express {key}; set deploy_as=merged")
    if config.get("bias", "none") != "none":
        raise AdapterError(f"{path}: GGUF cannot express trained biases; set deploy_as=merged")
    alpha, rank = config.get("lora_alpha"), config.get("r")
    if not isinstance(alpha, int | float) or not isinstance(rank, int) or not math.isfinite(alpha) or rank < 1:
        raise AdapterError(f"{path}: lora_alpha is {quoted(alpha)} and r is {quoted(rank)}; expected numbers")
    if config.get("use_rslora"):  # the scale is alpha / sqrt(r); llama.cpp divides by r
        if config.get("rank_pattern"):
            raise AdapterError(f"{path}: GGUF cannot express use_rslora with rank_pattern; set deploy_as=merged")
        alpha = alpha * math.sqrt(rank)
    return float(alpha)


def float32_array(entry: Mapping[str, Any]) -> np.ndarray:
    """Return a tensor of a safetensors file, as `safetensors.deserialize` gives it, as float32. Raises AdapterError."""
    kind, data = entry["dtype"], entry["data"]
    if kind == "BF16":
        values = (np.frombuffer(data, np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)
    elif kind in _TYPES:
        values = np.frombuffer(data, _TYPES[kind]).astype(np.float32)
    else:
        raise AdapterError(f"adapter_model.safetensors: tensors of type {quoted(kind)} are not supported")
    return values.reshape(entry["shape"])
