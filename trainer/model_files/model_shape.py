"""The shape of a model, read from its config.json alone: no weights, no torch. The controller also uses it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.common.errors import UserError, first_line
from trainer.common.formats import printable, quoted
from trainer.common.inputs import path_kind, read_regular, user_path
from trainer.model_files.adapter_folder import refuse_adapter

if TYPE_CHECKING:
    from trainer.config import RunSpec

_MAX_CONFIG = 16 * 1024 * 1024  # bytes of a config.json
_MAX_COUNT = 1_000_000_000  # of anything in it
_MAX_LAYERS = 10_000  # plans of pipelines loop over them
# Decoders whose layers are q, k, v, o and a gated MLP, between norms.
_LLAMA_LIKE: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {},
    "qwen2": {"qkv_bias": True},
    "qwen3": {"head_norm": True},
    "gemma": {},
    "gemma2": {"norms": 4},
    "gemma3_text": {"norms": 4, "head_norm": True},
    "phi3": {"fused": True},
    "olmo2": {"head_norm": True},
    "smollm3": {},
    "granite": {},
}
_TIED = {
    "gemma",
    "gemma2",
    "gemma3_text",
    "gpt2",
    "smollm3",
}  # the default of transformers if config.json does not set tie_word_embeddings

# Decoder layer classes of transformers whose name is not the capitalized model type.
_LAYERS = {"gpt2": "GPT2Block", "olmo2": "Olmo2DecoderLayer", "smollm3": "SmolLM3DecoderLayer"}


@dataclass(frozen=True)
class Linear:
    """One matrix of a layer. `reads` names its input; matrices with the same input share its saved copy."""

    name: str
    into: int
    out: int
    reads: str
    bias: bool = False


@dataclass(frozen=True)
class Shape:
    """A decoder-only model. Sizes are counts of numbers, not bytes."""

    kind: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    positions: int
    linear: tuple[Linear, ...]
    other_per_layer: int  # norms
    other: int  # final norm, learned positions
    tied: bool
    wrapped: bool = False  # config.json describes a model with further parts, such as for images

    @property
    def layer_parameters(self) -> int:
        """Parameters of one layer."""
        return sum(m.into * m.out + m.out * m.bias for m in self.linear) + self.other_per_layer

    @property
    def head_parameters(self) -> int:
        """Parameters of the matrix that produces logits, tied or not."""
        return self.hidden * self.vocabulary

    @property
    def parameters(self) -> int:
        """All parameters; a tied head counts once."""
        return self.layers * self.layer_parameters + self.other + self.head_parameters * (1 if self.tied else 2)

    def targets(self, spec: RunSpec) -> list[Linear]:
        """Return the matrices of one layer that get an adapter. For the head see `head_target`."""
        if not spec.lora_r:
            return []
        everything = spec.lora_targets == ("all-linear",)
        return [matrix for matrix in self.linear if everything or matrix.name in spec.lora_targets]

    def check_targets(self, spec: RunSpec) -> None:
        """Check that every name in `lora_targets` is that of a layer, before a rank starts; ranks check whole names. Raises UserError."""
        if not spec.lora_r or self.wrapped or spec.lora_targets == ("all-linear",):
            return
        names = {"lm_head", *(matrix.name for matrix in self.linear)}
        names |= {"wte", "wpe"} if self.kind == "gpt2" else {"embed_tokens"}
        if lost := [target for target in spec.lora_targets if target.rpartition(".")[2] not in names]:
            raise unknown_targets(spec, lost, sorted(names))

    def head_target(self, spec: RunSpec) -> bool:
        """Return whether the head gets an adapter (all-linear excludes it)."""
        return spec.lora_r > 0 and "lm_head" in spec.lora_targets

    def trained(self, spec: RunSpec) -> int:
        """Return how many parameters the spec trains."""
        if not spec.lora_r:
            return self.parameters
        layer = sum(spec.lora_r * (matrix.into + matrix.out) for matrix in self.targets(spec))
        head = spec.lora_r * (self.hidden + self.vocabulary) if self.head_target(spec) else 0
        return self.layers * layer + head


def language_part(config: Any) -> Mapping[str, Any]:
    """Return what a config.json says of the language model, which may be a part of a larger one; empty for what is no config."""
    whole = config if isinstance(config, Mapping) else {}
    return part if isinstance(part := whole.get("text_config"), Mapping) else whole


def read_shape(config: Mapping[str, Any]) -> Shape:
    """Read a model's shape from its config.json. Raises UserError: an unsupported model type, or a missing field."""
    whole, config = config, language_part(config)
    kind = str(config.get("model_type", ""))
    try:
        if kind == "gpt2":
            return replace(_gpt2(config), wrapped=config is not whole)
        if kind in _LLAMA_LIKE and not config.get("num_local_experts"):
            return replace(_llama(kind, config), wrapped=config is not whole)
    except KeyError as error:
        raise UserError(f"model: the config.json ({kind}) has no {error.args[0]}") from None
    except ValueError as error:
        raise UserError(f"model: the config.json ({kind}) has {error}") from None
    known = ", ".join(["gpt2", *_LLAMA_LIKE])
    shown = printable(kind, 80) or "a model without model_type"
    raise UserError(f"model: the planner does not support {shown}: it supports {known}")


