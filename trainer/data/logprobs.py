"""Log-probabilities of a teacher in the rows of a dataset: read them, and match them with the tokens of the student.

A row has ``teacher_logprobs``: a list over the tokens of its last answer, each ``{"token": HEX, "top": {HEX: logprob}}``. HEX
is the text of a token as bytes in hexadecimal digits; `top` has the most probable tokens at this place. No torch here.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from trainer.data.shapes import Sample

COLUMN = "teacher_logprobs"
TOP = 20  # tokens of a place that count: the most probable ones
MAX_TOP = 64  # tokens of a place in a row
MAX_TOKENS = 1_048_576  # of an answer, as of seq_length
MAX_TOKEN_BYTES = 1024
LOWEST = -1e4  # below it, a log-probability counts as this one: float32 has it, and its exponential is 0
_ROUNDING = 1e-3  # by which a log-probability may exceed 0
_OFFSET = 8  # tokens that a chat template may place before the text of an answer
_HEX = re.compile(r"(?:[0-9a-fA-F]{2})*")
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Logprobs(NamedTuple):
    """The log-probabilities of one answer of n tokens. Tokens are indices of `table`, which all rows of a dataset share.

    `chosen`: int32 [n], the tokens of the answer; `top`: int32 [n, TOP], -1 where there are fewer; `values`: float32 [n, TOP].
    """

    table: Sequence[bytes]
    chosen: np.ndarray
    top: np.ndarray
    values: np.ndarray


@dataclass(frozen=True)
class Targets:
    """The teacher's distributions for the tokens of a corpus.

    `taught`, bool [tokens of the corpus]: whether a token has one. `ids`, int32 [taught tokens, TOP]: the most probable
    tokens, most probable first, 0 where there are fewer. `values`, float32 [taught tokens, TOP]: their log-probabilities, -inf
    where there are fewer. `matched`, `unmatched`: the number of samples whose answer has the teacher's tokens, and of those
    whose answer the student's tokenizer splits differently.
    """

    taught: np.ndarray
    ids: np.ndarray
    values: np.ndarray
    matched: int = 0
    unmatched: int = 0

    def arrays(self) -> tuple[np.ndarray, ...]:
        """Return the arrays, for a digest."""
        return self.taught, self.ids, self.values

    def select(self, spans: Sequence[slice]) -> Targets:
        """Return the targets of a corpus that has only these spans of tokens, in this order."""
        rows = [slice(int(self._before[span.start]), int(self._before[span.stop])) for span in spans]
        return Targets(
            np.concatenate([self.taught[:0], *(self.taught[span] for span in spans)]),
            np.concatenate([self.ids[:0], *(self.ids[row] for row in rows)]),
            np.concatenate([self.values[:0], *(self.values[row] for row in rows)]),
            self.matched,
            self.unmatched,
        )

    def lay_out(self, rows: Sequence[Sequence[int]], starts: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
        """Lay the targets of samples out as `trainer.data.packing.collate` lays out their tokens.

        Args:
            rows: sample indices of every row.
            starts: where each sample of the corpus starts, int64 [samples + 1].
            width: tokens per row (T).

        Returns:
            ids, int32, and log-probabilities, float32: [rows, T, TOP] each.
        """
        ids: np.ndarray = np.zeros((max(1, len(rows)), width, TOP), np.int32)
        values: np.ndarray = np.full(ids.shape, -np.inf, np.float32)
        for index, row in enumerate(rows):
            end = 0
            for sample in row:
                span = slice(int(starts[sample]), int(starts[sample + 1]))
                start, end = end, end + span.stop - span.start
                places: np.ndarray = start + np.flatnonzero(self.taught[span])
                first = int(self._before[span.start])
                ids[index, places] = self.ids[first : first + len(places)]
                values[index, places] = self.values[first : first + len(places)]
        return ids, values

    @cached_property
    def _before(self) -> np.ndarray:
        """The number of taught tokens before every token of the corpus and at its end, int64 [tokens + 1]."""
        return np.concatenate([[0], np.cumsum(self.taught)])


def join_targets(parts: Sequence[Targets]) -> Targets:
    """Return the targets of corpora that are joined in this order."""
    return Targets(
        np.concatenate([part.taught for part in parts]),
        np.concatenate([part.ids for part in parts]),
        np.concatenate([part.values for part in parts]),
        sum(part.matched for part in parts),
        sum(part.unmatched for part in parts),
    )


# Reading ----------------------------------------------------------------------------------------------------------------


class LogprobReader:
    """Reads the log-probabilities of the rows of one dataset. It keeps equal tokens once."""

    def __init__(self) -> None:
        self._table: list[bytes] = []
        self._places: dict[str, int] = {}

    def __call__(self, record: Any) -> Logprobs | None:
        """Return the log-probabilities of a record, or None if it has none.

        Raises:
            ValueError: they do not have the form that this module describes; the message is one line.
        """
        given = record.get(COLUMN) if isinstance(record, Mapping) else None
        if given is None or (isinstance(given, list) and not given):
            return None
        if not isinstance(given, list):
            raise ValueError(f"{COLUMN!r} is {type(given).__name__}, expected a list with one object per token")
        if len(given) > MAX_TOKENS:
            raise ValueError(f"{COLUMN!r} has {len(given)} tokens, expected at most {MAX_TOKENS}")
        chosen: np.ndarray = np.zeros(len(given), np.int32)
        top: np.ndarray = np.full((len(given), TOP), -1, np.int32)
        values: np.ndarray = np.full((len(given), TOP), -np.inf, np.float32)
        for place, entry in enumerate(given):
            where = f"token {place} of {COLUMN!r}"
            if not isinstance(entry, dict) or not isinstance(entry.get("top"), dict):
                raise ValueError(f"{where} must have token (hexadecimal digits) and top (an object)")
            chosen[place] = self._token(entry.get("token"), where)
            # Formats of columns hold null for a name that a row does not have.
            pairs = [(token, value) for token, value in entry["top"].items() if value is not None]
            if len(pairs) > MAX_TOP:
                raise ValueError(f"{where} has {len(pairs)} entries in top, expected at most {MAX_TOP}")
            found = [(_logprob(value, where), self._token(token, where)) for token, value in pairs]
            for rank, (value, number) in enumerate(sorted(found, reverse=True)[:TOP]):
                top[place, rank], values[place, rank] = number, value
        return Logprobs(self._table, chosen, top, values)

    def _token(self, text: Any, where: str) -> int:
        """Return the place of a token in the table. Raises ValueError."""
        place = self._places.get(text) if isinstance(text, str) else None
        if place is None:
            if not isinstance(text, str) or len(text) > 2 * MAX_TOKEN_BYTES or not _HEX.fullmatch(text):
                raise ValueError(
                    f"{where} has a token that is not the hexadecimal digits of at most {MAX_TOKEN_BYTES} bytes"
                )
            place = self._places[text] = len(self._table)
            self._table.append(bytes.fromhex(text))
        return place


def _logprob(value: Any, where: str) -> float:
    """Return a log-probability. Raises ValueError for another value."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{where} has a log-probability that is {type(value).__name__}, expected a number")
    if (isinstance(value, float) and not math.isfinite(value)) or value > _ROUNDING:
        raise ValueError(f"{where} has a log-probability that is not a finite number of at most 0")
    return min(0.0, float(max(value, LOWEST)))


