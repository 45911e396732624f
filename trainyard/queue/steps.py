"""The steps of a queued run besides training: teachers answer its prompts before it, and its model is deployed after
it.

The controller checks the options here, and sends them with the run. The driver does the steps: see step_work.py.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic.fields import FieldInfo

from trainer.common.errors import UserError
from trainer.common.files import sha256_file, write_atomic
from trainer.common.inputs import user_path
from trainer.config import TINY, RunSpec
from trainer.config.fields import declare
from trainer.generation.ollama_client import is_server_url
from trainyard import front_end
from trainyard.deploy.converter import converter_archive
from trainyard.deploy.deploy_options import MODEL_NAME_RULES, DeployOptions
from trainyard.inventory import Cluster
from trainyard.ollama.distill_options import AnswerOptions, DistillOptions
from trainyard.ollama.prompts import read_prompts
from trainyard.ollama.servers import server_urls
from trainyard.ollama.teachers import Candidate, candidates
from trainyard.run.prepare.host_files import HostAccess
from trainyard.run.prepare.spec_files import prepare
from trainyard.run.types import Files, PreparedRun, Report, StagedFile

# Kinds of files in PreparedRun.files that the queue host needs, and the hosts of the run do not.
PROMPTS, EVAL_PROMPTS, CONVERTER = "prompts", "eval_prompts", "converter"
# Variables of a host that say where its Ollama server is.
_VARIABLES = (
    *("ollama_url", "ollama_port", "ollama_state", "ollama_models"),
    *("cluster_address", "ansible_host", "discovered_url", "discovered_ready"),
)


class StudentOptions(AnswerOptions):
    """The questions of a run to its teachers before it trains on their answers."""

    ollama_teacher: str = declare(
        "",
        "model of the Ollama servers that answers `prompts`; without it, the `deploy_name` of the run of `after`",
        **MODEL_NAME_RULES,
    )


DEPLOY_OPTIONS: dict[str, FieldInfo] = {
    name: option for name, option in DeployOptions.model_fields.items() if name != "run"
}
STUDENT_OPTIONS: dict[str, FieldInfo] = dict(StudentOptions.model_fields)
OPTIONS: dict[str, FieldInfo] = {**DEPLOY_OPTIONS, **STUDENT_OPTIONS}


@dataclass(frozen=True)
class Steps:
    """The further steps of a run.

    Attributes:
        student: the questions for its teachers; None for a run with a dataset.
        deploy: how its model is deployed; None if it is not. `run` is not set yet.
        follows_deployment: whether the teacher is the deployed model of a run, so that the hosts of the call teach.
    """

    student: StudentOptions | None = None
    deploy: DeployOptions | None = None
    follows_deployment: bool = False

    @property
    def deploy_name(self) -> str:
        """Name of the deployed model; empty if it is not deployed."""
        return self.deploy.deploy_name if self.deploy else ""

    def after_deployment(self, name: str) -> Steps:
        """Return the steps with a deployed model as the teacher.

        Its copies may have different digests, but the deployment has compared the answers of each with those of the run.
        """
        if self.student is None:
            return self
        student = self.student.model_copy(update={"ollama_teacher": name, "teacher_mixed": True})
        return dataclasses.replace(self, student=student, follows_deployment=True)

    def check(self, spec: RunSpec) -> None:
        """Check that a run can have these steps. Raises UserError."""
        if not self.student:
            return
        if not spec.run:
            raise UserError("prompts: name the run that trains on the answers: set run=NAME")
        if spec.script:
            raise UserError("prompts: a script reads its dataset itself: set dataset, or leave out script")
        if spec.model == TINY:
            raise UserError(
                "prompts: the model tiny is made of its dataset, which is not known yet: set model=FOLDER, or add the student with "
                f"{front_end.playbook('distill')} {front_end.option('queue')}, which collects the answers first"
            )


@dataclass(frozen=True)
class Servers:
    """The Ollama servers of an inventory.

    Attributes:
        urls: for each host the addresses of its own server, as for Deployment.
        teachers: machines that may answer prompts.
    """

    urls: Mapping[str, list[str]] = dataclasses.field(default_factory=dict)
    teachers: Sequence[Candidate] = ()


def servers_of(cluster: Cluster) -> Servers:
    """Return the servers of a cluster. No host is contacted."""
    members, discovered = cluster.groups["cluster"], cluster.groups.get("discovered", [])
    names = dict.fromkeys([*members, *discovered, *(host.name for host in cluster.hosts)])
    variables = {name: {key: cluster.variable(name, key) for key in _VARIABLES} for name in names}
    given = {
        name: {key: value for key, value in values.items() if value is not None} for name, values in variables.items()
    }
    urls = {host.name: server_urls(given[host.name]) for host in cluster.hosts}
    return Servers(urls, candidates(members, discovered, given))


def read_steps(values: Mapping[str, Any]) -> Steps:
    """Return the further steps of a run from its values. Raises UserError for a bad value, or one without its step."""
    student = deploy = None
    for main, options, what in (
        ("deploy_name", DEPLOY_OPTIONS, "the name of the model in Ollama"),
        (PROMPTS, STUDENT_OPTIONS, "the questions for the teachers"),
    ):
        if (given := [name for name in options if name in values]) and not values.get(main):
            raise UserError(f"queue: {given[0]} has no effect without {main}, {what}: set it, too")
    if values.get("deploy_name"):
        deploy = DeployOptions.from_variables(
            {name: values[name] for name in DEPLOY_OPTIONS if name in values}, "queue"
        )
        deploy.template_text()
    if values.get(PROMPTS):
        for name in ("dataset", "fake_data"):
            if name in values:
                raise UserError(f"queue: the dataset is made of the teacher's answers: set prompts instead of {name}")
        student = StudentOptions.from_variables(values, "queue")
    return Steps(student, deploy)


def prepare_student(
    spec: RunSpec, options: StudentOptions, work: Path, report: Report, access: HostAccess | None
) -> PreparedRun:
    """Prepare a run whose dataset is not known yet; its prompts take the place of the dataset. Arguments as for `prepare`.

    Raises:
        UserError: the model or the prompts are missing or damaged.
    """
    prepared = prepare(spec.model_copy(update={"fake_data": True}), work, report, access)
    asked = {PROMPTS: options.prompts} | ({EVAL_PROMPTS: options.eval_prompts} if options.eval_prompts else {})
    files = list(prepared.files)
    for kind, name in asked.items():
        chats = read_prompts(user_path(name, kind), options.system_message if kind == PROMPTS else "", spec)
        text = "".join(json.dumps({"prompt": chat}) + "\n" for chat in chats).encode()
        digest = hashlib.sha256(text).hexdigest()
        path = work / PROMPTS / f"{digest[:16]}.jsonl"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(path, text, 0o600)
        files.append(StagedFile.of(path, f"store/prompts/{digest[:16]}.jsonl", {"": digest}, kind))
    # The prompts have been converted to chats: the settings of their columns do not apply to the dataset.
    change = {"fake_data": False, "dataset_split": "train", "dataset_config": "", "columns": {}}
    return dataclasses.replace(prepared, spec=prepared.spec.model_copy(update=change), files=files)


def converter_files(steps: Steps, work: Path, report: Report) -> Files:
    """Return the model converter if a deployment may need it; none if it needs none, or if it is
    unavailable.

    Args:
        work: folder on the controller for files.
        report: receives a line if it is unavailable.
    """
    if steps.deploy is None or steps.deploy.deploy_as == "adapter":
        return []
    try:
        path = converter_archive(work / "deploy")
    except UserError as error:
        report(f"{error}: if the deployment needs the converter, the queue host downloads it")
        return []
    digest = sha256_file(path)
    return [StagedFile.of(path, f"store/deploy/{path.name}", {"": digest}, CONVERTER)]


def is_student(prepared: PreparedRun) -> bool:
    """Return whether the dataset of a run consists of answers to its prompts."""
    return any(file.kind == PROMPTS for file in prepared.files)


def step_data(steps: Steps, run: str, servers: Servers) -> dict[str, Any]:
    """Return the data that the driver of a run needs for its further steps, as plain data; it may hold secrets.

    Raises:
        UserError: the address of a server is not valid, or the file of a template cannot be read.
    """
    found: dict[str, Any] = {}
    if steps.deploy:
        _check_urls((name, url) for name, urls in servers.urls.items() for url in urls)
        options = steps.deploy.model_copy(update={"run": run, "template": ""}).model_dump(mode="json")
        found["deploy"] = {"options": options, "template": steps.deploy.template_text(), "urls": dict(servers.urls)}
    if steps.student:
        answers = steps.student.model_dump(exclude={"ollama_teacher"})
        asked = DistillOptions.from_variables(answers | {"teacher": steps.student.ollama_teacher}, "queue")
        machines = [each for each in servers.teachers if each.trusted or asked.teachers == "all"]
        if steps.follows_deployment:
            machines = [each for each in machines if each.name in servers.urls]
        _check_urls((each.name, each.url) for each in machines)
        found["student"] = {"options": asked.model_dump(mode="json"), "machines": [asdict(each) for each in machines]}
    return found


def _check_urls(urls: Iterable[tuple[str, str]]) -> None:
    """Check the addresses of the servers of hosts. Raises UserError, which shows no address: it may hold a password."""
    for name, url in urls:
        if not is_server_url(url):
            raise UserError(f"{name}: ollama_url is no address of a server: expected http://ADDRESS:PORT")
