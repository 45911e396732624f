"""Encode samples as tokens: chat template, loss mask, and truncation at seq_length."""

import datetime
import hashlib
import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from trainer.common.errors import UserError
from trainer.common.formats import quoted
from trainer.common.inputs import path_kind
from trainer.config import RunSpec
from trainer.config.dataset_source import DatasetSource
from trainer.config.methods import METHODS, Data
from trainer.data.answer_spans import AnswerFinder, AnswerSpans
from trainer.data.corpus import Corpus, joined, load_corpus, save_corpus
from trainer.data.data_report import BEYOND, NO_ANSWER, NO_DATA, NO_STOP, SAME, TOO_LONG, WITHOUT_TEMPLATE, DataReport
from trainer.data.dataset_files import dataset_digest
from trainer.data.hf_template import ChatTemplate, TemplateError
from trainer.data.plain_template import PLAIN_TEMPLATE
from trainer.data.samples import read_source
from trainer.data.shapes import Sample, with_system_in_first_question
from trainer.data.text_tokenizer import TextTokenizer

_NO_END = "nothing ends the last answer: the tokenizer of the model has no eos_token"
_EMPTY = "an answer is empty, and its end alone is trained"
_LONG = "a text is longer than seq_length and becomes several rows"
_FORMAT = 4  # version of the cached encoding: increment it when the encoding of a sample changes


@dataclass(frozen=True)
class Encoded:
    """An encoded sample, not truncated."""

    ids: list[int]  # its tokens
    answered: list[bool]  # which of them belong to an answer with loss, of equal length
    notes: tuple[str, ...] = ()  # what the chat template changes
    rejected: "Encoded | None" = None  # the rejected sequence of a pair, of which this is the chosen one
    desirable: bool | None = None  # the label of the answer
    is_text: bool = False  # whether all of it is a text, which is cut into rows where it is longer than one

    def count_answers(self, mask: Sequence[bool]) -> int:
        """Return the number of answers that have a token with loss. `mask`: the loss mask of the tokens that are kept."""
        kept = [flag for flag, answered in zip(mask, self.answered, strict=False) if answered or flag]
        if not any(kept):
            return 0
        # Answers are runs of flags; two answers without a token between them count as one.
        runs = [list(group) for flag, group in itertools.groupby(range(len(mask)), lambda i: self.answered[i]) if flag]
        return max(1, sum(any(mask[i] for i in run) for run in runs))


@dataclass(frozen=True)
class Fitted:
    """What a run keeps of an encoded sample.

    Attributes:
        ids, trained: its tokens within seq_length, and which of them carry loss.
    """

    ids: list[int]
    trained: list[bool]
    answers: int  # number of answers with loss
    truncated: int = 0  # number of further tokens
    dropped: str = ""  # why the sample is left out; empty if it is not
    notes: tuple[str, ...] = ()  # what the chat template changes
    rejected: "Fitted | None" = None  # the rejected sequence of a pair; `dropped` is that of the pair
    desirable: bool | None = None  # the label of the answer

    @property
    def report(self) -> DataReport:
        """The report of a dataset of this sample alone."""
        parts = [self, *filter(None, [self.rejected])]
        notes = dict.fromkeys(itertools.chain.from_iterable(part.notes for part in parts), 1)
        dropped = {self.dropped: 1} if self.dropped else {}
        tokens, truncated = sum(sum(part.trained) for part in parts), any(part.truncated for part in parts)
        every, lost = sum(len(part.ids) for part in parts), sum(part.truncated for part in parts)
        kept, lost = (0, every + lost) if self.dropped else (every, lost)
        return DataReport(
            1,
            sum(part.answers for part in parts),
            tokens,
            truncated,
            dropped,
            notes,
            kept_tokens=kept,
            lost_tokens=lost,
        )


