"""Distillation: prompts are answered by the teachers of the cluster, and students train on the answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.config import TINY, RunSpec
from trainer.config.fields import split_words
from trainer.errors import UserError
from trainer.formats import counted, printable
from trainer.inputs import user_path
from trainyard.cluster import Cluster
from trainyard.connection import Host
from trainyard.extra_vars import read_run_spec
from trainyard.ollama.answers import AnswerFile, answers_path
from trainyard.ollama.collect import Questions, Report, make_dataset
from trainyard.ollama.distill_options import OPTIONS, DistillOptions, make_distill_options
from trainyard.ollama.pool import Node
from trainyard.ollama.prompts import read_evaluation, read_prompts
from trainyard.ollama.teachers import Candidate, candidates, find_teachers
from trainyard.queue.request import OPTIONS as QUEUE_OPTIONS
from trainyard.run.errors import RunError
from trainyard.run.options import LaunchOptions
from trainyard.run.session import KeepRecord, RunSession
from trainyard.service_records import following, service_records
from trainyard.workflows.queued_students import StudentQueue, student_queue
from trainyard.workflows.students import Connect, student_table, train_students


def student_specs(
    options: DistillOptions, file: str, extra_vars: Mapping[str, Any], top: Path, report: Report
) -> list[RunSpec]:
    """Return the run specs of the students, `students` of each model of ``-e model=a,b``; the dataset is not known yet.

    Each further student of a model has the next seed. All students have the same held-out samples.

    Args:
        file: YAML file of the run spec, or empty.
        extra_vars: all variables given with ``-e``; those of the queue only with `queue`.
        top: the project's folder.

    Raises:
        UserError: an unknown name, or a bad value.
    """
    if not options.queue and (queued := [name for name in extra_vars if name in QUEUE_OPTIONS]):
        raise UserError(f"distill: {queued[0]} is an option of the queue: set queue=true")
    rest = {name: value for name, value in extra_vars.items() if name not in OPTIONS and name not in QUEUE_OPTIONS}
    if "dataset" in rest:
        raise UserError("distill: the dataset is made of the teacher's answers: set prompts instead of dataset")
    models = (split_words(rest.get("model", "")) or [""]) * max(1, options.students)
    specs: list[RunSpec] = []
    for number, model in enumerate(models, 1):
        values = rest | ({"model": model} if model else {})
        if rest.get("run") and len(models) > 1:
            values["run"] = f"{rest['run']}-{number}"
        values.setdefault("eval_start", True)
        spec = read_run_spec(file, values, top, report if number == 1 else lambda line: None)
        change: dict[str, Any] = {}
        if earlier := models[: number - 1].count(model):
            change = {"seed": (spec.seed + earlier) % 2**32, "shared_seed": spec.common_seed}
        if options.student_data != "all":
            part = f":{number}/{len(models)}" if options.student_data == "shard" else ""
            change["data_part"] = options.student_data + part
        specs.append(spec.model_copy(update=change))
    return specs


@dataclass(frozen=True)
class Distillation:
    """One call of playbooks/distill.yml.

    Attributes:
        options: options of the distillation.
        specs: specs of the students, without a dataset.
        machines: machines that may teach.
        hosts, connect, launch: for the students, as in RunSession.
        home: the project's folder.
        queue: queue to which the students are added; None trains them at once.
        keep_record: as in RunSession, for the students.
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
    keep_record: KeepRecord | None = None

    def run(self, check: bool = False) -> dict[str, Any]:
        """Ask the teachers, filter the answers, and train the students or add them to the queue.

        Returns:
            `changed`; `lines`, readable text; `dataset`, its path; `answers`, the number of its samples; `students`, the
            result.json of each student that has finished, by run; `runs`, those that wait or run in the queue.

        Raises:
            UserError: see `make_dataset`, `find_teachers` and StudentQueue.
            RunError: a student failed, or the queue does not take it.
        """
        # It imports numpy, which a program that only follows runs does not need.
        from trainyard.run.data_check import check_prompts

        options, work = self.options, self.home / ".trainyard"
        students = [spec for spec in self.specs if spec.model != TINY]
        models = [self._model(spec) for spec in students]
        if self.queue:
            self.queue.check(self.specs)
        first = self.specs[0]
        chats = read_prompts(user_path(options.prompts, "prompts"), options.system_message, first)
        for spec, model in zip(students, models, strict=True):
            check_prompts(spec, model, chats, printable(options.prompts))
        evaluation = read_evaluation(options, first)
        logprobs = any(spec.needs_logprobs for spec in self.specs)
        nodes = self._find_teachers(logprobs, check)
        names = ", ".join(printable(node.name, 40) for node in nodes)
        self.report(f"{options.teacher} teaches on {names}: {len(chats)} prompts x {options.samples}")
        if check:
            then = f", and add {counted(len(self.specs), 'run')} to the queue" if self.queue else ""
            return {"changed": True, "msg": f"would ask {len(chats) * options.samples} answers of {names}{then}"}
        with AnswerFile(answers_path(work, options.teacher)) as answers:
            questions = Questions(chats, options, first.common_seed, logprobs)
            allowed = all(spec.allow_dropped for spec in self.specs)
            how = (questions, evaluation, nodes, answers, work / "distill", self.report)
            dataset, filtered = make_dataset(*how, allow_dropped=allowed)
        self.report(f"dataset: {dataset}")
        made = {"changed": True, "dataset": str(dataset), "answers": len(filtered.samples), "students": {}}
        if not options.students:
            return made | {"lines": [*filtered.lines(), f"dataset: {dataset}"]}
        # The settings of the prompts are not those of the dataset.
        change = {
            "dataset": str(dataset),
            "dataset_split": "train",
            "dataset_config": "",
            "columns": {},
            "ignore_keys": (),
        }
        specs = [spec.model_copy(update=change) for spec in self.specs]
        if self.queue:
            added = self.queue.add(specs)
            added["lines"] = [*filtered.lines(), f"dataset: {dataset}", *added["lines"]]
            if failed := added["failed"]:
                raise RunError(_failed_line(failed, len(specs)), **added)
            return made | added
        runs = train_students(
            specs,
            self.hosts,
            self.connect,
            self.launch,
            hybrid=options.hybrid,
            home=self.home,
            report=self.report,
            keep_record=self.keep_record,
        )
        lines = [*filtered.lines(), f"dataset: {dataset}", *student_table(runs)]
        if failed := {run.run: run.error for run in runs if run.error}:
            raise RunError(_failed_line(failed, len(runs)), lines=lines)
        return made | {"lines": lines, "students": {run.run: run.result for run in runs}}

    def _model(self, spec: RunSpec) -> str:
        """Check the model of a student before the teachers work for hours; return its folder if it is on the controller."""
        alone = spec.model_copy(update={"fake_data": True})
        session = RunSession(self.hosts, self.connect, self.launch, spec=alone, home=self.home, report=self.report)
        session.prepare()
        return next((file.src for file in session.prepared.files if file.kind == "model"), "")

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
    top: Path,
    report: Report,
    check: bool,
) -> dict[str, Any]:
    """Run the distillation that the values of ``-e`` of playbooks/distill.yml specify.

    Args:
        top: the project's folder.
        report: receives lines while the teachers answer and the students train.
        check: send no prompts and change nothing; report the changes that would follow.

    Returns:
        As Distillation.run.

    Raises:
        UserError: a mistake in the values. No host has received a request yet, unless only hosts can check the value.
        RunError: a student failed, or the queue does not take it.
        InventoryError: a host is not described completely.
    """
    options, launch = make_distill_options(values), cluster.launch_of({})
    specs = student_specs(options, launch.spec, values, top, report)
    queue = None
    if options.queue:
        queue = student_queue(values, options.hybrid, cluster, launch, top, report, check, options.retry_failed)
    machines = candidates(cluster.groups["cluster"], cluster.groups.get("discovered", []), cluster.variables)
    records = service_records(cluster.groups, cluster.variable, cluster.connect, report, check)
    keep = records.keep if records else None
    with following(records, top / ".trainyard"):
        return Distillation(
            options, specs, machines, cluster.hosts, cluster.connect, launch, top, report, queue, keep
        ).run(check)
