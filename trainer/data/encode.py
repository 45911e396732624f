"""Encode samples as tokens: chat template, loss mask, truncation at seq_length, and a cache on disk for fast restarts."""

import hashlib
import io
import itertools
import json
import re
import zipfile
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from trainer.config import RunSpec
from trainer.config.dataset_source import DatasetSource
from trainer.data.files import dataset_digest
from trainer.data.logprobs import COLUMN, TOP, Targets, Vocabulary, join_targets
from trainer.data.plain_template import PLAIN_TEMPLATE
from trainer.data.samples import read_source
from trainer.data.shapes import Sample
from trainer.errors import UserError, first_line
from trainer.files import write_atomic
from trainer.inputs import path_kind

_GENERATION_TAG = re.compile(r"\{%-?\s*generation\b")
_FORMAT = 2  # version of the cached encoding: increment it when the encoding of a sample changes


_NO_TARGETS = Targets(np.zeros(0, np.bool_), np.zeros((0, TOP), np.int32), np.zeros((0, TOP), np.float32))


@dataclass(frozen=True)
class Corpus:
    """Encoded samples, concatenated.

    `tokens`, int32 [total]: the token ids. `trained`, bool [total]: whether a token carries loss. `starts`, int64
    [samples + 1]: where each sample starts, followed by the total. `dropped`, `cut`: the number of samples that were left
    out because they have no token with loss, and of those that were truncated. `sources`, int32 [samples]: the number of
    the dataset of every sample; None if there is one dataset. `targets`: the teacher's distributions, if the run uses those of
    the dataset.
    """

    tokens: np.ndarray
    trained: np.ndarray
    starts: np.ndarray
    dropped: int = 0
    cut: int = 0
    sources: np.ndarray | None = None
    targets: Targets | None = None

    @property
    def lengths(self) -> np.ndarray:
        """The number of tokens of every sample, int64 [samples]."""
        return np.diff(self.starts)

    def digest(self) -> str:
        """Return the SHA-256 (hex) of the tokens, the loss mask, the sample boundaries and the teacher's distributions."""
        total = hashlib.sha256()
        for array in (self.starts, self.tokens, self.trained, self.sources, *(self.targets or _NO_TARGETS).arrays()):
            total.update(b"" if array is None else array.tobytes())
        return total.hexdigest()

    def trained_counts(self) -> np.ndarray:
        """Return the number of tokens with loss of every sample, int64 [samples]."""
        return np.diff(np.concatenate([[0], np.cumsum(self.trained)])[self.starts])

    def __len__(self) -> int:
        return len(self.starts) - 1


def _prefix_mask(render: Callable[..., Any], messages: Sequence[Any], ids: list[int]) -> list[bool]:
    """Return the loss mask of a chat for a template without ``{% generation %}``: [tokens], True in assistant answers.

    An answer spans the tokens between the encoded prompt for it and the encoded chat up to it.
    """
    mask = [False] * len(ids)
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        # Templates reject an empty chat: for an answer in first place the loss includes its header.
        prompt: list[int] = []
        if index:
            prompt = render(list(messages[:index]), add_generation_prompt=True, return_dict=False)
        answered = render(list(messages[: index + 1]), return_dict=False)
        start, end = _common_prefix(prompt, ids), _common_prefix(answered, ids)
        mask[start:end] = [True] * (end - start)
    return mask


def _common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the index of the first difference, or the length of `one`."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), len(one))