# Matching ---------------------------------------------------------------------------------------------------------------


def last_answer(flags: np.ndarray) -> tuple[int, int]:
    """Return the start and the end of the last run of True. `flags`: bool [tokens], at least one is True."""
    end = int(np.flatnonzero(flags)[-1]) + 1
    before = np.flatnonzero(~flags[:end])
    return (int(before[-1]) + 1 if len(before) else 0), end


def _byte_of_character() -> dict[str, int]:
    """Return the byte that each character of a byte-level vocabulary stands for.

    As `bytes_to_unicode` of https://github.com/openai/gpt-2/blob/master/src/encoder.py, the other way round.
    """
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + place): byte for place, byte in enumerate(others)}


class Vocabulary:
    """The tokens of a tokenizer as bytes, which is how teachers and students with one vocabulary name them."""

    def __init__(self, tokenizer: Any) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        decoder = json.dumps(json.loads(backend.to_str()).get("decoder")) if backend else ""
        self._bytes = _byte_of_character() if '"ByteLevel"' in decoder else {}
        added = set(getattr(tokenizer, "added_tokens_encoder", {}) or {})
        known: Mapping[str, int] = tokenizer.get_vocab()
        texts = {number: self._decode(text, text in added) for text, number in known.items()}
        # If tokens have equal bytes, a piece of text takes precedence over the token of a single byte.
        names = {number: text for text, number in known.items()}
        self._ids: dict[bytes, int] = {}
        for number in sorted(texts, key=lambda number: (bool(_BYTE_TOKEN.fullmatch(names[number])), number)):
            self._ids.setdefault(texts[number], number)
        self._same: np.ndarray = np.arange(max(texts, default=0) + 1, dtype=np.int32)
        for number, text in texts.items():
            self._same[number] = self._ids[text]
        self._table: tuple[Sequence[bytes], np.ndarray] | None = None

    def _decode(self, text: str, added: bool) -> bytes:
        if added:
            return text.encode("utf-8", "replace")
        if self._bytes:
            try:
                return bytes(self._bytes[character] for character in text)
            except KeyError:
                return text.encode("utf-8", "replace")
        if match := _BYTE_TOKEN.fullmatch(text):
            return bytes([int(match[1], 16)])
        return text.replace("▁", " ").encode("utf-8", "replace")

    def ids_of(self, table: Sequence[bytes]) -> np.ndarray:
        """Return the ids of the tokens of a table, int32 [len(table) + 1]; -1 where there is none, as at the end."""
        if self._table is None or self._table[0] is not table or len(self._table[1]) != len(table) + 1:
            self._table = (table, np.array([*(self._ids.get(token, -1) for token in table), -1], np.int32))
        return self._table[1]

    def match(
        self, logprobs: Logprobs, ids: Sequence[int], answered: Sequence[bool]
    ) -> tuple[int, np.ndarray, np.ndarray] | None:
        """Find the teacher's tokens in the last answer of a sample.

        Args:
            ids: the tokens of the sample.
            answered: which of them belong to an answer.

        Returns:
            Where they begin; the ids of the most probable tokens, int32 [n, TOP], and their log-probabilities, float32
            [n, TOP], in the order that `Targets` describes. None if the answer has other tokens.
        """
        flags = np.asarray(answered, bool)
        count = len(logprobs.chosen)
        if not flags.any():
            return None
        first, end = last_answer(flags)
        answer = self._same[np.asarray(ids[first:end], np.int32)]
        known = self.ids_of(logprobs.table)
        chosen = known[logprobs.chosen]
        for offset in range(min(_OFFSET, len(answer) - count) + 1):
            if np.array_equal(answer[offset : offset + count], chosen):
                return first + offset, *_sorted(known[logprobs.top], logprobs.values)
        return None