class Encoder:
    """Encodes samples as (token ids, loss mask) with one tokenizer."""

    def __init__(
        self,
        tokenizer: Any,
        *,
        seq_length: int,
        train_on: str,
        system: str = "keep",
        data: Data = "answers",
        today: datetime.datetime | None = None,
        rows: int | None = None,
        prompt_length: int = 0,
    ) -> None:
        """Args:
        tokenizer: one of transformers, or a `TextTokenizer`.
        system: the field of the run spec.
        data: what the samples are, see `METHODS`.
        today: the date of the run, for templates that print one; None for now.
        rows: of the model's embedding; None for that of a `TextTokenizer`, or if it is unknown.
        prompt_length: maximum number of tokens of a sample that is a prompt without an answer.

        Raises UserError: the chat template is not valid.
        """
        self.prompt_length = prompt_length
        self.seq_length, self.train_on, self._system, self.data = seq_length, train_on, system, data
        self._text = tokenizer if isinstance(tokenizer, TextTokenizer) else TextTokenizer.of(tokenizer)
        self._today = today or datetime.datetime.now()
        self._rows = rows or self._text.rows

    @classmethod
    def of(cls, spec: RunSpec, tokenizer: Any, date: datetime.date | None = None, rows: int | None = None) -> "Encoder":
        """Return the encoder of a run. Raises UserError: the chat template is not valid.

        `tokenizer`: as for the class. `date`: the date of the run, for templates that print one; None for that of the
        spec, or today. `rows`: as for the class.
        """
        return cls(
            tokenizer,
            seq_length=spec.seq_length,
            train_on=spec.train_on,
            system=spec.system,
            data=METHODS[spec.method].data,
            today=datetime.datetime.combine(date or datetime.date.today(), datetime.time()),
            rows=rows,
            prompt_length=spec.prompt_length,
        )

    @cached_property
    def template(self) -> ChatTemplate:
        """The default chat template. Raises UserError if there is none, or it is not valid."""
        if not self._text.template:
            raise UserError("model: it has chat templates by name, and none of them is 'default': name one so")
        return ChatTemplate(self._text.template, self._text.tokens, self._today)

    @cached_property
    def _finder(self) -> AnswerFinder:
        return AnswerFinder(self.template, self._text.added)

    @cached_property
    def _tool_finder(self) -> AnswerFinder:
        """That of chats with tools, for which a model can have another template."""
        if not self._text.tool_template:
            return self._finder
        template = ChatTemplate(self._text.tool_template, self._text.tokens, self._today)
        return AnswerFinder(template, self._text.added)

    def _finder_of(self, sample: Sample) -> AnswerFinder:
        return self._tool_finder if sample.tools else self._finder

    def fingerprint(self) -> str:
        """Return the SHA-256 (hex) of everything that the encoding of a sample depends on."""
        text = self._text
        parts = [
            text.vocabulary,
            f"{text.begin} {text.eos}",
            text.template + text.tool_template,
            str(self.seq_length),
            self.train_on,
            str(_FORMAT),
        ]
        parts += [json.dumps(dict(text.tokens), sort_keys=True), self._system]
        parts += [self._today.isoformat()] if self.has_date else []
        parts += [str(self._rows)] if self._rows else []  # a token outside is refused
        parts += [self.data] if self.data != "answers" else []
        parts += [str(self.prompt_length)] if self.data == "prompts" else []
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()

    @property
    def has_date(self) -> bool:
        """Whether a chat template asks for the date."""
        return "strftime_now" in self._text.template + self._text.tool_template

    def mask(self, answered: list[bool]) -> list[bool]:
        """Return the loss mask of a sample. `answered`: which of its tokens belong to an answer."""
        return [True] * len(answered) if self.train_on == "all" else answered

    def encode(self, sample: Sample) -> Encoded:
        """Return the encoding of one sample. The sequences of a pair are encoded one by one, each as a whole.

        Raises UserError: the chat template rejects the sample, or leaves out a part of it.
        """
        if sample.rejected:
            chosen = self.encode(replace(sample, rejected=None))
            return replace(chosen, rejected=self.encode(sample.rejected))
        return replace(self._encode_one(sample), desirable=sample.desirable)

    def _encode_one(self, sample: Sample) -> Encoded:
        if self.data == "prompts":
            encoded = self._prompt(sample)
        else:
            encoded = self._chat(sample) if sample.messages else self._raw(sample)
        if self._rows is not None and encoded.ids and max(encoded.ids) >= self._rows:
            token = next(number for number in encoded.ids if number >= self._rows)
            raise UserError(
                f"{sample.where or 'dataset'}: has the token {quoted(self._text.decode([token]))} (id {token}), and the embedding of the "
                f"model has {self._rows} rows: use the tokenizer of this model, or extend its embedding "
                "(resize_token_embeddings) and save it"
            )
        return encoded

    def rows(self, sample: Sample) -> tuple[list[Fitted], DataReport]:
        """Return what a run keeps of a sample, one part for each row of a long text, and its report. Raises UserError as `encode`.

        Neighbouring rows share a token, because the first token of a row is never predicted.
        """
        whole, size = self.encode(sample), self.seq_length
        if not whole.is_text or len(whole.ids) <= size:
            fitted = self.fit(whole)
            return [fitted], replace(fitted.report, texts=int(not sample.messages))
        starts = range(0, len(whole.ids) - 1, size - 1)
        parts = [
            self.fit(replace(whole, ids=whole.ids[i : i + size], answered=whole.answered[i : i + size])) for i in starts
        ]
        report = sum((part.report for part in parts), NO_DATA)
        return parts, replace(report, samples=1, answers=1, texts=1, notes={**dict.fromkeys(report.notes, 1), _LONG: 1})

    def fit(self, encoded: Encoded) -> Fitted:
        """Return what a run keeps of an encoded sample; a pair is dropped as a whole."""
        if self.data == "prompts":
            dropped = TOO_LONG if len(encoded.ids) > self.prompt_length else ""
            return Fitted(encoded.ids, encoded.answered, 0, 0, dropped)
        one = self._fit_one(encoded)
        if encoded.rejected is None:
            return one
        other = self._fit_one(encoded.rejected)
        same = SAME if (one.ids, one.trained) == (other.ids, other.trained) else ""
        return replace(one, rejected=other, dropped=one.dropped or other.dropped or same)

    def _fit_one(self, encoded: Encoded) -> Fitted:
        """Return what a run keeps of a sequence. Its first token is never predicted, so it carries no loss."""
        ids, mask = encoded.ids[: self.seq_length], self.mask(encoded.answered)[: self.seq_length]
        trained = [False, *mask[1:]] if mask else mask
        dropped = ""
        if not any(trained):
            dropped = BEYOND if any(encoded.answered[1:]) else NO_ANSWER
        answers, truncated = encoded.count_answers(trained), len(encoded.ids) - len(ids)
        return Fitted(ids, trained, answers, truncated, dropped, encoded.notes, desirable=encoded.desirable)

    def decode(self, ids: list[int]) -> str:
        """Return the text of tokens, with that of special tokens."""
        return self._text.decode(ids)

    def check(self, sample: Sample) -> AnswerSpans | None:
        """Render a chat and locate its answers, without encoding it; None for a text. Raises UserError as `encode`."""
        if sample.rejected:
            self.check(sample.rejected)
        if not sample.messages or self.data == "prompts":
            return None
        if sample.has_weights and self.train_on == "all":
            raise UserError(
                f"{sample.where or 'dataset'}: has a message without loss (weight, train or loss), and train_on=all trains every token: set "
                "train_on=answer, or keep_going=weight,train,loss"
            )
        prepend = self._system == "prepend"
        messages = with_system_in_first_question(sample.messages) if prepend else sample.messages
        silent = {index - (len(sample.messages) - len(messages)) for index in sample.silent}
        try:
            finder = self._finder_of(sample)
            messages = [self._without_end(message, finder.end_of_turn.strip()) for message in messages]
            return finder(messages, sample.tools, sample.variables, silent)
        except TemplateError as error:
            raise UserError(f"{sample.where or 'dataset'}: {self._problem(error, messages)}") from None

    def _prompt(self, sample: Sample) -> Encoded:
        """Encode a prompt, with the header of an answer if it is a chat. Raises UserError as `encode`."""
        if sample.messages:
            prepend = self._system == "prepend"
            messages = with_system_in_first_question(sample.messages) if prepend else sample.messages
            try:
                rendered = self._finder_of(sample).template.render_blocks(
                    messages, tools=sample.tools, variables=sample.variables, generation_prompt=True
                )
                ids = self._text.encode(rendered.text, [])[0]
            except TemplateError as error:
                raise UserError(f"{sample.where or 'dataset'}: {self._problem(error, messages)}") from None
        else:
            ids = self._text.encode(sample.pieces[0][0], [])[0]
            ids = [*self._missing_begin(ids), *ids]
        if not ids:
            raise UserError(f"{sample.where or 'dataset'}: the prompt is empty: write one, or remove the record")
        return Encoded(ids, [False] * len(ids))

    def _without_end(self, message: Mapping[str, Any], end: str) -> Mapping[str, Any]:
        """Return an answer without the text of the token that ends it, which the template writes too; other messages unchanged."""
        content = message.get("content")
        if message["role"] != "assistant" or not isinstance(content, str) or not end:
            return message
        text = content.rstrip()
        for token in filter(None, (end, self._text.tokens.get("eos_token", ""))):
            text = text.removesuffix(token).rstrip()
        return message if text == content.rstrip() else {**message, "content": text}

    def _chat(self, sample: Sample) -> Encoded:
        found = self.check(sample)
        assert found is not None
        ids, answered = self._text.encode(found.text, found.spans)
        if found.open_end and self._text.eos is not None and ids[-1:] != [self._text.eos]:
            ids, answered = [*ids, self._text.eos], [*answered, True]
        notes = [f"the chat template leaves out the {what} of earlier answers" for what in sorted({*found.left_out})]
        if found.open_end and self._text.eos is None:
            notes.append(_NO_END)
        end = self._finder_of(sample).end_of_turn.strip()
        if not any(token and token in end for token in self._text.added) and end:
            notes.append(
                f"{NO_STOP}{quoted(end)}, which is no special token of this tokenizer: no program stops there: take the tokenizer of the chat "
                "model, or a template that ends with its eos_token"
            )
        if any(_is_empty(message) for index, message in enumerate(sample.messages) if index not in sample.silent):
            notes.append(_EMPTY)
        return Encoded(ids, answered, tuple(notes))

    def _raw(self, sample: Sample) -> Encoded:
        """Encode prompt and completion, or a text, as one string. It has one BOS, if the tokenizer adds one, and one EOS, also if the text has them."""
        text = "".join(piece for piece, _ in sample.pieces)
        ends = list(itertools.accumulate((len(piece) for piece, _ in sample.pieces), initial=0))
        spans = [(ends[i], ends[i + 1]) for i, (piece, trained) in enumerate(sample.pieces) if trained and piece]
        ids, answered = self._text.encode(text, spans)
        end = self._text.tokens.get("eos_token", "")
        begin = self._missing_begin(ids)
        ids, answered = [*begin, *ids], [False] * len(begin) + answered
        if self._text.eos is not None and not (end and text.rstrip().endswith(end) and len(ids) > 1):
            ids, answered = [*ids, self._text.eos], [*answered, bool(sample.pieces[-1][1])]
        notes = [_EMPTY] if sample.pieces[-1][1] and not sample.pieces[-1][0].strip() else []
        notes += [] if self._text.eos is not None else [_NO_END]
        if len(sample.pieces) > 1 and self._text.template != PLAIN_TEMPLATE:
            notes.append(f"{WITHOUT_TEMPLATE}: for questions and answers, map the columns to instruction and output")
        return Encoded(ids, answered, tuple(notes), is_text=all(trained for _, trained in sample.pieces))

    def _missing_begin(self, ids: list[int]) -> tuple[int, ...]:
        """Return what the tokenizer puts before a text, unless the text has it."""
        begin = self._text.begin
        return () if tuple(ids[: len(begin)]) == begin else begin

    def _problem(self, error: TemplateError, messages: Sequence[Mapping[str, Any]]) -> str:
        """Return what the chat template does not accept, and what to do."""
        reason = str(error)
        if "rejects a conversation" not in reason:
            return reason.replace("chat template: it ", "the chat template of the model ").replace(
                "chat template:", "the chat template of the model:"
            )
        said = reason.partition("rejects a conversation: ")[2]
        if messages[0]["role"] == "system" and self._renders(messages[1:]):
            return f"the chat template of the model has no system role ({said}): remove it, or set system=prepend"
        roles = [message["role"] for message in messages if message["role"] != "system"]
        if any(first == second for first, second in itertools.pairwise(roles)) or roles[:1] != ["user"]:
            return (
                f"the chat template of the model rejects the order of the roles {', '.join(roles[:8])} ({said}): "
                "join the messages of one role that follow each other, and begin with user"
            )
        return f"the chat template of the model rejects the sample: {said}"

    def _renders(self, messages: Sequence[Mapping[str, Any]]) -> bool:
        try:
            self.template.render(messages, False)
        except TemplateError:
            return False
        return True


