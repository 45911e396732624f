"""Write a LoRA adapter of peft as GGUF, the format in which Ollama takes adapters. No torch.

The tensors equal those of llama.cpp's convert_lora_to_gguf.py bit for bit. Ollama's own import of peft adapters is not used:
it permutes the wrong factor of the query and key projections.
"""

from __future__ import annotations

import json
import math
import os
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import safetensors

from trainer.errors import UserError, first_line
from trainer.formats import quoted

# Architectures of transformers: that of GGUF, and whether llama.cpp stores the rows of q and k in another order.
ARCHITECTURES = {
    "LlamaForCausalLM": (gguf.MODEL_ARCH.LLAMA, True),
    "MistralForCausalLM": (gguf.MODEL_ARCH.LLAMA, True),
    "GraniteForCausalLM": (gguf.MODEL_ARCH.GRANITE, True),
    "Qwen2ForCausalLM": (gguf.MODEL_ARCH.QWEN2, False),
    "Qwen3ForCausalLM": (gguf.MODEL_ARCH.QWEN3, False),
    "Olmo2ForCausalLM": (gguf.MODEL_ARCH.OLMO2, False),
    "GemmaForCausalLM": (gguf.MODEL_ARCH.GEMMA, False),
    "Gemma2ForCausalLM": (gguf.MODEL_ARCH.GEMMA2, False),
    "Starcoder2ForCausalLM": (gguf.MODEL_ARCH.STARCODER2, False),
    "StableLmForCausalLM": (gguf.MODEL_ARCH.STABLELM, False),
}
_TENSOR = re.compile(r"base_model\.model\.([A-Za-z0-9_.]{1,200})\.lora_([AB])\.weight")
_TYPES = {"F64": np.float64, "F32": np.float32, "F16": np.float16}
# Settings of peft that GGUF adapters cannot express. The merged model expresses all of them.
_UNSUPPORTED = (
    "use_dora", "alpha_pattern", "modules_to_save", "lora_bias", "fan_in_fan_out", "target_parameters",
    "trainable_token_indices", "use_qalora", "alora_invocation_tokens", "arrow_config", "layer_replication",
)  # fmt: skip


class AdapterError(UserError):
    """An adapter cannot be written as GGUF; the merged model can be deployed instead."""


@dataclass(frozen=True)
class _Base:
    """What the tensors' names and orders depend on."""

    arch: gguf.MODEL_ARCH
    permute: bool
    layers: int
    heads: int
    kv_heads: int


def write_adapter(folder: Path, config: Mapping[str, Any], target: Path) -> None:
    """Write the adapter of a run as a GGUF file.

    Args:
        folder: holds `adapter_config.json` and `adapter_model.safetensors`.
        config: the base model's config.json.
        target: the file, replaced atomically. Equal input gives equal bytes.

    Raises:
        AdapterError: the files are not valid, or GGUF cannot express the adapter.
    """
    base = _read_base(config)
    alpha, tensors = _read_adapter(folder)
    names = gguf.get_tensor_name_map(base.arch, base.layers)
    out: dict[str, np.ndarray] = {}
    for name in sorted({name for name, _ in tensors}):
        if (name, "A") not in tensors or (name, "B") not in tensors:
            raise AdapterError(f"{folder}: {quoted(name)} has one of lora_A and lora_B only")
        a, b = tensors[name, "A"], tensors[name, "B"]
        if a.ndim != 2 or b.ndim != 2 or a.shape[0] != b.shape[1]:
            raise AdapterError(
                f"{folder}: {quoted(name)} has the shapes A {a.shape} and B {b.shape}; expected [r, in] and [out, r]"
            )
        key = names.get_name(name)
        if key is None or (name == "lm_head" and config.get("tie_word_embeddings")):
            raise AdapterError(
                f"{folder}: GGUF has no adapter for {quoted(name)} of this architecture; set deploy_as=merged"
            )
        if base.permute and name.endswith(("q_proj", "k_proj")):
            b = _permute(b, base.heads if name.endswith("q_proj") else base.kv_heads, name)
        out[f"{key}.weight.lora_a"], out[f"{key}.weight.lora_b"] = a, b
    _write(base.arch, alpha, out, target)


def _read_base(config: Mapping[str, Any]) -> _Base:
    names = config.get("architectures")
    name = str(names[0]) if isinstance(names, list) and names else ""
    if name not in ARCHITECTURES:
        known = ", ".join(sorted(ARCHITECTURES))
        raise AdapterError(f"adapters of {quoted(name)} cannot be written as GGUF ({known} can); set deploy_as=merged")
    arch, permute = ARCHITECTURES[name]
    heads = config.get("num_attention_heads")
    numbers = {
        "num_hidden_layers": config.get("num_hidden_layers"),
        "num_attention_heads": heads,
        "num_key_value_heads": config.get("num_key_value_heads") or heads,
    }
    for key, value in numbers.items():
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 10_000:
            raise AdapterError(f"config.json of the base model: {key} is {quoted(value)}, expected 1 to 9999")
    return _Base(arch, permute, *numbers.values())  # type: ignore[arg-type]


def _read_adapter(folder: Path) -> tuple[float, dict[tuple[str, str], np.ndarray]]:
    """Return the scale's numerator and the float32 tensors by (module, A or B). Raises AdapterError."""
    path = folder / "adapter_config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        raw = safetensors.deserialize((folder / "adapter_model.safetensors").read_bytes())
    except (OSError, ValueError, RecursionError, safetensors.SafetensorError) as error:
        raise AdapterError(f"{folder}: {first_line(error)}") from None
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
    tensors = {}
    for name, entry in raw:
        match = _TENSOR.fullmatch(name)
        if not match:
            raise AdapterError(f"{folder}: GGUF cannot express the tensor {quoted(name)}; set deploy_as=merged")
        tensors[match[1], match[2]] = _array(entry)
    if not tensors:
        raise AdapterError(f"{folder}: adapter_model.safetensors has no tensors")
    return float(alpha), tensors


def _array(entry: Mapping[str, Any]) -> np.ndarray:
    """Return a tensor of a safetensors file as float32."""
    kind, data = entry["dtype"], entry["data"]
    if kind == "BF16":
        values = (np.frombuffer(data, np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)
    elif kind in _TYPES:
        values = np.frombuffer(data, _TYPES[kind]).astype(np.float32)
    else:
        raise AdapterError(f"adapter_model.safetensors: tensors of type {quoted(kind)} are not supported")
    return values.reshape(entry["shape"])


def _permute(b: np.ndarray, heads: int, name: str) -> np.ndarray:
    """Reorder the rows of B [heads * head_dim, r] from two halves per head to pairs, as llama.cpp rotates them."""
    if b.shape[0] % (2 * heads):
        raise AdapterError(f"{quoted(name)} has {b.shape[0]} outputs, which {heads} heads cannot share")
    return b.reshape(heads, 2, b.shape[0] // heads // 2, b.shape[1]).swapaxes(1, 2).reshape(b.shape)


def _write(arch: gguf.MODEL_ARCH, alpha: float, tensors: Mapping[str, np.ndarray], target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, aside = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    os.close(handle)
    try:
        writer = gguf.GGUFWriter(aside, gguf.MODEL_ARCH_NAMES[arch])
        writer.add_type(gguf.GGUFType.ADAPTER)
        writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
        writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, alpha)
        writer.add_file_type(gguf.LlamaFileType.ALL_F32)
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        for name, values in tensors.items():
            writer.add_tensor(name, np.ascontiguousarray(values))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        Path(aside).replace(target)
    finally:
        Path(aside).unlink(missing_ok=True)
