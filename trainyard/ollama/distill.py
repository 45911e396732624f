"""Distillation: prompts are answered by the teachers of the cluster, the answers are filtered, and become a dataset."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic.fields import FieldInfo

from trainer.config import TINY, RunSpec
from trainer.config.dataset_source import DatasetSource
from trainer.config.fields import MAX_SECONDS, declare, split_words
from trainer.data.files import is_hub_id
from trainer.data.samples import read_records, source_of
from trainer.data.shapes import to_sample
from trainer.errors import UserError
from trainer.files import write_atomic
from trainer.formats import clock, counted, printable, quoted, thousands
from trainer.inputs import path_kind, user_path
from trainyard.cluster import Cluster
from trainyard.connection import Host
from trainyard.extra_vars import read_run_spec
from trainyard.ollama.answers import AnswerFile, answer_keys, answers_path
from trainyard.ollama.client import Answer
from trainyard.ollama.filters import Filtered, filter_answers, prompt_text
from trainyard.ollama.pool import Node, PoolResult, Prompt, TeacherPool
from trainyard.ollama.queued_students import StudentQueue, student_queue
from trainyard.ollama.students import Connect, student_table, train_students
from trainyard.ollama.teachers import Candidate, candidates, find_teachers
from trainyard.playbook_options import PlaybookOptions
from trainyard.progress_record import SUFFIX, ProgressRecord
from trainyard.queue.request import OPTIONS as QUEUE_OPTIONS
from trainyard.run.errors import RunError
from trainyard.run.options import LaunchOptions
from trainyard.run.session import RunSession

Report = Callable[[str], None]


class DistillOptions(PlaybookOptions):
    """What the teachers are asked, and which answers count. What the students train is in the run spec."""

    teacher: str = declare("", "name of the Ollama model that answers, such as `llama3:8b`", min_length=1)
    prompts: str = declare(
        "",
        "file, folder or hub id of prompts: the dataset shapes with or without an answer, or records with `prompt`",
        min_length=1,
    )
    samples: int = declare(1, "answers to each prompt", ge=1, le=1000)
    temperature: float = declare(0.7, "temperature of the teacher", ge=0, le=100)
    max_tokens: int = declare(1024, "maximum length of an answer", unit="tokens", ge=1, le=1_000_000)
    system: str = declare("", "system message for prompts that have none")
    teachers: Literal["trusted", "all"] = declare(
        "trusted",
        "machines that receive prompts; trusted: the hosts of the cluster; all: also discovered machines that are not trusted",
    )
    teacher_mixed: bool = declare(False, "accept teachers with different digests of the model")
    teacher_pull: bool = declare(False, "pull the model on hosts that do not have it")
    teacher_copy: bool = declare(
        False, "copy the model to hosts of the play that do not have it, from a host of the cluster that does"
    )
    thinking: Literal["drop", "keep"] = declare("drop", "what happens to the teacher's thinking before an answer")
    keep_cut: bool = declare(False, "train on answers that max_tokens has cut off")
    near_duplicates: float = declare(
        0.9, "similarity of two answers from which the second is left out; 0: none is", ge=0, le=1
    )
    eval_prompts: str = declare(
        "", "evaluation prompts, as prompts; answers to prompts that overlap with them are left out"
    )
    answer_limit: float = declare(1800.0, "maximum time for one answer", unit="seconds", gt=0, le=MAX_SECONDS)
    hybrid: bool = declare(False, "train each student data-parallel over several hosts")
    queue: bool = declare(False, "add the students to the queue, which trains them, and return")
    retry_failed: bool = declare(
        False, "with `queue`, add students again that have failed, or were cancelled or stopped"
    )


OPTIONS: dict[str, FieldInfo] = dict(DistillOptions.model_fields)


def make_distill_options(values: Mapping[str, Any]) -> DistillOptions:
    """Build the options from the values of ``-e`` that are named like one. Raises UserError for a bad value."""
    given = {name: value for name, value in values.items() if name in OPTIONS}
    for name in ("teacher", "prompts"):
        if not given.get(name):
            raise UserError(f"distill: set -e {name}={'MODEL, such as llama3:8b' if name == 'teacher' else 'FILE'}")
    return DistillOptions.from_variables(given, "distill")


# Prompts ----------------------------------------------------------------------------------------------------------------


def read_prompts(path: Path, system: str = "", spec: RunSpec | None = None) -> list[list[dict[str, str]]]:
    """Return the chats of a dataset of prompts, each up to its last user message, without repeats.

    Args:
        path: a file, a folder or a hub id as of a run's `dataset`, in the trainer's shapes with or without the answer, or
            of objects with `prompt`.
        system: system message for chats that have none.
        spec: with `columns`, `dataset_split` and `dataset_config` of the prompts.

    Raises:
        UserError: the dataset cannot be read, or a record has no prompt.
    """
    if not path_kind(path) and not is_hub_id(str(path)):
        raise UserError(f"prompts: no such file: {printable(path)}: give a file or folder of this machine, or a hub id")
    source = prompt_source(path, spec)
    chats: dict[str, list[dict[str, str]]] = {}
    try:
        for where, record in read_records(source):
            try:
                chat = _chat(record, source.columns)
            except ValueError as error:
                raise UserError(f"{where.removeprefix('dataset: ')}: {error}") from None
            if system and chat[0]["role"] != "system":
                chat.insert(0, {"role": "system", "content": system})
            chats.setdefault(json.dumps(chat, sort_keys=True), chat)
    except UserError as error:
        raise UserError(f"prompts: {str(error).removeprefix('dataset: ')}") from None
    if not chats:
        raise UserError(f'prompts: {path} is empty: expected one JSON object per line, such as {{"prompt": "..."}}')
    return list(chats.values())


def prompt_source(path: Path, spec: RunSpec | None = None) -> DatasetSource:
    """Return the dataset of prompts at a path, with the settings of a run spec."""
    if spec is None:
        return source_of(path)
    return spec.model_copy(update={"dataset": str(path)}).sources[0]


def _chat(record: Any, columns: Mapping[str, str]) -> list[dict[str, str]]:
    """Return the messages of a record up to its last user message. Raises ValueError."""
    row = record
    if isinstance(record, dict):
        given = {name: value for name, value in record.items() if value is not None}  # tables have null for no answer
        listed = isinstance(given.get("prompt"), list)
        row = {"messages": given["prompt"]} if listed else {"output": "", "completion": "", **given}
    sample = to_sample(row, columns)
    if not sample.messages:
        text, trained = sample.pieces[0]
        if trained:
            raise ValueError("is plain text without a prompt: rename 'text' to 'prompt' if the teacher shall answer it")
        return [{"role": "user", "content": text}]
    messages = [{"role": message["role"], "content": str(message.get("content") or "")} for message in sample.messages]
    while messages and messages[-1]["role"] != "user":
        messages.pop()
    if not messages:
        raise ValueError("has no message of a user")
    return messages


def read_evaluation(options: DistillOptions, spec: RunSpec | None = None) -> list[str]:
    """Return the texts of the evaluation prompts, none without `eval_prompts`. Raises UserError as `read_prompts`."""
    if not options.eval_prompts:
        return []
    path = user_path(options.eval_prompts, "eval_prompts")
    return [prompt_text(chat) for chat in read_prompts(path, spec=spec)]


# Answers ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Questions:
    """Everything that the teachers are asked.

    Attributes:
        chats: the prompts.
        options: see DistillOptions.
        seed: of the first sample of each prompt.
        logprobs: whether the answers shall have the log-probabilities of their tokens.
    """

    chats: Sequence[list[dict[str, str]]]
    options: DistillOptions
    seed: int = 1
    logprobs: bool = False

    def prompts(self) -> Iterator[Prompt]:
        """Yield one prompt per answer, all first samples first."""
        for sample in range(self.options.samples):
            settings = {
                "temperature": self.options.temperature,
                "num_predict": self.options.max_tokens,
                "seed": self.seed + sample,
            }
            yield from (Prompt(chat, settings, sample, self.logprobs) for chat in self.chats)

    def __len__(self) -> int:
        return len(self.chats) * self.options.samples


def missing_prompts(questions: Questions, digests: Iterable[str], answers: AnswerFile) -> list[Prompt]:
    """Return the prompts that no teacher with one of these digests has answered."""
    known = list(digests)
    return [
        prompt
        for prompt in questions.prompts()
        if not any(key in answers for digest in known for key in answer_keys(digest, prompt))
    ]


def collect_answers(
    questions: Questions, nodes: Sequence[Node], answers: AnswerFile, report: Report, interval: float = 5.0
) -> PoolResult | None:
    """Ask the nodes what `answers` does not hold; return None if it holds everything.

    Raises:
        UserError: no node answers; see TeacherPool.run.
        DiskError: the answers cannot be written.
    """
    prompts = missing_prompts(questions, {node.digest for node in nodes}, answers)
    if answers.repaired:
        report(f"removed a line of {answers.repaired} bytes that a crash had cut off from {answers.path}")
    if len(prompts) < len(questions):
        report(f"{len(questions) - len(prompts)} of {len(questions)} answers are already in {answers.path}")
    if not prompts:
        return None

    def deliver(new: list[tuple[Prompt, Node, Answer]]) -> None:
        answers.add((prompt, node.name, node.digest, answer) for prompt, node, answer in new)

    known = {"teacher": questions.options.teacher, "before": len(questions) - len(prompts)}
    with ProgressRecord(answers.path.with_suffix(SUFFIX), "distill", **known) as record:
        pool = TeacherPool(nodes, deliver, report, interval=interval, watch=lambda found: record.update(**found))
        result = pool.run(prompts)
        record.update(unanswered=len(result.failed))
    return result


def wanted_records(questions: Questions, digests: Iterable[str], answers: AnswerFile) -> list[dict[str, Any]]:
    """Return the answers to these questions in the order of the questions, so that the same answers give the same file."""
    known = sorted(digests)
    prompts = list(questions.prompts())
    places = {
        key: (place, choice)
        for place, prompt in enumerate(prompts)
        for choice, key in enumerate(key for digest in known for key in answer_keys(digest, prompt))
    }
    found: dict[int, tuple[int, dict[str, Any]]] = {}
    for record in answers.records():
        place, choice = places.get(record["key"], (-1, 0))
        if place >= 0 and (place not in found or choice < found[place][0]):
            found[place] = choice, record
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
    nodes: Sequence[Node],
    answers: AnswerFile,
    folder: Path,
    report: Report,
) -> tuple[Path, Filtered]:
    """Collect the missing answers, filter all, and write the dataset below `folder`; return its path.

    Args:
        evaluation: texts of the evaluation prompts.

    Raises:
        UserError: no node answers, or no answer is left.
        DiskError: the disk is full.
    """
    options = questions.options
    result = collect_answers(questions, nodes, answers, report)
    if result:
        report(pool_summary(result))
        for prompt, reason in result.failed[:3]:
            report(f"no answer to {quoted(prompt_text(prompt.messages))}: {reason}")
    records = wanted_records(questions, {node.digest for node in nodes}, answers)
    filtered = filter_answers(
        records,
        keep_thinking=options.thinking == "keep",
        keep_cut=options.keep_cut,
        similarity=options.near_duplicates,
        evaluation=evaluation,
        logprobs=questions.logprobs,
    )
    for line in filtered.lines():
        report(line)
    return write_dataset(filtered.samples, folder, answers.path.stem), filtered


def pool_summary(result: PoolResult) -> str:
    """Return one line: the answers, the speed, and the part of every node."""
    count, tokens = sum(result.answers.values()), sum(result.tokens.values())
    parts = ", ".join(f"{printable(name, 40)} {number}" for name, number in result.answers.items())
    failed = f", {len(result.failed)} prompts without an answer" if result.failed else ""
    seconds = max(result.seconds, 1e-3)
    return f"{count} answers in {clock(seconds)}, {thousands(tokens / seconds)} tokens/s ({parts}){failed}"


# Students ---------------------------------------------------------------------------------------------------------------


def student_specs(
    file: str, extra_vars: Mapping[str, Any], top: Path, report: Report, *, queued: bool = False
) -> list[RunSpec]:
    """Return one run spec per model of ``-e model=a,b``; the dataset is not known yet.

    Args:
        file: YAML file of the run spec, or empty.
        extra_vars: all variables given with ``-e``.
        top: the project's folder.
        queued: whether the options of the queue may be among the variables.

    Raises:
        UserError: an unknown name, or a bad value.
    """
    if not queued and (options := [name for name in extra_vars if name in QUEUE_OPTIONS]):
        raise UserError(f"distill: {options[0]} is an option of the queue: set queue=true")
    rest = {name: value for name, value in extra_vars.items() if name not in OPTIONS and name not in QUEUE_OPTIONS}
    if "dataset" in rest:
        raise UserError("distill: the dataset is made of the teacher's answers: set prompts instead of dataset")
    models = split_words(rest.get("model", "")) or [""]
    specs = []
    for number, model in enumerate(models, 1):
        values = rest | ({"model": model} if model else {})
        if rest.get("run") and len(models) > 1:
            values["run"] = f"{rest['run']}-{number}"
        values.setdefault("eval_start", True)
        specs.append(read_run_spec(file, values, top, report if number == 1 else lambda line: None))
    return specs


@dataclass(frozen=True)
class Distillation:
    """One call of playbooks/distill.yml.

    Attributes:
        options: what is asked.
        specs: of the students, without a dataset.
        machines: that may teach.
        hosts, connect, launch: of the students, as of RunSession.
        home: the project's folder.
        queue: to which the students are added; None trains them at once.
    """

    options: DistillOptions
    specs: Sequence[RunSpec]
    machines: Sequence[Candidate]
    hosts: Sequence[Host]
    connect: Connect
    launch: LaunchOptions
    home: Path
    report: Report = print
    queue: StudentQueue | None = None

    def run(self, check: bool = False) -> dict[str, Any]:
        """Ask the teachers, filter the answers, and train the students or add them to the queue.

        Returns:
            `changed`; `lines` for a person; `students`, the result.json of each student that has finished, by run; `runs`,
            those that wait or run in the queue.

        Raises:
            UserError: see `make_dataset`, `find_teachers` and StudentQueue.
            RunError: a student failed, or the queue does not take it.
        """
        options, work = self.options, self.home / ".trainyard"
        for spec in self.specs:
            if spec.model != TINY:  # check the model before the teachers work for hours
                alone = spec.model_copy(update={"fake_data": True})
                RunSession(
                    self.hosts, self.connect, self.launch, spec=alone, home=self.home, report=self.report
                ).prepare()
        if self.queue:
            self.queue.check(self.specs)
        first = self.specs[0]
        chats = read_prompts(user_path(options.prompts, "prompts"), options.system, first)
        evaluation = read_evaluation(options, first)
        logprobs = any(spec.needs_logprobs for spec in self.specs)
        nodes = self._find_teachers(logprobs, check)
        names = ", ".join(printable(node.name, 40) for node in nodes)
        self.report(f"{options.teacher} teaches on {names}: {len(chats)} prompts x {options.samples}")
        if check:
            then = f", and add {counted(len(self.specs), 'run')} to the queue" if self.queue else ""
            return {"changed": True, "msg": f"would ask {len(chats) * options.samples} answers of {names}{then}"}
        with AnswerFile(answers_path(work, options.teacher)) as answers:
            questions = Questions(chats, options, first.seed, logprobs)
            dataset, filtered = make_dataset(questions, evaluation, nodes, answers, work / "distill", self.report)
        self.report(f"dataset: {dataset}")
        # The settings of the prompts' columns are not those of the dataset.
        change = {"dataset": str(dataset), "dataset_split": "train", "dataset_config": "", "columns": {}}
        specs = [spec.model_copy(update=change) for spec in self.specs]
        if self.queue:
            added = self.queue.add(specs)
            added["lines"] = [*filtered.lines(), f"dataset: {dataset}", *added["lines"]]
            if failed := added["failed"]:
                raise RunError(_failed_line(failed, len(specs)), **added)
            return added
        runs = train_students(
            specs,
            self.hosts,
            self.connect,
            self.launch,
            hybrid=options.hybrid,
            home=self.home,
            report=self.report,
        )
        lines = [*filtered.lines(), f"dataset: {dataset}", *student_table(runs)]
        if failed := {run.run: run.error for run in runs if run.error}:
            raise RunError(_failed_line(failed, len(runs)), lines=lines)
        return {"changed": True, "lines": lines, "students": {run.run: run.result for run in runs}}

    def _find_teachers(self, logprobs: bool, check: bool) -> Sequence[Node]:
        """Return the servers that teach. Raises UserError."""
        options = self.options
        try:
            return find_teachers(
                self.machines,
                options.teacher,
                untrusted=options.teachers == "all",
                mixed=options.teacher_mixed,
                pull=options.teacher_pull and not check,
                logprobs=logprobs,
                limit=options.answer_limit,
                report=self.report,
            )
        except UserError as error:
            if self.queue and (why := self.queue.teacher_run(options.teacher)):
                raise UserError(f"{error}; {why}") from None
            raise


def _failed_line(failed: Mapping[str, str], students: int) -> str:
    """Return the message of a call with failed students. `failed`: why, by run."""
    run, why = next(iter(failed.items()))
    more = f" ({len(failed)} of {students} students failed)" if students > 1 else ""
    return f"{run}: {why}{more}"


def distill(
    values: Mapping[str, Any],
    cluster: Cluster,
    variables: Mapping[str, Mapping[str, Any]],
    top: Path,
    report: Report,
    check: bool,
) -> dict[str, Any]:
    """Do what the values of ``-e`` of playbooks/distill.yml say.

    Args:
        variables: of every host, as of `candidates`.
        top: the project's folder.
        report: receives lines while the teachers answer and the students train.
        check: ask and change nothing; say what would change.

    Returns:
        As Distillation.run.

    Raises:
        UserError: a mistake in the values. No host has been asked yet, unless only hosts can know.
        RunError: a student failed, or the queue does not take it.
        InventoryError: a host is not described completely.
    """
    options, launch = make_distill_options(values), cluster.launch_of({})
    specs = student_specs(launch.spec, values, top, report, queued=options.queue)
    queue = None
    if options.queue:
        queue = student_queue(values, options.hybrid, cluster, launch, top, report, check, options.retry_failed)
    machines = candidates(cluster.groups["cluster"], cluster.groups.get("discovered", []), variables)
    connect: Connect = lambda host: cluster.connect(host.name)  # noqa: E731
    return Distillation(options, specs, machines, cluster.hosts, connect, launch, top, report, queue).run(check)
