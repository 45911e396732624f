"""Scores of models that answered the same questions, with confidence intervals, and what changed from one to the other."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from trainer.common.formats import counted, printable, table, thousands
from trainer.data.reasoning import MARKUP, split_answer
from trainyard.evaluate.questions import Question, Searcher, Verdict, judge

_Z = 1.959964  # of a 95 % interval


@dataclass(frozen=True)
class Answered:
    """What a subject answered to a question."""

    text: str  # the answer, without thinking before it and turns after it
    tokens: int  # its length
    cut: bool  # it ended at the limit of tokens
    loss: float | None = None  # mean loss per token of the reference, in nats; None if it is unknown
    loss_tokens: int = 0  # number of these tokens
    unfinished: bool = False  # it ended within its thinking


def answered(
    text: str, tokens: int, cut: bool, loss: float | None = None, loss_tokens: int = 0, thinking: str = ""
) -> Answered:
    """Return what is judged of a text that a model wrote. `thinking`: what its server has separated."""
    _, text, unfinished = split_answer(text, thinking, cut)
    turn = next((part.strip() for part in MARKUP.split(text) if part.strip()), "")
    return Answered(turn, tokens, cut, loss, loss_tokens, unfinished)


@dataclass(frozen=True)
class Outputs:
    """All answers of one subject, in the order of the questions; None where there is no answer."""

    subject: str
    answers: Sequence[Answered | None]
    tokens_per_second: float


@dataclass(frozen=True)
class Score:
    """The score of a subject in one file of questions.

    `right, questions`: counts, of the questions that have an answer. `low, high`: 95 % Wilson interval of the share of
    right answers. `exact, contained`: shares among the questions that have an answer in words; None without any.
    """

    right: int
    questions: int
    low: float
    high: float
    exact: float | None
    contained: float | None
    loss: float | None  # mean loss per token of the references, in nats; None if it is unknown
    tokens: float  # mean length of an answer
    cut: int  # number of answers that ended at the limit of tokens
    unfinished: int = field(default=0, kw_only=True)  # number of those that ended within their thinking
    unanswered: int = field(default=0, kw_only=True)  # number of questions without an answer


def wilson(right: int, total: int) -> tuple[float, float]:
    """Return the 95 % Wilson interval of a share."""
    if not total:
        return 0.0, 1.0
    share, square = right / total, _Z * _Z
    centre = share + square / (2 * total)
    spread = _Z * math.sqrt(share * (1 - share) / total + square / (4 * total * total))
    return max(0.0, (centre - spread) / (1 + square / total)), min(1.0, (centre + spread) / (1 + square / total))


def score(answers: Sequence[Answered | None], found: Sequence[Verdict | None]) -> Score:
    """Return the score of one subject, from the verdicts on its answers."""
    verdicts = [verdict for verdict in found if verdict]
    given = [answer for answer in answers if answer]
    weights = [(answer.loss, answer.loss_tokens) for answer in given if answer.loss is not None]
    total = sum(tokens for _, tokens in weights)
    right = sum(verdict.right for verdict in verdicts)
    low, high = wilson(right, len(given))
    return Score(
        right=right,
        questions=len(given),
        low=low,
        high=high,
        exact=_share([verdict.exact for verdict in verdicts if verdict.exact is not None]),
        contained=_share([verdict.contained for verdict in verdicts if verdict.contained is not None]),
        loss=sum(loss * tokens for loss, tokens in weights) / total if total else None,
        tokens=sum(answer.tokens for answer in given) / max(1, len(given)),
        cut=sum(answer.cut for answer in given),
        unfinished=sum(answer.unfinished for answer in given),
        unanswered=len(answers) - len(given),
    )


def verdicts_of(questions: Sequence[Question], answers: Sequence[Answered | None]) -> list[Verdict | None]:
    """Return the verdict on every answer; None without one. Thinking that has not ended is no right answer."""
    pairs = zip(questions, answers, strict=True)
    with contextlib.closing(Searcher()) as search:
        found = [
            (judge(question, answer.text, search), answer.unfinished) if answer else None for question, answer in pairs
        ]
    return [each and (replace(each[0], right=False) if each[1] else each[0]) for each in found]


def _share(flags: Sequence[bool]) -> float | None:
    return sum(flags) / len(flags) if flags else None


def sign_test(gained: int, lost: int) -> float:
    """Return the two-sided p-value of McNemar's exact test: how likely as unequal counts are by chance."""
    total = gained + lost
    tail = sum(math.comb(total, number) for number in range(min(gained, lost) + 1))
    return min(1.0, 2 * tail / 2**total)


