"""Token ids, held against the embedding of the model: a tokenizer may have more tokens than the model. No torch."""

from typing import Any

PADDING_OF_FILES = "padding_of_files"  # attribute of a tokenizer: the padding token before `set_padding`


def usable_tokens(tokenizer: Any, rows: int | None) -> int:
    """Return how many token ids both the tokenizer and the embedding have. `rows`: of the embedding, if that is known."""
    return min(len(tokenizer), rows or len(tokenizer))


def set_padding(tokenizer: Any, rows: int | None) -> None:
    """Let a tokenizer pad with its end token if it has no padding token, or one outside the embedding; any token will do."""
    if _inside(tokenizer.pad_token_id, rows):
        return
    setattr(tokenizer, PADDING_OF_FILES, tokenizer.pad_token)
    end = tokenizer.eos_token_id
    if _inside(end, rows):
        tokenizer.pad_token = tokenizer.eos_token
    elif tokenizer.pad_token_id is not None:
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(0)


def _inside(token: int | None, rows: int | None) -> bool:
    return token is not None and (rows is None or token < rows)
