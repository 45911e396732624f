"""The special tokens and the chat template of a GGUF file, as other programs need them. No torch."""

import json
from pathlib import Path
from typing import Any

from trainer.data.hf_template import token_text
from trainer.data.template_text import end_of_turn, without_generation


def complete(special: Any, folder: Path) -> None:
    """Add what ends a turn to the special tokens, unless it is the end of text, and remove ``{% generation %}``.

    `special`: a ``gguf.SpecialVocab`` of the folder. `folder`: holds the tokenizer's files.
    """
    template = special.chat_template
    named = [{"name": "default", "template": template}] if isinstance(template, str) else list(template or [])
    source = next((str(each["template"]) for each in named if each.get("name") == "default"), "")
    if isinstance(template, str):
        special.chat_template = without_generation(template)
    elif template is not None:
        special.chat_template = [dict(each) | {"template": without_generation(str(each["template"]))} for each in named]
    tokens = _read(folder, "tokenizer.json").get("added_tokens") or ()
    added = {str(token["content"]): int(token["id"]) for token in tokens}
    config = _read(folder, "tokenizer_config.json")
    names = {name: token_text(value) for name, value in config.items() if name.endswith("_token")}
    end = end_of_turn(source, {name: text for name, text in names.items() if text}, added)
    if end and added[end] != special.special_token_ids.get("eos"):
        special.special_token_ids.setdefault("eot", added[end])


def _read(folder: Path, name: str) -> dict[str, Any]:
    try:
        value = json.loads((folder / name).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
