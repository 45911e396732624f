"""Write a Llama model with a byte-level BPE tokenizer as GGUF, with a LoRA adapter merged into it. No torch.

Such a model is small, as `model=tiny`, and the imports of torch, transformers and peft take longer than all of its conversion. The
tensors, the hyperparameters and the tokenizer equal those of llama.cpp's converter. Every other model is left to that converter.
"""

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import safetensors

from trainer.common.errors import UserError, first_line
from trainer.common.formats import quoted
from trainer.gguf.metadata import is_byte_level
from trainer.gguf.plain_adapter import AdapterError, float32_array, read_plain_adapter
from trainer.gguf.special import complete

# Of the weights, which are in memory at once. For a larger model the time to import torch does not matter.
MAX_BYTES = 1 << 30
TYPES = {
    "f16": (gguf.LlamaFileType.MOSTLY_F16, gguf.GGMLQuantizationType.F16),
    "q8_0": (gguf.LlamaFileType.MOSTLY_Q8_0, gguf.GGMLQuantizationType.Q8_0),
}
_SIZES = (
    "num_hidden_layers", "max_position_embeddings", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size",
)  # fmt: skip
# llama.cpp's converter handles other values of these settings.
_FIXED = {"hidden_act": ("silu",), "attention_bias": (False, None), "mlp_bias": (False, None), "rope_scaling": (None,)}
_FIXED |= {"quantization_config": (None,), "is_causal": (True, None), "partial_rotary_factor": (None,)}
_PARTS = (
    "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj",
    "mlp.down_proj", "input_layernorm", "post_attention_layernorm",
)  # fmt: skip


class UnsupportedModelError(UserError):
    """The model is not of the form that this module writes; llama.cpp's converter may write it."""


