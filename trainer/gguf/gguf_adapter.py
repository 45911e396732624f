"""Write a LoRA adapter of peft as GGUF, the format in which Ollama takes adapters. No torch.

The tensors equal those of llama.cpp's convert_lora_to_gguf.py bit for bit. Ollama's own import of peft adapters is not used:
it permutes the wrong factor of the query and key projections.
"""

import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from trainer.common.formats import quoted
from trainer.gguf.llama import rotary_pairs
from trainer.gguf.plain_adapter import AdapterError, read_plain_adapter

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
# Those whose embedding and head are tied where config.json does not say it.
_TIED = {"GemmaForCausalLM", "Gemma2ForCausalLM", "Starcoder2ForCausalLM"}


@dataclass(frozen=True)
class _Base:
    """What the tensors' names and orders depend on."""

    arch: gguf.MODEL_ARCH
    permute: bool
    tied: bool
    layers: int
    heads: int
    kv_heads: int


def write_adapter(folder: Path, config: Mapping[str, Any], target: Path) -> None:
    """Write the adapter of a run as a GGUF file.

    `folder`: holds `adapter_config.json` and `adapter_model.safetensors`. `config`: the base model's config.json.
    `target`: the file, replaced atomically. Equal input gives equal bytes. Raises AdapterError: the files are not
    valid, or GGUF cannot express the adapter.
    """
    base = _read_base(config)
    alpha, factors = read_plain_adapter(folder)
    names = gguf.get_tensor_name_map(base.arch, base.layers)
    out: dict[str, np.ndarray] = {}
    for name, (a, b) in factors.items():
        key = names.get_name(name)
        if base.tied and name in ("lm_head", "model.embed_tokens"):  # llama.cpp has one tensor for both
            raise AdapterError(
                f"{folder}: GGUF cannot express an adapter of {quoted(name)} that shares its weights with "
                f"{'the embedding' if name == 'lm_head' else 'the head'}; set deploy_as=merged"
            )
        if key is None:
            raise AdapterError(
                f"{folder}: GGUF has no adapter for {quoted(name)} of this architecture; set deploy_as=merged"
            )
        if base.permute and name.endswith(("q_proj", "k_proj")):
            heads = base.heads if name.endswith("q_proj") else base.kv_heads
            if b.shape[0] % (2 * heads):
                raise AdapterError(f"{quoted(name)} has {b.shape[0]} outputs, which {heads} heads cannot share")
            b = rotary_pairs(b, heads)
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
    tied = config.get("tie_word_embeddings")
    return _Base(arch, permute, name in _TIED if tied is None else bool(tied), *numbers.values())  # type: ignore[arg-type]


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
