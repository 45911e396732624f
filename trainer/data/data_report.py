"""What a dataset gives a run, and what it loses: a loud line from a tenth of it, an error from a half. Standard library only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from trainer.common.errors import UserError
from trainer.common.formats import counted, printable

_MANY, _MOST = 10, 2  # a tenth, a half
NO_STOP = "the chat template ends a turn with "  # begins a note that is a warning
ALLOW = "keep_going=dropped"


@dataclass(frozen=True)
class Dropped:
    """What was kept of a dataset, and what was not.

    Attributes:
        reasons: number of the rest by the reason, a few words that follow the number.
    """

    what: str  # what is counted, in the plural, such as `samples`
    kept: int  # number of those that are trained
    reasons: Mapping[str, int] = field(default_factory=dict)
    remedy: str = ""  # what to do, an imperative

    @property
    def lost(self) -> int:
        return sum(self.reasons.values())

    @property
    def by_reason(self) -> str:
        """The numbers and their reasons, the most frequent one first; empty if nothing is lost."""
        ordered = sorted(self.reasons.items(), key=lambda item: -item[1])
        return ", ".join(f"{count} {reason}" for reason, count in ordered if count)

    def warning(self) -> str:
        """Return one loud line if more than a tenth is lost, else an empty string."""
        return f"WARNING: {self._line()}: {self.remedy}" if self._exceeds(_MANY) else ""

    def check(self, allowed: bool) -> None:
        """Raise UserError if more than a half is lost, unless that is `allowed`, or if all is."""
        if self._exceeds(_MOST) and not (allowed and self.kept):
            allow = f", or set {ALLOW} to train on the rest" if self.kept else ""
            raise UserError(f"{self._line()}, more than half: {self.remedy}{allow}")

    def _exceeds(self, part: int) -> bool:
        return self.lost * part > self.lost + self.kept

    def _line(self) -> str:
        return f"{self.lost} of {self.lost + self.kept} {self.what} are not trained ({self.by_reason})"


@dataclass(frozen=True)
class DataReport:
    """What became of the samples of a dataset.

    Attributes:
        notes: the number of samples that the chat template changes, by what it changes.
        kept_tokens, lost_tokens: all tokens that are in rows, and those beyond seq_length or of samples that were left out.
    """

    samples: int = 0  # all samples that were read
    answers: int = 0  # answers with loss; a text counts as one
    tokens: int = 0  # tokens with loss
    truncated: int = 0  # samples that were cut at seq_length, whether or not they were dropped
    dropped: Mapping[str, int] = field(default_factory=dict)  # the number of samples that were left out, by reason
    notes: Mapping[str, int] = field(default_factory=dict)
    unread: int = 0  # further samples that were not read, because that would have taken too long
    texts: int = 0  # samples that are plain text, or a prompt and a completion as text
    kept_tokens: int = 0
    lost_tokens: int = 0

    def __add__(self, other: DataReport) -> DataReport:
        return DataReport(
            self.samples + other.samples,
            self.answers + other.answers,
            self.tokens + other.tokens,
            self.truncated + other.truncated,
            _sum(self.dropped, other.dropped),
            _sum(self.notes, other.notes),
            self.unread + other.unread,
            self.texts + other.texts,
            self.kept_tokens + other.kept_tokens,
            self.lost_tokens + other.lost_tokens,
        )

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> DataReport:
        return cls(**{name: values[name] for name in cls.__dataclass_fields__ if name in values})

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def loss(self) -> Dropped:
        reason = max(self.dropped, key=lambda name: self.dropped[name], default="")
        remedy = f"{_REMEDIES.get(reason, 'correct them')} (the command `data` shows them)"
        return Dropped("samples of the dataset", self.samples - sum(self.dropped.values()), self.dropped, remedy)

    def line(self) -> str:
        loss = self.loss
        answers, tokens = counted(self.answers, "answer"), counted(self.tokens, "token")
        trained = f"{answers} and {tokens} with loss, {self.truncated} truncated" if self.tokens else "prompts alone"
        parts = [f"{counted(self.samples, 'sample')}: {trained}"]
        parts[0] += f", {loss.lost} dropped" + (f" ({printable(loss.by_reason, 400)})" if loss.lost else "")
        return "; ".join([*parts, *([f"{self.unread} further samples were not counted"] if self.unread else [])])

    def lines(self, label: str = "") -> list[str]:
        """Return the totals, and what a user must know about them. `label` begins the first line."""
        notes = [
            f"{'WARNING' if note.startswith((NO_STOP, WITHOUT_TEMPLATE)) else 'note'}: {counted(count, 'sample')}: {printable(note, 400)}"
            for note, count in self.notes.items()
        ]
        return [label + self.line(), *notes, *filter(None, [self.loss.warning(), self._cut()])]

    def _cut(self) -> str:
        """Return one loud line if more than one token in a hundred is lost, else an empty string."""
        every = self.kept_tokens + self.lost_tokens
        if self.lost_tokens * 100 <= every:
            return ""
        share = self.lost_tokens / every
        return (
            f"WARNING: {self.lost_tokens:,} of {every:,} tokens ({share:.0%}) are lost, beyond seq_length or in samples that are dropped: increase "
            "seq_length, or shorten the samples"
        )


NO_DATA = DataReport()
WITHOUT_TEMPLATE = (
    "prompt and completion are trained as plain text, without the chat template of the model"  # begins a note
)
BEYOND, NO_ANSWER = "with all answers beyond seq_length", "without an answer with loss"  # reasons
SAME = "with a chosen answer that equals the rejected one within seq_length"
TOO_LONG = "with a prompt that leaves no space for a completion"
_REMEDIES = {
    BEYOND: "increase seq_length",
    NO_ANSWER: "give them answers, or remove them",
    SAME: "increase seq_length, or remove them",
    TOO_LONG: "increase seq_length, or decrease grpo_max_tokens",
}


def _sum(one: Mapping[str, int], other: Mapping[str, int]) -> Mapping[str, int]:
    return dict(Counter(one) + Counter(other)) if one and other else one or other