class Encoder:
    """Encodes samples as (token ids, loss mask) with one tokenizer."""

    def __init__(self, tokenizer: Any, *, seq_length: int, train_on: str, logprobs: bool = False) -> None:
        """`logprobs`: also match the log-probabilities of the teacher."""
        self.vocabulary = Vocabulary(tokenizer) if logprobs else None
        self.tokenizer, self.seq_length, self.train_on = tokenizer, seq_length, train_on
        if not tokenizer.chat_template:
            tokenizer.chat_template = PLAIN_TEMPLATE
        # A model can have several named templates: this selects the default one.
        self._template = tokenizer.get_chat_template()
        self._has_tool_calls = "tool_calls" in self._template
        self._has_generation_tag = bool(_GENERATION_TAG.search(self._template))

    def fingerprint(self) -> str:
        """Return the SHA-256 (hex) of everything that the encoding of a sample depends on."""
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        vocabulary = backend.to_str() if backend else json.dumps(self.tokenizer.get_vocab(), sort_keys=True)
        special = f"{self.tokenizer.bos_token_id} {self.tokenizer.eos_token_id}"
        parts = [vocabulary, special, self._template, str(self.seq_length), self.train_on, str(_FORMAT)]
        parts += [COLUMN] if self.vocabulary else []
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()

    def __call__(self, sample: Sample) -> tuple[list[int], list[bool]]:
        """Return the token ids and the loss mask of one sample, of equal length and not truncated.

        Raises:
            UserError: the chat template rejects the sample.
        """
        ids, answered = self.answers(sample)
        return ids, self.mask(answered)

    def mask(self, answered: list[bool]) -> list[bool]:
        """Return the loss mask of a sample. `answered`: which of its tokens belong to an answer."""
        return [True] * len(answered) if self.train_on == "all" else answered

    def answers(self, sample: Sample) -> tuple[list[int], list[bool]]:
        """Return the token ids of one sample, and which belong to an answer. Raises UserError as `__call__`."""
        if sample.messages:
            ids, mask = self._chat(sample)
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
        return ids, mask

    def _chat(self, sample: Sample) -> tuple[list[int], list[bool]]:
        messages = list(sample.messages)
        if not self._has_tool_calls and any("tool_calls" in message for message in messages):
            raise UserError(
                "dataset: a sample has tool calls, and the chat template of the model has none: use a model that calls tools"
            )
        # Templates without tools ignore their descriptions.
        render = partial(self.tokenizer.apply_chat_template, tools=list(sample.tools) or None, tokenize=True)
        try:
            if self._has_generation_tag:
                out = render(messages, return_dict=True, return_assistant_tokens_mask=True)
                return list(out["input_ids"]), [bool(flag) for flag in out["assistant_masks"]]
            ids = list(render(messages, return_dict=False))
            return ids, _prefix_mask(render, messages, ids)
        except Exception as error:
            # Templates are programs that belong to the model and can raise anything (for example on repeated roles).
            raise UserError(f"dataset: the chat template of the model rejects a sample: {first_line(error)}") from None


def encode_all(samples: Iterable[Sample], encoder: Encoder) -> Corpus:
    """Encode samples, truncate them at seq_length, and leave out those without a token that carries loss.

    The first token of a row is never predicted, so it does not carry loss.

    Raises:
        UserError: no sample is left, or the chat template rejects one.
    """
    all_ids: list[list[int]] = []
    all_masks: list[list[bool]] = []
    matched = _Matched()
    dropped = cut = 0
    for sample in samples:
        ids, answered = encoder.answers(sample)
        mask = encoder.mask(answered)
        cut += len(ids) > encoder.seq_length
        whole = ids
        ids, mask = ids[: encoder.seq_length], mask[: encoder.seq_length]
        if mask:
            mask[0] = False
        if not any(mask):
            dropped += 1
            continue
        all_ids.append(ids)
        all_masks.append(mask)
        if encoder.vocabulary:
            matched.add(encoder.vocabulary, sample, whole, answered, mask)
    if not all_ids:
        raise UserError(
            f"dataset: none of {dropped} samples has a token with loss within seq_length {encoder.seq_length}: "
            "increase seq_length, or set train_on=all"
        )
    starts = np.array(list(itertools.accumulate(map(len, all_ids), initial=0)), dtype=np.int64)
    return Corpus(
        np.fromiter(itertools.chain.from_iterable(all_ids), np.int32, starts[-1]),
        np.fromiter(itertools.chain.from_iterable(all_masks), np.bool_, starts[-1]),
        starts,
        dropped,
        cut,
        targets=matched.targets() if encoder.vocabulary else None,
    )


class _Matched:
    """Collects the teacher's distributions of the samples of a corpus, in order."""

    def __init__(self) -> None:
        self._taught: list[np.ndarray] = [_NO_TARGETS.taught]
        self._ids, self._values = [_NO_TARGETS.ids], [_NO_TARGETS.values]
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


def fake_corpus(spec: RunSpec, vocabulary: int) -> Corpus:
    """Return random tokens for all steps of the run, one sample of seq_length tokens per row."""
    total = spec.fake_tokens
    tokens = np.random.default_rng(spec.seed).integers(0, vocabulary, total, dtype=np.int32)
    trained: np.ndarray = np.ones(total, dtype=np.bool_)
    trained[:: spec.seq_length] = False
    return Corpus(tokens, trained, np.arange(0, total + 1, spec.seq_length, dtype=np.int64))


def encoded_dataset(spec: RunSpec, tokenizer: Any, store: Path) -> Corpus:
    """Return the encoded datasets of the spec, from the cache in `store` if an earlier start on this host wrote it.

    Raises:
        UserError: a dataset is unavailable or invalid, or no sample of it is left; or the run needs log-probabilities of a
            teacher, and the samples have none or too few that match.
    """
    if spec.fake_data:
        return fake_corpus(spec, len(tokenizer))
    encoder = Encoder(tokenizer, seq_length=spec.seq_length, train_on=spec.train_on, logprobs=spec.needs_logprobs)
    corpus = joined([_encoded_source(source, encoder, store) for source in spec.sources])
    if corpus.targets:
        _check_targets(corpus.targets)
    return corpus


