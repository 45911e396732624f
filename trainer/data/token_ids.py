"""Token ids, held against the embedding of the model: a tokenizer may have more tokens than the model. No torch."""

from __future__ import annotations

from typing import Any

import numpy as np

from trainer.data.corpus import Corpus
from trainer.errors import UserError
from trainer.formats import quoted

PADDING_OF_FILES = "padding_of_files"  # attribute of a tokenizer: the padding token before `set_padding`
_SHOWN = 60  # characters of a sample in a message


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


def check_token_ids(model: str, tokenizer: Any, corpus: Corpus, rows: int | None) -> None:
    """Check that the embedding has a row for every token of the corpus, and of the teacher's distributions in it.

    Args:
        model: its name in messages.
        rows: of its embedding; None if that is unknown.

    Raises:
        UserError: it has not; the message names the token and the sample.
    """
    if rows is None:
        return
    outside = np.flatnonzero(corpus.tokens >= rows)
    if len(outside):
        number = int(np.searchsorted(corpus.starts, outside[0], side="right")) - 1
        sample = corpus.tokens[corpus.starts[number] : corpus.starts[number + 1]]
        raise _outside(
            model,
            tokenizer,
            int(corpus.tokens[outside[0]]),
            rows,
            f"the sample {quoted(tokenizer.decode(sample), _SHOWN)}",
        )
    taught = corpus.targets.ids if corpus.targets else corpus.tokens[:0]
    if taught.size and int(taught.max()) >= rows:
        raise _outside(model, tokenizer, int(taught.max()), rows, "an answer of the teacher")


def _outside(model: str, tokenizer: Any, token: int, rows: int, where: str) -> UserError:
    text = quoted(tokenizer.convert_ids_to_tokens(token))
    return UserError(
        f"model: {where} has the token {text} (id {token}), and the embedding of {model} has {rows} rows: use the tokenizer of this "
        "model, or extend its embedding (resize_token_embeddings) and save it"
    )
