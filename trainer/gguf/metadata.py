"""The description of the tokenizer in the fields of a GGUF file and in tokenizer.json. Standard library only."""

from collections.abc import Mapping
from typing import Any

_ADD_FIRST = ("llama3", "llama-v3", "llama-bpe", "falcon3", "tekken", "chameleon")


def adds_bos(fields: Mapping[str, Any]) -> bool:
    """Return whether llama.cpp puts the first token before each prompt, from the fields of a GGUF file."""
    said = fields.get("tokenizer.ggml.add_bos_token")
    if isinstance(said, bool):
        return said
    if fields.get("tokenizer.ggml.model") == "gpt2":
        return fields.get("tokenizer.ggml.pre") in _ADD_FIRST
    return True


def context_length(fields: Mapping[str, Any]) -> int:
    """Return the tokens of the context of a model, from the fields of a GGUF file; 0 if they do not say it."""
    found = (value for name, value in fields.items() if name.endswith(".context_length"))
    return int(next(found, 0))


def is_byte_level(tokenizer: Any) -> bool:
    """Return whether a tokenizer.json splits text as GPT-2's does, and in no other way."""
    pre = tokenizer.get("pre_tokenizer") if isinstance(tokenizer, dict) else None
    return isinstance(pre, dict) and pre.get("type") == "ByteLevel" and pre.get("use_regex", True) is True
