"""The further steps of a queued run, on the queue host: its dataset is built from answers of teachers, its model is
deployed.

Both may be repeated: answers on disk are reused, and a host that has the model is not changed. So a driver
that was killed repeats the step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from trainer.common.errors import UserError
from trainer.common.files import write_atomic
from trainyard.deploy.deploy_options import DeployOptions
from trainyard.deploy.deployment import Deployment
from trainyard.deploy.trained_run import find_run
from trainyard.ollama.answers import AnswerFile, AnswersInUseError, answers_path
from trainyard.ollama.collect import Questions, make_dataset
from trainyard.ollama.distill_options import DistillOptions
from trainyard.ollama.filters import prompt_text
from trainyard.ollama.prompts import read_prompts
from trainyard.ollama.teachers import Candidate, find_teachers
from trainyard.queue.steps import CONVERTER, EVAL_PROMPTS, PROMPTS
from trainyard.remote.digests import Digests
from trainyard.run.prepare.spec_files import dataset_entry
from trainyard.run.types import PreparedRun, Report
from trainyard.wire.connection import Host, HostConnection, InventoryError, RemoteError
from trainyard.wire.run_errors import RunError

POLL = 2.0  # s between two attempts to open answers that another run collects
ANSWERS = ".students"  # folder of the answers below that of the queue: runs share them
Connect = Callable[[Host], HostConnection]


class LeaseLostError(RunError):
    """The run has lost a host during a step; the message says why."""


def ask_teachers(
    data: Mapping[str, Any], prepared: PreparedRun, folder: Path, report: Report, lost: Callable[[], str]
) -> Path:
    """Let the teachers answer the prompts of a run; return the dataset of their answers, a file below `folder`.

    A run that has the same teacher waits while another one collects answers.

    Args:
        data: `student` of `step_data`.
        folder: folder of the run.
        lost: returns why the run must leave its hosts, or an empty string.

    Raises:
        LeaseLostError: it must leave them. The answers so far are kept.
        UserError: no teacher answers, or too few answers are left to train on.
    """
    options, machines = _read_student(data)
    paths = {file.kind: Path(file.src) for file in prepared.files if file.kind in (PROMPTS, EVAL_PROMPTS)}
    spec = prepared.spec

    def watched(line: str) -> None:
        if why := lost():
            raise LeaseLostError(why)
        report(line)

    nodes = find_teachers(
        machines,
        options.teacher,
        untrusted=options.teachers == "all",
        mixed=options.teacher_mixed,
        limit=options.answer_limit,
        report=report,
    )
    questions = Questions(read_prompts(paths[PROMPTS]), options, spec.common_seed)
    evaluation = [prompt_text(chat) for chat in read_prompts(paths[EVAL_PROMPTS])] if EVAL_PROMPTS in paths else []
    watched(f"{options.teacher} teaches on {', '.join(node.name for node in nodes)}: {len(questions)} answers")
    waiting = False
    while True:
        try:
            with AnswerFile(answers_path(folder.parent / ANSWERS, options.teacher)) as answers:
                how = (questions, evaluation, nodes, answers, folder / "dataset", watched)
                return make_dataset(*how, allow_dropped=spec.allow_dropped)[0]
        except AnswersInUseError:
            if not waiting:
                report(f"waits for the answers of {options.teacher} to another run")
            waiting = True
            if why := lost():
                raise LeaseLostError(why) from None
            time.sleep(POLL)


def with_dataset(prepared: PreparedRun, dataset: Path | None, folder: Path) -> PreparedRun:
    """Return the run for training: with this dataset, if there is one, and without files of other steps.

    Raises:
        UserError: the dataset is missing.
    """
    files = [file for file in prepared.files if file.kind not in (PROMPTS, EVAL_PROMPTS, CONVERTER)]
    if dataset is None:
        return replace(prepared, files=files)
    try:
        file = dataset_entry(dataset, Digests(folder / "digests.json"))
    except OSError as error:
        raise UserError(f"cannot read the dataset {dataset} ({error.strerror}): add the run again") from None
    origin = {**prepared.origin, "dataset": dataset.name, "dataset_sha256": file.digest}
    spec = prepared.spec.model_copy(update={"dataset": str(dataset)})
    return replace(prepared, spec=spec, origin=origin, files=[file, *files])


def has_model(run: str, hosts: Sequence[Host], connect: Connect) -> bool:
    """Return whether one of the hosts has the trained model of a run, as that of a run that is added again to be deployed."""
    try:
        connections = {host.name: connect(host) for host in hosts}
        find_run(run, {host.name: host for host in hosts}, connections, with_base=False)
    except UserError:
        return False
    return True


def deploy_model(
    data: Mapping[str, Any],
    prepared: PreparedRun,
    hosts: Sequence[Host],
    connect: Connect,
    folder: Path,
    report: Report,
) -> None:
    """Deploy the model of a run that has finished.

    Args:
        data: `deploy` of `step_data`.
        hosts: all that the run may use; one of them has the run.
        folder: folder of the run.

    Raises:
        RunError: a host did not get the model.
    """
    try:
        options = DeployOptions.model_validate(data["options"])
        if data["template"]:
            path = folder / "template.gotmpl"
            write_atomic(path, str(data["template"]).encode(), 0o600)
            options = options.model_copy(update={"template": str(path)})
        for file in prepared.files:
            if file.kind == CONVERTER:  # where converter_archive looks for it
                source = Path(file.src)
                (folder / "deploy").mkdir(exist_ok=True)
                write_atomic(folder / "deploy" / source.name, source.read_bytes(), 0o600)
        urls = {host.name: [str(url) for url in data["urls"][host.name]] for host in hosts}
        for line in Deployment(list(hosts), connect, urls, options, work=folder, report=report).deploy()["lines"]:
            report(line)
    except (RunError, RemoteError, InventoryError, UserError, ValidationError, OSError, KeyError, TypeError) as error:
        for line in getattr(error, "details", {}).get("lines", []):
            report(line)
        raise RunError(f"the run has finished, but its model is not deployed: {_text(error)}") from None


def _text(error: Exception) -> str:
    """Return an error as one line."""
    damaged = isinstance(error, ValidationError | KeyError | TypeError)
    return f"session.json is damaged ({type(error).__name__}): add the run again" if damaged else str(error)


def _read_student(data: Mapping[str, Any]) -> tuple[DistillOptions, list[Candidate]]:
    """Return the questions for the teachers, and the machines. Raises UserError."""
    try:
        return DistillOptions.model_validate(data["options"]), [Candidate(**machine) for machine in data["machines"]]
    except (ValidationError, KeyError, TypeError) as error:
        raise UserError(_text(error)) from None
