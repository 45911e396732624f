"""What is written beside weights so that other programs end an answer and render a chat as the training did."""

import copy
from pathlib import Path
from typing import Any

from trainer.data.template_text import end_of_turn, without_generation


def save_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Write a tokenizer whose chat templates every jinja renders: without ``{% generation %}``. Its eos_token stays."""
    saved, template = copy.copy(tokenizer), tokenizer.chat_template
    if isinstance(template, dict):
        saved.chat_template = {name: without_generation(source) for name, source in template.items()}
    elif template:
        saved.chat_template = without_generation(template)
    saved.save_pretrained(folder)


def template_end(tokenizer: Any) -> str:
    """Return the special or added token after an answer in the chat template; empty if there is none."""
    template = tokenizer.chat_template
    source = template.get("default", "") if isinstance(template, dict) else template or ""
    added = [token.content for token in tokenizer.added_tokens_decoder.values()]
    return end_of_turn(source, tokenizer.special_tokens_map, [*tokenizer.all_special_tokens, *added])


def other_end(tokenizer: Any) -> str:
    """Return what ends a turn of the chat template where it is not the tokenizer's eos_token; empty otherwise."""
    end = template_end(tokenizer)
    return "" if end == tokenizer.eos_token else end


def end_ids(tokenizer: Any, config: Any) -> list[int]:
    """Return the tokens that end an answer: those of the generation config (else of the tokenizer), and the template's.

    Args:
        config: the model's generation config; it may have no end.
    """
    known = getattr(config, "eos_token_id", None)
    known = tokenizer.eos_token_id if known is None else known
    found = [int(each) for each in (known if isinstance(known, list) else [known]) if each is not None]
    end = template_end(tokenizer)
    return list(dict.fromkeys([*found, *([tokenizer.convert_tokens_to_ids(end)] if end else [])]))


def add_end_token(config: Any, tokenizer: Any) -> bool:
    """Make what ends a turn of the chat template an end token of a generation config; return whether it changed.

    The tokenizer's own eos_token stays: it ends plain text, and templates write it.
    """
    known, ends = config.eos_token_id, end_ids(tokenizer, config)
    if not ends or ends == (known if isinstance(known, list) else [known]):
        return False
    config.eos_token_id = ends if len(ends) > 1 else ends[0]
    return True


def save_ends(config: Any, folder: Path) -> None:
    """Write the special tokens of a generation config; its other settings, which may not be valid, stay with the base model."""
    from transformers import GenerationConfig

    folder.mkdir(parents=True, exist_ok=True)
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    GenerationConfig(**{name: getattr(config, name, None) for name in names}).save_pretrained(folder)