def _count(config: Mapping[str, Any], name: str, default: int | None = None, most: int = _MAX_COUNT) -> int:
    """Return a number of the config; `default` if it is missing, null or 0. Raises KeyError or ValueError."""
    value = config[name] if default is None else config.get(name) or default
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise ValueError(f"{name}: {quoted(value)}, expected an integer from 1 to {most}")
    return value


def _llama(kind: str, c: Mapping[str, Any]) -> Shape:
    about = _LLAMA_LIKE[kind]
    hidden, heads, ff = (_count(c, name) for name in ("hidden_size", "num_attention_heads", "intermediate_size"))
    kv_heads = _count(c, "num_key_value_heads", heads)
    head_dim = _count(c, "head_dim", max(1, hidden // heads))
    query, value = heads * head_dim, kv_heads * head_dim
    bias = bool(c.get("attention_bias", False))
    if about.get("fused"):
        matrices = [
            Linear("qkv_proj", hidden, query + 2 * value, "attention"),
            Linear("o_proj", query, hidden, "mixed"),
            Linear("gate_up_proj", hidden, 2 * ff, "mlp"),
            Linear("down_proj", ff, hidden, "gated"),
        ]
    else:
        matrices = [
            Linear("q_proj", hidden, query, "attention", bias or about.get("qkv_bias", False)),
            Linear("k_proj", hidden, value, "attention", bias or about.get("qkv_bias", False)),
            Linear("v_proj", hidden, value, "attention", bias or about.get("qkv_bias", False)),
            Linear("o_proj", query, hidden, "mixed", bias),
            Linear("gate_proj", hidden, ff, "mlp", bool(c.get("mlp_bias", False))),
            Linear("up_proj", hidden, ff, "mlp", bool(c.get("mlp_bias", False))),
            Linear("down_proj", ff, hidden, "gated", bool(c.get("mlp_bias", False))),
        ]
    norms = about.get("norms", 2) * hidden
    if about.get("head_norm"):
        norms += query + value if kind == "olmo2" else 2 * head_dim
    return Shape(
        kind, _count(c, "num_hidden_layers", most=_MAX_LAYERS), hidden, heads, kv_heads, head_dim, _count(c, "vocab_size"),
        c.get("max_position_embeddings", 0), tuple(matrices), norms, hidden,
        bool(c.get("tie_word_embeddings", kind in _TIED)),
    )  # fmt: skip


def _gpt2(c: Mapping[str, Any]) -> Shape:
    hidden, heads = _count(c, "n_embd"), _count(c, "n_head")
    ff = _count(c, "n_inner", 4 * hidden)
    matrices = (
        Linear("c_attn", hidden, 3 * hidden, "attention", True),
        Linear("c_proj", hidden, hidden, "mixed", True),
        Linear("c_fc", hidden, ff, "mlp", True),
        Linear("c_proj", ff, hidden, "gated", True),
    )
    positions = _count(c, "n_positions", 1024)
    return Shape(
        "gpt2", _count(c, "n_layer", most=_MAX_LAYERS), hidden, heads, heads, max(1, hidden // heads), _count(c, "vocab_size"),
        positions, matrices, 4 * hidden, 2 * hidden + positions * hidden, bool(c.get("tie_word_embeddings", True)),
    )  # fmt: skip


def shape_of(spec: RunSpec) -> Shape:
    """Return the shape of the spec's model: tiny, a folder with a config.json (or that file), or a hub id in the cache.

    Raises UserError: there is no config.json, or its model type is not supported.
    """
    return read_shape(_config_of(spec))


def model_type(spec: RunSpec) -> str:
    """Return the type in the config.json of the spec's model, as `shape_of` finds it; any text, or empty. Raises UserError."""
    return str(language_part(_config_of(spec)).get("model_type", ""))


def fit_to_model(spec: RunSpec, configs: Mapping[str, Any] | None = None) -> RunSpec:
    """Return the spec with rows for which its models have positions, unless seq_length was given.

    `configs`: {model or teacher: its config.json}; None: those that this machine has. Raises UserError: seq_length was
    given, and a model has fewer positions; or the run writes weights that are stored quantized.
    """
    for setting in ("model", *(("teacher",) if spec.teacher else ())) if not spec.script else ():
        name = getattr(spec, setting)
        try:
            read = configs.get(setting) if configs is not None else _config_of(spec.model_copy(update={"model": name}))
        except UserError:  # the load of the model reports it
            continue
        config = read if isinstance(read, Mapping) else {}
        if config.get("quantization_config") and setting == "model" and (spec.merge or not spec.lora_r):
            raise UserError(
                f"model: the weights of {name} are stored quantized, which {'merge=true' if spec.lora_r else 'lora_r=0'} cannot write: "
                "train an adapter without merge, or choose the model that it was made from"
            )
        own = language_part(config)
        positions = own.get("max_position_embeddings", own.get("n_positions"))
        if isinstance(positions, int) and 8 <= positions < spec.seq_length:
            if "seq_length" in spec.model_fields_set:
                raise UserError(
                    f"seq_length: {name} has {positions} positions, got {spec.seq_length}: set seq_length={positions}"
                )
            spec = spec.model_copy(update={"seq_length": positions})
    return spec


def _config_of(spec: RunSpec) -> Any:
    from trainer.config import TINY
    from trainer.model_files.model_name import check_model_name

    if spec.model == TINY:
        from trainer.data.tiny import CONFIG, VOCABULARY

        return CONFIG | {"vocab_size": VOCABULARY}
    refuse_adapter(spec.model)
    path = user_path(spec.model, "model")
    path = path / "config.json" if path_kind(path) == "folder" else path
    if path_kind(path) != "file":
        check_model_name(spec.model)
        try:
            from huggingface_hub import hf_hub_download

            path = Path(hf_hub_download(spec.model, "config.json"))
        except Exception as error:
            raise UserError(
                f"model: no config.json of {spec.model} found locally or in the hub cache: {first_line(error)}"
            ) from None
    try:
        return json.loads(read_regular(path, _MAX_CONFIG))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"model: cannot read {path}: {first_line(error)}") from None


def unknown_targets(spec: RunSpec, lost: Sequence[str], layers: Sequence[str]) -> UserError:
    """Return the error for names in `lora_targets` that no layer has. `layers`: the names that layers have."""
    return target_error(f"{', '.join(lost)}: no layer of {spec.model} has this name", layers)


def target_error(reason: str, layers: Sequence[str]) -> UserError:
    """Return the error for `lora_targets`. `layers`: the names that it can have."""
    return UserError(f"lora_targets: {reason}: set all-linear, or layers of this model: {', '.join(layers)}")


def layer_class(kind: str) -> str:
    """Return the name of the decoder layer class in transformers for a model type."""
    plain = kind.removesuffix("_text")
    return _LAYERS.get(kind, plain[0].upper() + plain[1:] + "DecoderLayer")
