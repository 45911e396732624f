"""Samples to tokens: chat template, which tokens carry loss, the cut at seq_length; kept on disk, so a resume is quick."""

import hashlib
import itertools
import json
import re
import zipfile
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trainer.data.samples import Sample
from trainer.errors import UserError
from trainer.files import write_atomic

# For tokenizers that bring none: no special token needed, and the answer is marked for the loss.
PLAIN_TEMPLATE = (
    "{% for m in messages %}"
    "{% if m['role'] == 'assistant' %}### Response:\n{% generation %}{{ m['content'] }}{{ eos_token }}{% endgeneration %}{{ '\\n' }}"
    "{% elif m['role'] == 'system' %}{{ m['content'] }}\n\n"
    "{% else %}### Instruction:\n{{ m['content'] }}\n\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}### Response:\n{% endif %}"
)
_MARKS = re.compile(r"\{%-?\s*generation\b")
_FORMAT = 2  # of the cache below: raise it when the encoding of a sample changes


@dataclass(frozen=True)
class Corpus:
    """Encoded samples end to end: `tokens` int32 and `trained` bool, both [total]; `starts` int64 [samples + 1]."""

    tokens: np.ndarray
    trained: np.ndarray
    starts: np.ndarray
    dropped: int = 0
    cut: int = 0

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of every sample, int64 [samples]."""
        return np.diff(self.starts)

    def digest(self) -> str:
        """Return what tells this corpus from any other: SHA-256 in hex over its tokens, their loss and its samples."""
        total = hashlib.sha256()
        for array in (self.starts, self.tokens, self.trained):
            total.update(array.tobytes())
        return total.hexdigest()

    def trained_counts(self) -> np.ndarray:
        """Tokens that carry loss, of every sample, int64 [samples]."""
        return np.diff(np.concatenate([[0], np.cumsum(self.trained)])[self.starts])

    def __len__(self) -> int:
        return len(self.starts) - 1


def _span_mask(tokenizer: Any, messages: Sequence[Any], ids: list[int]) -> list[bool]:
    """Mark assistant answers by the prefix that asks for them, for templates without ``{% generation %}``."""
    mask = [False] * len(ids)
    for place, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        # No template takes an empty chat: an answer that comes first is trained on from its header.
        before: list[int] = []
        if place:
            before = tokenizer.apply_chat_template(
                list(messages[:place]), tokenize=True, add_generation_prompt=True, return_dict=False
            )
        upto = tokenizer.apply_chat_template(list(messages[: place + 1]), tokenize=True, return_dict=False)
        start = next((i for i, (a, b) in enumerate(zip(before, ids, strict=False)) if a != b), len(before))
        end = next((i for i, (a, b) in enumerate(zip(upto, ids, strict=False)) if a != b), len(upto))
        mask[start:end] = [True] * (end - start)
    return mask


class Encoder:
    """Turns samples into (token ids, which carry loss) with one tokenizer."""

    def __init__(self, tokenizer: Any, *, seq_length: int, train_on: str) -> None:
        self.tokenizer, self.seq_length, self.train_on = tokenizer, seq_length, train_on
        if not tokenizer.chat_template:
            tokenizer.chat_template = PLAIN_TEMPLATE
        # Some models bring several by name: this takes the one that applies.
        self._template = tokenizer.get_chat_template()
        self._marks = bool(_MARKS.search(self._template))

    def fingerprint(self) -> str:
        """Return a digest of all that the encoding of a sample depends on."""
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        vocabulary = backend.to_str() if backend else json.dumps(self.tokenizer.get_vocab(), sort_keys=True)
        special = f"{self.tokenizer.bos_token_id} {self.tokenizer.eos_token_id}"
        parts = [vocabulary, special, self._template, str(self.seq_length), self.train_on, str(_FORMAT)]
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()

    def __call__(self, sample: Sample) -> tuple[list[int], list[bool]]:
        """Encode one sample, not cut: ids and mask are of one length."""
        if sample.messages:
            ids, mask = self._chat(sample.messages)
        else:
            ids, mask = [], []
            start = self.tokenizer.bos_token_id
            if start is not None:
                ids, mask = [start], [False]
            for text, trained in sample.pieces:
                piece = self.tokenizer(text, add_special_tokens=False)["input_ids"]
                ids += piece
                mask += [trained] * len(piece)
            if self.tokenizer.eos_token_id is not None:
                ids, mask = ids + [self.tokenizer.eos_token_id], mask + [True]
        return ids, [True] * len(ids) if self.train_on == "all" else mask

    def _chat(self, messages: Sequence[Any]) -> tuple[list[int], list[bool]]:
        try:
            if self._marks:
                out = self.tokenizer.apply_chat_template(
                    list(messages), tokenize=True, return_dict=True, return_assistant_tokens_mask=True
                )
                return list(out["input_ids"]), [bool(flag) for flag in out["assistant_masks"]]
            ids = list(self.tokenizer.apply_chat_template(list(messages), tokenize=True, return_dict=False))
            return ids, _span_mask(self.tokenizer, messages, ids)
        except Exception as error:
            # Templates are programs that come with the model: they raise what they like (alternating roles, say).
            why = str(error).strip().splitlines() or [type(error).__name__]
            raise UserError(f"dataset: the model's chat template refuses a sample: {why[0]}") from None


def encode_all(samples: Iterable[Sample], encoder: Encoder) -> Corpus:
    """Encode samples, cut them at seq_length, leave out those with no token to train on.

    The first token of a row is never predicted, so it does not count as trained.

    Raises:
        UserError: no sample is left.
    """
    all_ids: list[list[int]] = []
    all_masks: list[list[bool]] = []
    dropped = cut = 0
    for sample in samples:
        ids, mask = encoder(sample)
        cut += len(ids) > encoder.seq_length
        ids, mask = ids[: encoder.seq_length], mask[: encoder.seq_length]
        if mask:
            mask[0] = False
        if not any(mask):
            dropped += 1
            continue
        all_ids.append(ids)
        all_masks.append(mask)
    if not all_ids:
        raise UserError(
            f"dataset: none of {dropped} samples has a token to train on within seq_length {encoder.seq_length}: "
            "raise seq_length, or set train_on=all"
        )
    starts = np.array(list(itertools.accumulate(map(len, all_ids), initial=0)), dtype=np.int64)
    return Corpus(
        np.fromiter(itertools.chain.from_iterable(all_ids), np.int32, starts[-1]),
        np.fromiter(itertools.chain.from_iterable(all_masks), np.bool_, starts[-1]),
        starts,
        dropped,
        cut,
    )


def save_corpus(corpus: Corpus, path: Path) -> None:
    """Keep a corpus on disk, whole or not at all."""
    import io

    buffer = io.BytesIO()
    counts = np.array([corpus.dropped, corpus.cut], dtype=np.int64)
    np.savez(buffer, tokens=corpus.tokens, trained=corpus.trained, starts=corpus.starts, counts=counts)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, buffer.getvalue())


def load_corpus(path: Path) -> Corpus | None:
    """Read back what `save_corpus` kept; None if there is nothing, or nothing that can be read (it can be made again)."""
    try:
        with np.load(path, allow_pickle=False) as kept:
            dropped, cut = kept["counts"]
            return Corpus(kept["tokens"], kept["trained"], kept["starts"], int(dropped), int(cut))
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error):
        return None


def split(corpus: Corpus, held_out: Iterable[int]) -> tuple[Corpus, Corpus]:
    """Return the corpus without the samples in `held_out`, and those alone (order kept)."""
    out = set(held_out)

    def pick(wanted: list[int]) -> Corpus:
        spans = [slice(corpus.starts[i], corpus.starts[i + 1]) for i in wanted]
        return Corpus(
            np.concatenate([corpus.tokens[:0], *(corpus.tokens[span] for span in spans)]),
            np.concatenate([corpus.trained[:0], *(corpus.trained[span] for span in spans)]),
            np.concatenate([[0], np.cumsum([span.stop - span.start for span in spans], dtype=np.int64)]).astype(
                np.int64
            ),
            corpus.dropped,
            corpus.cut,
        )

    return pick([i for i in range(len(corpus)) if i not in out]), pick(sorted(out))


def collate(
    corpus: Corpus, rows: Sequence[Sequence[int]], *, pad: int, length: int | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Lay rows of samples out as one micro-batch.

    Returns:
        ids, positions, labels: int64 [rows, T]. Positions start again at 0 with every sample, which keeps packed samples apart; labels are -100 where no loss is. T is `length`, or that of the longest row.
        No rows give one row of padding, without loss.
    """
    width = length or max((sum(int(corpus.lengths[i]) for i in row) for row in rows), default=8)
    ids: np.ndarray = np.full((max(1, len(rows)), width), pad, np.int64)
    labels = np.full_like(ids, -100)
    positions = np.zeros_like(ids)
    for place, row in enumerate(rows or [[]]):
        end = 0
        for sample in row:
            first, last = corpus.starts[sample], corpus.starts[sample + 1]
            start, end = end, end + int(last - first)
            ids[place, start:end] = corpus.tokens[first:last]
            positions[place, start:end] = np.arange(end - start)
            labels[place, start:end] = np.where(corpus.trained[first:last], ids[place, start:end], -100)
        # The padding carries on with the last sample: nothing looks at it, and a row of one sample needs no mask then.
        positions[place, end:] = np.arange(width - end) + (positions[place, end - 1] + 1 if end else 0)
    return ids, positions, labels