def _is_empty(message: Mapping[str, Any]) -> bool:
    says = message["content"].strip() or message.get("tool_calls") or message.get("reasoning_content")
    return message["role"] == "assistant" and not says


def encode_all(samples: Iterable[Sample], encoder: Encoder) -> Corpus:
    """Encode samples, truncate them at seq_length, cut texts there into rows, and leave out those without a token that carries loss.

    The first token of a row is never predicted, so it does not carry loss. Raises UserError: no sample is left, or the
    chat template rejects one.
    """
    all_ids: list[list[int]] = []
    all_masks: list[list[bool]] = []
    records: list[Mapping[str, Any]] = []
    splits: list[int] = []
    labels: list[bool] = []
    report = NO_DATA
    for sample in samples:
        parts, one = encoder.rows(sample)
        report += one
        for fitted in parts:
            if fitted.dropped:
                continue
            other = fitted.rejected
            all_ids.append(fitted.ids + (other.ids if other else []))
            all_masks.append(fitted.trained + (other.trained if other else []))
            records += [sample.record] if sample.record else []
            splits += [len(fitted.ids)] if other else []
            labels += [] if fitted.desirable is None else [fitted.desirable]
    if not all_ids and encoder.data == "prompts":
        raise UserError(
            f"dataset: none of {report.samples} prompts has at most {encoder.prompt_length} tokens, which seq_length leaves for "
            "it: increase seq_length"
        )
    if not all_ids:
        raise UserError(
            f"dataset: none of {report.samples} samples has a token with loss within seq_length {encoder.seq_length}: "
            "increase seq_length, or set train_on=all"
        )
    starts = np.array(list(itertools.accumulate(map(len, all_ids), initial=0)), dtype=np.int64)
    return Corpus(
        np.fromiter(itertools.chain.from_iterable(all_ids), np.int32, starts[-1]),
        np.fromiter(itertools.chain.from_iterable(all_masks), np.bool_, starts[-1]),
        starts,
        report,
        splits=np.array(splits, dtype=np.int64) if splits else None,
        desirable=np.array(labels, dtype=np.bool_) if labels else None,
        records=records or None,
    )