def summarise(questions: Sequence[Question], reports: Sequence[Outputs], show: int) -> tuple[dict[str, Any], list[str]]:
    """Return the result as data, and as readable text.

    Args:
        show: number of questions whose answers are part of the text, those that changed first.
    """
    files = list(dict.fromkeys(question.file for question in questions))
    scores: dict[str, list[dict[str, Any]]] = {}
    lines = []
    verdicts = [verdicts_of(questions, report.answers) for report in reports]
    for file in files:
        places = [place for place, question in enumerate(questions) if question.file == file]
        judged = zip(reports, verdicts, strict=True)
        found = [score([report.answers[n] for n in places], [each[n] for n in places]) for report, each in judged]
        scores[file] = [{"subject": report.subject} | asdict(each) for report, each in zip(reports, found, strict=True)]
        lines += [f"{file}: {counted(len(places), 'question')}", *_score_table(reports, found), ""]
    changes = [_change(questions, reports, verdicts, number) for number in range(1, len(reports))]
    lines += [_change_line(change) for change in changes]
    changed = {place for change in changes for place in change["gained"] + change["lost"]}
    order = sorted(range(len(questions)), key=lambda place: place not in changed)
    for place in order[:show]:
        lines += ["", f"? {printable(questions[place].text)}"]
        rows = [
            ["", report.subject, _word(verdict[place]), _shown(report.answers[place])]
            for report, verdict in zip(reports, verdicts, strict=True)
        ]
        lines += table(rows)
    result = {
        "scores": scores,
        "changes": changes,
        "tokens_per_second": {report.subject: report.tokens_per_second for report in reports},
        "questions": [_record(place, questions, reports, verdicts) for place in range(len(questions))],
    }
    return result, lines


def _word(verdict: Verdict | None) -> str:
    return "" if verdict is None else "right" if verdict.right else "wrong"


def _shown(answer: Answered | None) -> str:
    if answer and answer.unfinished:
        return "ended within its thinking"
    return printable(answer.text, 120) if answer else "no answer"


def _score_table(reports: Sequence[Outputs], scores: Sequence[Score]) -> list[str]:
    more = [name for name in ("unfinished", "unanswered") if any(getattr(each, name) for each in scores)]
    rows = [["", "right", "95 %", "exact", "loss", "tokens", "cut", *more, "tokens/s"]]
    notes = []
    for report, each in zip(reports, scores, strict=True):
        if each.unfinished:
            part = f"{each.unfinished} of {counted(each.questions, 'answer')}"
            notes.append(f"{report.subject}: {part} ended within their thinking: increase max_tokens")
        rows.append(
            [
                report.subject,
                f"{each.right} ({each.right / max(1, each.questions):.0%})",
                f"{each.low:.0%} to {each.high:.0%}",
                "" if each.exact is None else f"{each.exact:.0%}",
                "" if each.loss is None else f"{each.loss:.3f}",
                f"{each.tokens:.0f}",
                str(each.cut),
                *(str(getattr(each, name)) for name in more),
                thousands(report.tokens_per_second),
            ]
        )
    return [f"  {line}" for line in [*table(rows), *notes]]


def _change(
    questions: Sequence[Question], reports: Sequence[Outputs], verdicts: Sequence[Sequence[Verdict | None]], number: int
) -> dict[str, Any]:
    """Return the places of the questions that a subject has right and the first one has wrong (`gained`), and the reverse (`lost`)."""
    pairs = list(enumerate(zip(verdicts[0], verdicts[number], strict=True)))
    gained = [place for place, (before, after) in pairs if before and after and after.right > before.right]
    lost = [place for place, (before, after) in pairs if before and after and after.right < before.right]
    names = {"subject": reports[number].subject, "from": reports[0].subject}
    return names | {"gained": gained, "lost": lost, "p": sign_test(len(gained), len(lost))}


def _change_line(change: dict[str, Any]) -> str:
    chance = "p < 0.001" if change["p"] < 0.001 else f"p = {change['p']:.3f}"
    return (
        f"{change['from']} -> {change['subject']}: {len(change['gained'])} wrong answers became right, "
        f"{len(change['lost'])} right ones wrong ({chance})"
    )


def _record(
    place: int, questions: Sequence[Question], reports: Sequence[Outputs], verdicts: Sequence[Sequence[Verdict | None]]
) -> dict[str, Any]:
    question = questions[place]
    answers = {}
    for report, verdict in zip(reports, verdicts, strict=True):
        answer, found = report.answers[place], verdict[place]
        answers[report.subject] = asdict(answer) | asdict(found) if answer and found else None
    return {"file": question.file, "messages": list(question.messages), "answer": question.answer, "answers": answers}