def _sorted(ids: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return both in descending order of the values, without the tokens that the vocabulary does not have."""
    values = np.where(ids < 0, np.float32(-np.inf), values)
    order = np.argsort(-values, axis=1, kind="stable")
    ids, values = np.take_along_axis(ids, order, 1), np.take_along_axis(values, order, 1)
    return np.where(values == -np.inf, 0, ids).astype(np.int32), values


NO_TARGETS = Targets(np.zeros(0, np.bool_), np.zeros((0, TOP), np.int32), np.zeros((0, TOP), np.float32))


class MatchedTargets:
    """Collects the teacher's distributions of the samples of a corpus, in order."""

    def __init__(self) -> None:
        self._taught: list[np.ndarray] = [NO_TARGETS.taught]
        self._ids, self._values = [NO_TARGETS.ids], [NO_TARGETS.values]
        self._matched = self._unmatched = 0

    def add(
        self, vocabulary: Vocabulary, sample: Sample, ids: list[int], answered: list[bool], mask: list[bool]
    ) -> None:
        """Add a sample.

        Args:
            ids: all of its tokens.
            answered: which of them belong to an answer.
            mask: the loss mask of those that the corpus keeps.
        """
        taught: np.ndarray = np.zeros(len(mask), np.bool_)
        found = vocabulary.match(sample.logprobs, ids, answered) if sample.logprobs else None
        if found:
            first, top, values = found
            trained: np.ndarray = np.array(mask[first : first + len(top)], np.bool_)
            usable = trained & (values[: len(trained), 0] > -np.inf)
            taught[first : first + len(trained)] = usable
            self._ids.append(top[: len(trained)][usable])
            self._values.append(values[: len(trained)][usable])
        self._taught.append(taught)
        self._matched += bool(found)
        self._unmatched += sample.logprobs is not None and not found

    def targets(self) -> Targets:
        """Return what was added."""
        taught, ids, values = map(np.concatenate, (self._taught, self._ids, self._values))
        return Targets(taught, ids, values, self._matched, self._unmatched)