def fake_corpus(spec: RunSpec, vocabulary: int) -> Corpus:
    """Return random tokens for all steps of the run, one sample of seq_length tokens per row."""
    total = spec.fake_tokens
    tokens = np.random.default_rng(spec.seed).integers(0, vocabulary, total, dtype=np.int32)
    trained: np.ndarray = np.ones(total, dtype=np.bool_)
    trained[:: spec.seq_length] = False
    starts: np.ndarray = np.arange(0, total + 1, spec.seq_length, dtype=np.int64)
    rows = len(starts) - 1
    return Corpus(tokens, trained, starts, DataReport(rows, rows, int(trained.sum())))


def encoded_dataset(
    spec: RunSpec, tokenizer: Any, folder: Path, date: datetime.date | None = None, rows: int | None = None
) -> Corpus:
    """Return the encoded datasets of the spec, from the cache in `folder` if an earlier start on this host wrote it.

    `date`: the date of the run, for templates that print one; None for that of the spec, or today. `rows`: of the
    model's embedding; None if that is unknown. Raises UserError: a dataset is unavailable or invalid, or no sample of
    it is left.
    """
    if spec.fake_data:
        return fake_corpus(spec, len(tokenizer))
    encoder = Encoder.of(spec, tokenizer, date, rows)
    return joined([_encoded_source(source, encoder, folder) for source in spec.sources])


def _encoded_source(source: DatasetSource, encoder: Encoder, folder: Path) -> Corpus:
    path = Path(source.path)
    is_local = path_kind(path) in ("file", "folder")
    digest = dataset_digest(path) if is_local else f"{source.path}-{source.split}".replace("/", "--")
    # The name of an entry is the digest of the contents alone where nothing else determines the samples.
    selection = [
        source.columns,
        source.ignore_keys,
        *((source.config, source.split) if path_kind(path) != "file" else ()),
    ]
    if any(selection):
        digest = hashlib.sha256(json.dumps([digest, selection], sort_keys=True).encode()).hexdigest()
    cache = folder / "cache" / f"{digest[:64]}-{encoder.fingerprint()[:16]}.npz"
    # The contents of a hub dataset are unknown, so its cache entry cannot be verified.
    if is_local and (cached := load_corpus(cache)):
        return cached
    corpus = encode_all(read_source(source, data=encoder.data), encoder)
    save_corpus(corpus, cache)
    return corpus