def _check_targets(targets: Targets) -> None:
    """Raise UserError if no answer has log-probabilities, or more than half of those that do have other tokens."""
    found = targets.matched + targets.unmatched
    if not found:
        raise UserError(
            f"distill_alpha: no row of the dataset has {COLUMN}: make the dataset with playbooks/distill.yml and "
            "distill_alpha, set teacher to a model folder, or set distill_alpha=0"
        )
    if targets.unmatched > targets.matched:
        raise UserError(
            f"distill_alpha: the tokens of {COLUMN} differ from those of the model in {targets.unmatched} of {found} answers: "
            "train a model with the teacher's vocabulary, or set distill_alpha=0"
        )


def _encoded_source(source: DatasetSource, encoder: Encoder, store: Path) -> Corpus:
    path = Path(source.path)
    is_local = path_kind(path) in ("file", "folder")
    digest = dataset_digest(path) if is_local else f"{source.path}-{source.split}".replace("/", "--")
    # The name of an entry is the digest of the contents alone where nothing else determines the samples.
    selection = [source.columns, *((source.config, source.split) if path_kind(path) != "file" else ())]
    if any(selection):
        digest = hashlib.sha256(json.dumps([digest, selection], sort_keys=True).encode()).hexdigest()
    cache = store / "cache" / f"{digest[:64]}-{encoder.fingerprint()[:16]}.npz"
    # The contents of a hub dataset are unknown, so its cache entry cannot be verified.
    if is_local and (cached := load_corpus(cache)):
        return cached
    corpus = encode_all(read_source(source, logprobs=encoder.vocabulary is not None), encoder)
    save_corpus(corpus, cache)
    return corpus


def joined(corpora: Sequence[Corpus]) -> Corpus:
    """Return the samples of all corpora, in their order, as one corpus with `sources`; a single corpus unchanged."""
    if len(corpora) == 1:
        return corpora[0]
    ends = list(itertools.accumulate((len(corpus.tokens) for corpus in corpora), initial=0))
    starts: list[np.ndarray] = [corpus.starts[:-1] + first for corpus, first in zip(corpora, ends, strict=False)]
    return Corpus(
        np.concatenate([corpus.tokens for corpus in corpora]),
        np.concatenate([corpus.trained for corpus in corpora]),
        np.concatenate([*starts, [ends[-1]]]).astype(np.int64),
        sum(corpus.dropped for corpus in corpora),
        sum(corpus.cut for corpus in corpora),
        np.repeat(np.arange(len(corpora), dtype=np.int32), [len(corpus) for corpus in corpora]),
        join_targets([corpus.targets for corpus in corpora if corpus.targets]) if corpora[0].targets else None,
    )


def save_corpus(corpus: Corpus, path: Path) -> None:
    """Write a corpus to `path` atomically."""
    buffer = io.BytesIO()
    counts = np.array([corpus.dropped, corpus.cut], dtype=np.int64)
    arrays = {"tokens": corpus.tokens, "trained": corpus.trained, "starts": corpus.starts, "counts": counts}
    if found := corpus.targets:
        arrays |= {"taught": found.taught, "top_ids": found.ids, "top_values": found.values}
        arrays["matches"] = np.array([found.matched, found.unmatched], dtype=np.int64)
    np.savez(buffer, allow_pickle=False, **arrays)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, buffer.getvalue(), 0o600)  # it holds the text of a dataset that may be private


def load_corpus(path: Path) -> Corpus | None:
    """Return the corpus that `save_corpus` wrote, or None if the file is missing or unreadable."""
    try:
        with np.load(path, allow_pickle=False) as arrays:
            dropped, cut = arrays["counts"]
            targets = None
            if "taught" in arrays:
                matched, unmatched = map(int, arrays["matches"])
                targets = Targets(arrays["taught"], arrays["top_ids"], arrays["top_values"], matched, unmatched)
            tokens, trained, starts = (arrays[name] for name in ("tokens", "trained", "starts"))
            return Corpus(tokens, trained, starts, int(dropped), int(cut), targets=targets)
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error):
        return None


def split(corpus: Corpus, held_out: Iterable[int]) -> tuple[Corpus, Corpus]:
    """Return the corpus without the samples in `held_out`, and the corpus of only those; both keep the order."""
    out = set(held_out)

    def select(indices: list[int]) -> Corpus:
        spans = [slice(corpus.starts[i], corpus.starts[i + 1]) for i in indices]
        lengths = [span.stop - span.start for span in spans]
        return Corpus(
            np.concatenate([corpus.tokens[:0], *(corpus.tokens[span] for span in spans)]),
            np.concatenate([corpus.trained[:0], *(corpus.trained[span] for span in spans)]),
            np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int64),
            corpus.dropped,
            corpus.cut,
            None if corpus.sources is None else corpus.sources[indices],
            corpus.targets.select(spans) if corpus.targets else None,
        )

    return select([i for i in range(len(corpus)) if i not in out]), select(sorted(out))
