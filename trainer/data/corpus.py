"""Encoded samples as arrays: joined, selected, and kept on disk for fast restarts."""

import hashlib
import io
import itertools
import json
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from trainer.common.files import write_atomic
from trainer.data.data_report import NO_DATA, DataReport

_OF_SAMPLES = ("splits", "desirable", "references")  # arrays of a corpus with an entry for each sample


@dataclass(frozen=True)
class Corpus:
    """Encoded samples, concatenated.

    `tokens`, int32 [total]: the token ids. `trained`, bool [total]: whether a token carries loss. `starts`, int64
    [samples + 1]: where each sample starts, followed by the total. `report`: what became of all samples. `sources`, int32
    [samples]: the number of the dataset of every sample; None if there is one dataset. `splits`, int64 [samples]: of pairs, the tokens of the chosen sequence, which the rejected one follows.
    `desirable`, bool [samples]: the labels of the answers. `references`, float64 [samples, 2]: log-probabilities of the untrained model, as the
    method defines them. `records`: of samples that are prompts without answers, the prompt and the other columns of each (see `to_prompt`).
    """

    tokens: np.ndarray
    trained: np.ndarray
    starts: np.ndarray
    report: DataReport = NO_DATA
    sources: np.ndarray | None = None
    splits: np.ndarray | None = None
    desirable: np.ndarray | None = None
    references: np.ndarray | None = None
    records: Sequence[Mapping[str, Any]] | None = None

    @property
    def lengths(self) -> np.ndarray:
        """The number of tokens of every sample, int64 [samples]."""
        return np.diff(self.starts)

    def digest(self) -> str:
        """Return the SHA-256 (hex) of the tokens, the loss mask, the boundaries, labels and records of samples."""
        total = hashlib.sha256()
        for array in (self.starts, self.tokens, self.trained, self.sources, self.splits, self.desirable):
            total.update(b"" if array is None else array.tobytes())
        if self.records is not None:
            total.update(json.dumps(self.records).encode())
        return total.hexdigest()

    def trained_counts(self) -> np.ndarray:
        """Return the number of tokens with loss of every sample, int64 [samples]."""
        return np.diff(np.concatenate([[0], np.cumsum(self.trained)])[self.starts])

    def sequences(self, sample: int) -> list[slice]:
        """Return where the sequences of a sample lie in `tokens`: one, or the chosen and the rejected one of a pair."""
        first, last = int(self.starts[sample]), int(self.starts[sample + 1])
        if self.splits is None:
            return [slice(first, last)]
        middle = first + int(self.splits[sample])
        return [slice(first, middle), slice(middle, last)]

    def __len__(self) -> int:
        return len(self.starts) - 1


def joined(corpora: Sequence[Corpus]) -> Corpus:
    """Return the samples of all corpora, in their order, as one corpus with `sources`; a single corpus unchanged."""
    if len(corpora) == 1:
        return corpora[0]
    ends = list(itertools.accumulate((len(corpus.tokens) for corpus in corpora), initial=0))
    starts: list[np.ndarray] = [corpus.starts[:-1] + first for corpus, first in zip(corpora, ends, strict=False)]
    more: dict[str, Any] = {name: _joined([getattr(corpus, name) for corpus in corpora]) for name in _OF_SAMPLES}
    return Corpus(
        np.concatenate([corpus.tokens for corpus in corpora]),
        np.concatenate([corpus.trained for corpus in corpora]),
        np.concatenate([*starts, [ends[-1]]]).astype(np.int64),
        sum((corpus.report for corpus in corpora), NO_DATA),
        np.repeat(np.arange(len(corpora), dtype=np.int32), [len(corpus) for corpus in corpora]),
        records=[record for corpus in corpora for record in corpus.records or ()] or None,
        **more,
    )


def _joined(arrays: Sequence[np.ndarray | None]) -> np.ndarray | None:
    found = [array for array in arrays if array is not None]
    return np.concatenate(found) if found else None


def save_corpus(corpus: Corpus, path: Path) -> None:
    buffer = io.BytesIO()
    report = np.array(json.dumps(corpus.report.as_dict()))
    arrays = {"tokens": corpus.tokens, "trained": corpus.trained, "starts": corpus.starts, "report": report}
    arrays |= {name: array for name in _OF_SAMPLES if (array := getattr(corpus, name)) is not None}
    if corpus.records is not None:
        arrays["records"] = np.frombuffer(json.dumps(corpus.records).encode(), np.uint8)
    np.savez(buffer, allow_pickle=False, **arrays)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, buffer.getvalue(), 0o600)  # it holds the text of a dataset that may be private


def load_corpus(path: Path) -> Corpus | None:
    """Return the corpus that `save_corpus` wrote, or None if the file is missing or unreadable."""
    try:
        with np.load(path, allow_pickle=False) as arrays:
            report = DataReport.of(json.loads(str(arrays["report"])))
            tokens, trained, starts = (arrays[name] for name in ("tokens", "trained", "starts"))
            more = {name: arrays[name] for name in _OF_SAMPLES if name in arrays}
            records = json.loads(arrays["records"].tobytes()) if "records" in arrays else None
            return Corpus(tokens, trained, starts, report, records=records, **more)
    except (OSError, ValueError, TypeError, KeyError, EOFError, zipfile.BadZipFile, zlib.error):
        return None


def preferred(corpus: Corpus) -> Corpus:
    """Return the chosen sequences of pairs, or the samples with a good answer, as samples to learn; of prompts none; other samples unchanged."""
    if corpus.records is not None:
        return select(corpus, [])
    if corpus.splits is None and corpus.desirable is None:
        return corpus
    good = range(len(corpus)) if corpus.desirable is None else np.flatnonzero(corpus.desirable)
    spans = [corpus.sequences(int(sample))[0] for sample in good]
    starts = np.cumsum([0, *(span.stop - span.start for span in spans)], dtype=np.int64)
    tokens, trained = (
        np.concatenate([array[:0], *(array[span] for span in spans)]) for array in (corpus.tokens, corpus.trained)
    )
    return Corpus(tokens, trained, starts, corpus.report)


def select(corpus: Corpus, indices: Sequence[int]) -> Corpus:
    spans = [slice(corpus.starts[i], corpus.starts[i + 1]) for i in indices]
    lengths = [span.stop - span.start for span in spans]
    made = Corpus(
        np.concatenate([corpus.tokens[:0], *(corpus.tokens[span] for span in spans)]),
        np.concatenate([corpus.trained[:0], *(corpus.trained[span] for span in spans)]),
        np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int64),
        corpus.report,
        None if corpus.sources is None else corpus.sources[list(indices)],
        *(None if (array := getattr(corpus, name)) is None else array[list(indices)] for name in _OF_SAMPLES),
    )
    return replace(made, records=None if corpus.records is None else [corpus.records[index] for index in indices])
