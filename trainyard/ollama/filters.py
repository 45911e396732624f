"""Turn answers of a teacher into samples to train on. Every answer that is left out is counted under its reason."""

from __future__ import annotations

import hashlib
import re
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trainer.data.data_report import Dropped
from trainer.data.reasoning import CLOSING, MARKUP, OPENING, split_answer

REASONS = {
    "cut": "cut off at max_tokens",
    "truncated": "to a part of the prompt",
    "markup": "with chat markup",
    "empty": "empty",
    "repeated": "repeats itself",
    "evaluation": "overlap with the evaluation prompts",
    "duplicate": "exact duplicates",
    "near_duplicate": "near duplicates",
    "unanswered": "without an answer",
}
# What to do about the most frequent reason.
_REMEDIES = {
    "cut": "increase max_tokens, or set keep_cut=true",
    "truncated": "the teacher's context is too small: give the server more (OLLAMA_CONTEXT_LENGTH), or use shorter prompts",
    "markup": "add PARAMETER stop with the marker to the teacher's Modelfile",
    "near_duplicate": "set near_duplicates=0, or ask more different questions",
    "unanswered": "start the teachers, and repeat this command",
}
_REMEDY = "change the prompts or the teacher"
_LOOP = re.compile(r"(.{1,200}?)\1{3,}\s*$", re.DOTALL)
_LOOP_TAIL = 1200  # characters at the end in which a loop is searched
_LOOP_LENGTH = 60  # characters of all repeats of a loop
_COMPRESSED = 0.1  # share of its length to which no text compresses that does not repeat itself
_LONG = 400  # characters from which compression says something
_OVERLAP = 13  # words in a row that a prompt shares with an evaluation prompt


@dataclass
class Filtered:
    """The samples to train on, and how many answers were left out for each reason of REASONS.

    `samples` are records of the dataset shape `messages`. `failure`: what a server says of the first prompt without an answer.
    `thoughts`: the number of samples whose answer has its thinking; None where it is not kept.
    """

    samples: list[dict[str, Any]] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    failure: str = ""
    thoughts: int | None = None

    @property
    def dropped(self) -> Dropped:
        """The answers that are left out."""
        first = next((name for name, _ in self.counts.most_common(1)), "")
        reasons = {REASONS[name]: count for name, count in self.counts.items()}
        remedy = _REMEDIES.get(first, _REMEDY)
        if first == "unanswered" and self.failure:
            remedy = f"the server says: {self.failure}: correct this, and repeat this command"
        return Dropped("answers", len(self.samples), reasons, remedy)

    def lines(self) -> list[str]:
        """Return a readable summary of the answers that were kept and left out."""
        left_out, warning = self.dropped.by_reason, self.dropped.warning()
        lines = [f"{len(self.samples)} answers to train on" + (f"; left out: {left_out}" if left_out else "")]
        lines += [warning] if warning else []
        if self.samples and self.thoughts == 0:
            lines.append(
                "WARNING: no answer has its thinking, which thinking=keep trains: choose a teacher that shows it"
            )
        return lines


def filter_answers(
    records: Iterable[Mapping[str, Any]],
    *,
    keep_thinking: bool = False,
    keep_cut: bool = False,
    special: Iterable[str] = (),
    similarity: float = 0.9,
    evaluation: Sequence[str] = (),
) -> Filtered:
    """Return the samples of these answers.

    Args:
        records: as AnswerFile yields them.
        keep_thinking: keep the teacher's thinking, between ``<think>`` and ``</think>``, before the answer.
        keep_cut: keep answers that the limit of tokens has cut off.
        special: texts of the special tokens of the students, which no answer may have.
        similarity: Jaccard similarity of two samples (of their runs of 3 words) from which the second is left out; 0: none is.
        evaluation: texts of the evaluation prompts.
    """
    result = Filtered(thoughts=0 if keep_thinking else None)
    tokens = (token for token in sorted(special) if not OPENING.fullmatch(token) and not CLOSING.fullmatch(token))
    markup = re.compile("|".join([MARKUP.pattern, *map(re.escape, tokens)]))
    blocked = _Overlap(evaluation)
    seen: set[bytes] = set()
    near = None
    if similarity:
        from trainyard.ollama.near_duplicates import NearDuplicates  # imports numpy, which a dashboard does not need

        near = NearDuplicates(similarity)
    for record in records:
        text, open_thinking = answer_text(record, keep_thinking)
        prompt = prompt_text(record["messages"])
        whole = normalized(f"{prompt}\n{text}")
        digest = hashlib.sha256(whole.encode()).digest()
        if record.get("truncated"):
            reason = "truncated"
        elif (record["finished"] == "length" or open_thinking) and not keep_cut:
            reason = "cut"
        elif markup.search(text):
            reason = "markup"
        elif not text.strip():
            reason = "empty"
        elif repeats_itself(text):
            reason = "repeated"
        elif prompt in blocked:
            reason = "evaluation"
        elif digest in seen:
            reason = "duplicate"
        elif near and near.add(whole):
            reason = "near_duplicate"
        else:
            seen.add(digest)
            if keep_thinking:
                result.thoughts = (result.thoughts or 0) + text.startswith("<think>")
            result.samples.append({"messages": [*record["messages"], {"role": "assistant", "content": text}]})
            continue
        result.counts[reason] += 1
    return result


def answer_text(record: Mapping[str, Any], keep_thinking: bool) -> tuple[str, bool]:
    """Return the text to train on, and whether the answer ends within its thinking."""
    apart = str(record.get("thinking") or "")  # the server may have split it off
    thinking, text, is_open = split_answer(str(record["text"]), apart, record["finished"] == "length")
    if is_open:
        return f"<think>\n{thinking}" if keep_thinking else "", True
    return (f"<think>\n{thinking}\n</think>\n\n{text}" if keep_thinking and thinking else text), False


def prompt_text(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return the text of a chat without system messages."""
    return "\n".join(str(message.get("content", "")) for message in messages if message.get("role") != "system")


def normalized(text: str) -> str:
    """Return a text for comparison: lower case, with single spaces."""
    return " ".join(text.casefold().split())


def repeats_itself(text: str) -> bool:
    """Return whether a text ends in a loop, or consists of few different parts."""
    loop = _LOOP.search(text[-_LOOP_TAIL:])
    if loop and len(loop[0].strip()) >= _LOOP_LENGTH:
        return True
    data = text.encode()
    return len(data) >= _LONG and len(zlib.compress(data)) < _COMPRESSED * len(data)


class _Overlap:
    """Whether a prompt is an evaluation prompt, or shares 13 words in a row with one."""

    def __init__(self, texts: Iterable[str]) -> None:
        self._texts: set[str] = set()
        self._runs: set[str] = set()
        for text in texts:
            self._texts.add(normalized(text))
            self._runs.update(word_runs(text, _OVERLAP))

    def __contains__(self, text: str) -> bool:
        if not self._texts:
            return False
        return normalized(text) in self._texts or any(run in self._runs for run in word_runs(text, _OVERLAP))


def word_runs(text: str, length: int) -> Iterator[str]:
    """Yield all runs of `length` words of a text, in lower case."""
    words = text.casefold().split()
    return (" ".join(words[i : i + length]) for i in range(len(words) - length + 1))
