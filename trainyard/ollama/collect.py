"""Collect the answers of teachers, and make a dataset of them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.common.errors import UserError
from trainer.common.files import write_atomic
from trainer.common.formats import clock, printable, quoted, thousands
from trainer.generation.ollama_client import Answer
from trainer.generation.ollama_models import room_for
from trainer.generation.pool import Listed, PoolResult, ServerPool
from trainyard.ollama.answers import AnswerFile, answer_key
from trainyard.ollama.distill_options import DistillOptions
from trainyard.ollama.filters import Filtered, filter_answers, prompt_text
from trainyard.ollama.teacher_nodes import OllamaNode, Prompt, Teacher

Report = Callable[[str], None]


@dataclass(frozen=True)
class Questions:
    """All questions for the teachers."""

    chats: Sequence[list[dict[str, str]]]  # the prompts
    options: DistillOptions  # see DistillOptions
    seed: int = 1  # seed of the first sample of each prompt

    def prompts(self) -> Iterator[Prompt]:
        """Yield one prompt per answer, all first samples first."""
        room, think = room_for(self.chats, self.options.max_tokens), self.options.thinking == "keep"
        for sample in range(self.options.samples):
            settings = {
                "temperature": self.options.temperature,
                "num_predict": self.options.max_tokens,
                "seed": self.seed + sample,
            }
            yield from (Prompt(chat, settings, sample, room, think) for chat in self.chats)

    def __len__(self) -> int:
        return len(self.chats) * self.options.samples


Collect = Callable[[Questions, Sequence[Any], AnswerFile, Report], str]


def missing_prompts(questions: Questions, digests: Iterable[str], answers: AnswerFile) -> list[Prompt]:
    """Return the prompts that no teacher with one of these digests has answered."""
    known = list(digests)
    return [
        prompt for prompt in questions.prompts() if not any(answer_key(digest, prompt) in answers for digest in known)
    ]


def collect_answers(
    questions: Questions, nodes: Sequence[Teacher], answers: AnswerFile, report: Report, interval: float = 5.0
) -> PoolResult | None:
    """Ask the nodes what `answers` does not hold; return None if it holds everything.

    Raises:
        UserError: no node answers, see ServerPool.run; or the model of a node was replaced.
        DiskError: the answers cannot be written.
    """
    prompts = missing_prompts(questions, {node.digest for node in nodes}, answers)
    if answers.repaired:
        report(f"removed a line of {answers.repaired} bytes that a crash had cut off from {answers.path}")
    if len(prompts) < len(questions):
        report(f"{len(questions) - len(prompts)} of {len(questions)} answers are already in {answers.path}")
    if not prompts:
        return None

    def deliver(new: list[tuple[Prompt, Teacher, Answer]]) -> None:
        answers.add((prompt, node.name, node.digest, answer) for prompt, node, answer in new)

    result = ServerPool(nodes, deliver, report, interval=interval).run(Listed(prompts))
    if changed := [node.name for node in nodes if isinstance(node, OllamaNode) and node.replaced()]:
        names = ", ".join(printable(name, 40) for name in changed)
        raise UserError(
            f"teacher: the model of {names} was replaced while it answered: repeat this command to ask the new one"
        )
    return result


def wanted_records(questions: Questions, digests: Iterable[str], answers: AnswerFile) -> list[dict[str, Any]]:
    """Return the answers to these questions in the order of the questions, so that the same answers give the same file."""
    known = sorted(digests)
    prompts = list(questions.prompts())
    places = {
        key: (place, choice)
        for place, prompt in enumerate(prompts)
        for choice, key in enumerate(answer_key(digest, prompt) for digest in known)
    }
    found: dict[int, tuple[tuple[bool, int], dict[str, Any]]] = {}
    for record in answers.records():
        place, choice = places.get(record["key"], (-1, 0))
        rank = bool(record.get("truncated")), choice
        if place >= 0 and (place not in found or rank < found[place][0]):
            found[place] = rank, record
    return [found[place][1] for place in sorted(found)]


def write_dataset(samples: Sequence[Mapping[str, Any]], folder: Path, stem: str) -> Path:
    """Write samples as a JSONL file that is named after its contents; return its path. Raises UserError for no samples."""
    if not samples:
        raise UserError("distill: no answer is left to train on: see the counts above, or change the filters")
    data = "".join(json.dumps(sample) + "\n" for sample in samples).encode()
    path = folder / f"{stem}-{hashlib.sha256(data).hexdigest()[:12]}.jsonl"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, data)
    return path


def make_dataset(
    questions: Questions,
    evaluation: Sequence[str],
    nodes: Sequence[Any],
    answers: AnswerFile,
    folder: Path,
    report: Report,
    *,
    allow_dropped: bool = False,
    special: Iterable[str] = (),
    collect: Collect | None = None,
) -> tuple[Path, Filtered]:
    """Collect the missing answers, filter all, and write the dataset below `folder`; return its path.

    Raises UserError: no node answers, or too few answers are left; DiskError: the disk is full.

    Args:
        evaluation: texts of the evaluation prompts.
        nodes: the teachers: servers, or what `collect` asks.
        allow_dropped: whether less than half of the answers may be left.
        special: see `filter_answers`.
        collect: asks teachers of another kind than servers for the missing answers, and returns a line.
    """
    options, failure = questions.options, ""
    if collect:
        report(collect(questions, nodes, answers, report))
    elif result := collect_answers(questions, nodes, answers, report):
        report(pool_summary(result))
        failure = next((reason for _, reason in result.failed), "")
        for prompt, reason in result.failed[:3]:
            report(f"no answer to {quoted(prompt_text(prompt.messages))}: {reason}")
    records = wanted_records(questions, {node.digest for node in nodes}, answers)
    filtered = filter_answers(
        records,
        keep_thinking=options.thinking == "keep",
        keep_cut=options.keep_cut,
        special=special,
        similarity=options.near_duplicates,
        evaluation=evaluation,
    )
    if missing := len(questions) - len(records):
        filtered.counts["unanswered"], filtered.failure = missing, failure
    for line in filtered.lines():
        report(line)
    filtered.dropped.check(allow_dropped)
    return write_dataset(filtered.samples, folder, answers.path.stem), filtered


def pool_summary(result: PoolResult) -> str:
    """Return one line: the answers, the speed, and the part of every node."""
    count, tokens = sum(result.answers.values()), sum(result.tokens.values())
    parts = ", ".join(f"{printable(name, 40)} {number}" for name, number in result.answers.items())
    failed = f", {len(result.failed)} prompts without an answer" if result.failed else ""
    seconds = max(result.seconds, 1e-3)
    return f"{count} answers in {clock(seconds)}, {thousands(tokens / seconds)} tokens/s ({parts}){failed}"
