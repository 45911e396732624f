"""Token ids, held against the embedding of the model: a tokenizer may have more tokens than the model. No torch."""

from __future__ import annotations

from typing import Any

from trainer.common.errors import UserError
from trainer.common.formats import quoted
from trainer.data.corpus import Corpus

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


def check_teacher_tokens(model: str, tokenizer: Any, corpus: Corpus, rows: int | None) -> None:
    """Check that the embedding has a row for every token of the teacher's distributions; the encoder checks the samples.

    Args:
        model: its name in messages.
        rows: of its embedding; None if that is unknown.

    Raises:
        UserError: it has not.
    """
    last = int(corpus.targets.ids.max(initial=0)) if corpus.targets else 0
    if rows is not None and last >= rows:
        raise UserError(
            f"model: an answer of the teacher has the token {quoted(tokenizer.convert_ids_to_tokens(last))} (id {last}), and the "
            f"embedding of {model} has {rows} rows: use the tokenizer of this model, or extend its embedding "
            "(resize_token_embeddings) and save it"
        )