def write_llama(base: Path, tokenizer: Path, adapter: Path | None, target: Path, quantize: str) -> dict[str, Any]:
    """Write a model as one GGUF file. Raises UnsupportedModelError: the model or the adapter is not of this form.

    Args:
        base: folder with config.json and the weights as safetensors.
        tokenizer: folder with the tokenizer's files.
        adapter: folder of a LoRA adapter to merge, in float32; None for the base alone.
        quantize: type of the matrices, a key of `TYPES`. Vectors are float32.

    Returns:
        The fields `tokenizer.ggml.model`, `.pre` and `.add_bos_token` of the file, as far as it has them, and the context.
    """
    config = _read(base / "config.json")
    sizes = _sizes(config)
    weights = _weights(base, config, sizes)
    if adapter:
        _merge(weights, adapter)
    writer = gguf.GGUFWriter(target, "llama")
    writer.add_type(gguf.GGUFType.MODEL)
    _add_parameters(writer, config, sizes)
    writer.add_file_type(TYPES[quantize][0])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    fields = _add_tokenizer(writer, base, tokenizer, sizes["vocab_size"])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, sizes["num_hidden_layers"])
    for name, values in weights.items():
        module = name.removesuffix(".weight")
        if module.endswith(("q_proj", "k_proj")):
            heads = "num_attention_heads" if module.endswith("q_proj") else "num_key_value_heads"
            values = rotary_pairs(values, sizes[heads])
        kind = gguf.GGMLQuantizationType.F32 if values.ndim == 1 else TYPES[quantize][1]
        if kind == gguf.GGMLQuantizationType.Q8_0 and values.shape[-1] % 32:
            kind = gguf.GGMLQuantizationType.F16
        quantized = gguf.quants.quantize(np.ascontiguousarray(values), kind)
        writer.add_tensor(f"{names.get_name(module)}.weight", quantized, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return fields | {"llama.context_length": sizes["max_position_embeddings"]}


def _read(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UnsupportedModelError(f"{path}: {first_line(error)}") from None
    if not isinstance(value, dict):
        raise UnsupportedModelError(f"{path}: it is no object")
    return value


def _sizes(config: dict[str, Any]) -> dict[str, int]:
    """Return the sizes of a Llama model. Raises UnsupportedModelError."""
    if config.get("architectures") != ["LlamaForCausalLM"]:
        raise UnsupportedModelError(f"the architecture is {quoted(config.get('architectures'))}")
    for name, values in _FIXED.items():
        if config.get(name) not in values:
            raise UnsupportedModelError(f"config.json: {name} is {quoted(config[name])}")
    sizes = {name: config.get(name) for name in _SIZES}
    heads = sizes["num_attention_heads"]
    sizes["num_key_value_heads"] = config.get("num_key_value_heads", heads)
    for name, value in sizes.items():
        if type(value) is not int or not 0 < value < 1 << 24:
            raise UnsupportedModelError(f"config.json: {name} is {quoted(value)}")
    known = {name: int(value or 0) for name, value in sizes.items()}
    known["head_dim"] = config.get("head_dim") or known["hidden_size"] // known["num_attention_heads"]
    if type(known["head_dim"]) is not int or known["head_dim"] % 2 or known["head_dim"] < 2:
        raise UnsupportedModelError(f"config.json: head_dim is {quoted(known['head_dim'])}")
    if known["vocab_size"] == 32016:  # the converter takes it for CodeLlama
        raise UnsupportedModelError(f"config.json: vocab_size is {known['vocab_size']}")
    return known


def _shapes(sizes: dict[str, int], tied: bool) -> dict[str, tuple[int, ...]]:
    hidden, inner, head = sizes["hidden_size"], sizes["intermediate_size"], sizes["head_dim"]
    query, value = sizes["num_attention_heads"] * head, sizes["num_key_value_heads"] * head
    layer = [(query, hidden), (value, hidden), (value, hidden), (hidden, query)]
    layer += [(inner, hidden), (inner, hidden), (hidden, inner)]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (sizes["vocab_size"], hidden)}
    shapes |= {} if tied else {"lm_head.weight": (sizes["vocab_size"], hidden)}
    for number in range(sizes["num_hidden_layers"]):
        for part, shape in zip(_PARTS, [*layer, (hidden,), (hidden,)], strict=True):
            shapes[f"model.layers.{number}.{part}.weight"] = shape
    return shapes | {"model.norm.weight": (hidden,)}


def _weights(base: Path, config: dict[str, Any], sizes: dict[str, int]) -> dict[str, np.ndarray]:
    """Return the weights as float32 by name. Raises UnsupportedModelError."""
    files = sorted(base.glob("*.safetensors"))
    found: dict[str, np.ndarray] = {}
    try:
        if sum(file.stat().st_size for file in files) > MAX_BYTES:
            raise UnsupportedModelError(f"{base}: the weights have more than {MAX_BYTES} bytes")
        for file in files:
            found |= {name: float32_array(entry) for name, entry in safetensors.deserialize(file.read_bytes())}
    except (OSError, AdapterError, safetensors.SafetensorError) as error:
        raise UnsupportedModelError(f"{base}: {first_line(error)}") from None
    shapes = _shapes(sizes, bool(config.get("tie_word_embeddings")))
    if {name: values.shape for name, values in found.items()} != shapes:
        raise UnsupportedModelError(f"{base}: its tensors are not those of config.json")
    return {name: found[name] for name in shapes}


def _merge(weights: dict[str, np.ndarray], adapter: Path) -> None:
    """Add the update of an adapter to the weights. Raises UnsupportedModelError."""
    try:
        alpha, factors = read_plain_adapter(adapter)
    except AdapterError as error:
        raise UnsupportedModelError(str(error)) from None
    for module, (a, b) in factors.items():
        name = f"{module}.weight"
        if name not in weights or weights[name].shape != (b.shape[0], a.shape[1]):
            raise UnsupportedModelError(f"{adapter}: the model has no layer of this shape for {quoted(module)}")
        weights[name] = weights[name] + np.float32(alpha / a.shape[0]) * (b @ a)
        if not np.isfinite(weights[name]).all():
            raise UnsupportedModelError(f"{adapter}: the merged weights of {quoted(module)} are not finite")


def _add_parameters(writer: gguf.GGUFWriter, config: dict[str, Any], sizes: dict[str, int]) -> None:
    rope = config.get("rope_parameters") or {"rope_type": "default", "rope_theta": config.get("rope_theta")}
    theta, epsilon = rope.get("rope_theta"), config.get("rms_norm_eps")
    if rope.get("rope_type", "default") != "default" or set(rope) - {"rope_type", "rope_theta"}:
        raise UnsupportedModelError(f"config.json: rope_parameters is {quoted(rope)}")
    if not isinstance(theta, int | float) or not isinstance(epsilon, float):
        raise UnsupportedModelError(f"config.json: rope_theta is {quoted(theta)}, rms_norm_eps is {quoted(epsilon)}")
    writer.add_block_count(sizes["num_hidden_layers"])
    writer.add_context_length(sizes["max_position_embeddings"])
    writer.add_embedding_length(sizes["hidden_size"])
    writer.add_feed_forward_length(sizes["intermediate_size"])
    writer.add_head_count(sizes["num_attention_heads"])
    writer.add_head_count_kv(sizes["num_key_value_heads"])
    writer.add_rope_freq_base(theta)
    writer.add_layer_norm_rms_eps(epsilon)
    writer.add_key_length(sizes["head_dim"])
    writer.add_value_length(sizes["head_dim"])
    writer.add_vocab_size(sizes["vocab_size"])
    writer.add_rope_dimension_count(sizes["head_dim"])


def _add_tokenizer(writer: gguf.GGUFWriter, base: Path, folder: Path, size: int) -> dict[str, Any]:
    """Add the tokenizer; return its fields that say whether a server adds the first token. Raises UnsupportedModelError."""
    parsed = _read(folder / "tokenizer.json")
    tokens, types = _tokens(parsed, size)
    split = "smollm" if parsed["pre_tokenizer"]["type"] == "Sequence" else "gpt-2"
    space = _read(folder / "tokenizer_config.json").get("add_prefix_space")
    if (folder / "tokenizer.model").exists() or space not in (None, False):
        raise UnsupportedModelError(f"{folder}: the tokenizer is not a plain byte-level one")
    if space is not None:
        writer.add_add_space_prefix(space)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(split)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    with tempfile.TemporaryDirectory() as together:  # the special tokens are also those of config.json
        for file in [base / "config.json", *folder.glob("tokenizer*.json"), *folder.glob("chat_template.jinja")]:
            shutil.copy(file, together)
        special = gguf.SpecialVocab(together, load_merges=True)
    complete(special, folder)
    if size == 49152:  # as the converter, which takes it for Granite
        special.add_special_token["bos"] = False
    special.add_to_gguf(writer, quiet=True)
    fields = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": split}
    first = special.add_special_token.get("bos")
    return fields if first is None else fields | {"tokenizer.ggml.add_bos_token": first}


def _tokens(parsed: dict[str, Any], size: int) -> tuple[list[str], list[int]]:
    """Return the text and the type of every token of a tokenizer.json. Raises UnsupportedModelError."""
    model, decoder = parsed.get("model") or {}, parsed.get("decoder") or {}
    plain = model.get("type") == "BPE" and not any(model.get(name) for name in ("byte_fallback", "ignore_merges"))
    plain = plain and _splits_plainly(parsed.get("pre_tokenizer"))
    if not plain or decoder.get("type") != "ByteLevel" or parsed.get("normalizer"):
        raise UnsupportedModelError("the tokenizer is not a plain byte-level one")
    added = parsed.get("added_tokens") or []
    if not all(token.get("special") for token in added):
        raise UnsupportedModelError("the tokenizer has added tokens that are not special")
    control = {token["content"] for token in added}
    ids = {number: token for token, number in model["vocab"].items()} | {
        token["id"]: token["content"] for token in added
    }
    if not ids or max(ids) >= size:
        raise UnsupportedModelError("the tokenizer has more tokens than the model")
    tokens = [ids.get(number, f"[PAD{number}]") for number in range(size)]
    kinds = {
        number: gguf.TokenType.CONTROL if token in control else gguf.TokenType.NORMAL for number, token in ids.items()
    }
    types = [int(kinds.get(number, gguf.TokenType.UNUSED)) for number in range(size)]
    return tokens, types


def _splits_plainly(step: Any) -> bool:
    """Return whether the text is split as GPT-2's tokenizer does, or as that of SmolLM, which first makes a part of every digit."""
    if isinstance(step, dict) and step.get("type") == "Sequence":
        parts = step.get("pretokenizers")
        if not isinstance(parts, list) or parts[:-1] != [{"type": "Digits", "individual_digits": True}]:
            return False
        step = parts[1]
    return is_byte_level({"pre_tokenizer": step}) and not step.get("add_prefix_space")


def rotary_pairs(values: np.ndarray, heads: int) -> np.ndarray:
    """Reorder the rows [heads * head_dim, in] from two halves per head to pairs, as llama.cpp rotates them."""
    return values.reshape(heads, 2, -1, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
