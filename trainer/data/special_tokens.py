"""The special tokens of a model folder as transformers reads them, without transformers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from trainer.data.hf_template import SPECIAL_TOKENS

if TYPE_CHECKING:
    from tokenizers import AddedToken, Tokenizer

_END = "<|endoftext|>"
_QWEN = {"unk_token": _END, "eos_token": _END, "pad_token": _END}
_GPT2 = {"unk_token": _END, "bos_token": _END, "eos_token": _END}
_LLAMA = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
# The tokens of classes of transformers, for names that tokenizer_config.json does not have.
DEFAULTS: Mapping[str, Mapping[str, str]] = {
    "TokenizersBackend": {},
    "PreTrainedTokenizerFast": {},
    "Qwen2Tokenizer": _QWEN,
    "GPT2Tokenizer": _GPT2,
    "GPTNeoXTokenizer": {**_GPT2, "pad_token": "<|padding|>"},
    "LlamaTokenizer": _LLAMA,
    "GemmaTokenizer": {f"{name}_token": f"<{name}>" for name in ("unk", "bos", "eos", "pad", "mask")},
}
# Models whose tokenizers have the class that they name: for others, transformers may take another one.
_MODELS = {"Qwen2Tokenizer": "qwen", "GPT2Tokenizer": "gpt2", "GPTNeoXTokenizer": "gpt_neox"}
_MODELS |= {"LlamaTokenizer": "llama", "GemmaTokenizer": "gemma"}


def class_of(config: Mapping[str, Any], model_type: Any) -> str:
    """Return the class of a tokenizer, if it is known here what transformers makes of it; else an empty string."""
    named = str(config.get("tokenizer_class"))
    name = named if named in DEFAULTS else named.removesuffix("Fast")
    is_own = not model_type or str(model_type).startswith(_MODELS.get(name, ""))
    return name if name in DEFAULTS and is_own else ""


def default_tokens(config: Mapping[str, Any], name: str) -> dict[str, str] | None:
    """Return the special tokens that the class of a tokenizer has, and its configuration does not name.

    None: the configuration leaves out how a text begins or ends, and the class is not known.
    """
    if not name:
        return None if {"bos_token", "eos_token"} - config.keys() else {}
    return {name: text for name, text in DEFAULTS[name].items() if name not in config}


def set_pipeline(core: Tokenizer, config: Mapping[str, Any], name: str) -> None:
    """Split a text as a class does that ignores what tokenizer.json says of it."""
    from tokenizers import models, normalizers, pre_tokenizers, processors

    if name == "GPTNeoXTokenizer":  # it adds nothing to a text, whatever the file says
        core.post_processor = processors.TemplateProcessing("$A", "$A $B")
    if not isinstance(core.model, models.BPE):
        return
    # With bytes, as Llama 3 has them, transformers takes all of tokenizer.json.
    if name == "LlamaTokenizer" and "ByteLevel" not in repr(core.pre_tokenizer):
        has_prefix = config.get("add_prefix_space") is None or config["add_prefix_space"]
        scheme = ("always" if config.get("legacy") else "first") if has_prefix else "never"
        core.normalizer = None
        core.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme=scheme, split=False)
        core.model.unk_token = None
    elif name == "GemmaTokenizer":
        core.normalizer = normalizers.Replace(" ", "▁")
        core.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    else:
        return
    core.model.fuse_unk = core.model.byte_fallback = True


def add_tokens(core: Tokenizer, config: Mapping[str, Any], special: Mapping[str, str]) -> None:
    """Add the tokens that a configuration has beside those of tokenizer.json, in the order of transformers."""
    known = core.get_added_tokens_decoder().values()
    same = {repr(token) for token in known}
    listed = config.get("added_tokens_decoder")
    numbered = [each for each in listed.items() if each[0].isdecimal()] if isinstance(listed, dict) else []
    tokens = [_token(value) for _, value in sorted(numbered, key=lambda each: int(each[0]))]
    missing = [token for token in tokens if token and repr(token) not in same]
    texts = {token.content for token in (*known, *missing)}
    named: list[Any] = [config.get(name) or special.get(name) for name in SPECIAL_TOKENS]
    for extra in (config.get("extra_special_tokens"), config.get("additional_special_tokens")):
        named += extra.values() if isinstance(extra, dict) else extra if isinstance(extra, list) else ()
    for value in named:
        token = _token(value, special=True)
        if token and token.content not in texts:
            texts.add(token.content)
            missing.append(token)
    core.add_tokens(missing)
    core.encode_special_tokens = config.get("split_special_tokens") is True


def _token(value: Any, **flags: bool) -> AddedToken | None:
    """Return the token that a text or an object describes; None for other values."""
    from tokenizers import AddedToken

    entry = value if isinstance(value, dict) else {"content": value}
    if not isinstance(entry.get("content"), str) or not entry["content"]:
        return None
    names = ("lstrip", "rstrip", "single_word", "normalized", "special")
    return AddedToken(entry["content"], **{**flags, **{name: bool(entry[name]) for name in names if name in entry}})
