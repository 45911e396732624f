"""The commands: their options, and the class that runs each."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from trainer.errors import UserError
from trainer.inputs import user_path
from trainyard.cli.call import Call
from trainyard.cli.flags import COMMON, LAUNCH, LAUNCH_OPTIONS, SPEC, Group, SpecGroup
from trainyard.cli.options import (
    CompletionOptions,
    DataOptions,
    LogsOptions,
    PreflightOptions,
    RunOptions,
    StatusOptions,
    StopOptions,
)
from trainyard.cli.playbooks import run_playbook
from trainyard.cluster import Cluster
from trainyard.dashboard.options import PASSWORD, DashboardOptions, run_dashboard
from trainyard.dashboard.project import Project
from trainyard.ollama.deploy import Deployment
from trainyard.ollama.distill import distill as run_distill
from trainyard.ollama.distill_options import OPTIONS as DISTILL_OPTIONS
from trainyard.ollama.options import DeployOptions, make_deploy_options
from trainyard.ollama.servers import host_urls
from trainyard.preflight.runner import run_preflight
from trainyard.queue.host import queue_host
from trainyard.queue.manage import CHANGE_OPTIONS, FILE, manage_queue
from trainyard.queue.request import OPTIONS as QUEUE_OPTIONS
from trainyard.queue.steps import DEPLOY_OPTIONS, STUDENT_OPTIONS
from trainyard.run.errors import RunError
from trainyard.run.merge import OPTIONS as MERGE_OPTIONS
from trainyard.run.merge import make_merge_options, merge_runs
from trainyard.run.plan import PORTS
from trainyard.run.runs import manage_runs
from trainyard.run.status import find_parts, no_such_run
from trainyard.service_records import following


def _launch(*names: str) -> Group:
    """Return the flags of some launch options."""
    return Group(LAUNCH.title, {name: LAUNCH_OPTIONS[name] for name in names})


DATA = Group("command options", DataOptions.model_fields)
RUN = Group("command options", RunOptions.model_fields)
STATUS = Group("command options", StatusOptions.model_fields)
STOP = Group("command options", StopOptions.model_fields)
LOGS = Group("command options", LogsOptions.model_fields)
PREFLIGHT = Group("command options", PreflightOptions.model_fields)
DISTILL = Group("command options", DISTILL_OPTIONS)
MERGE = Group("command options", MERGE_OPTIONS)
DEPLOY = Group("command options", DeployOptions.model_fields)
UNDEPLOY = Group("command options", {"deploy_name": DeployOptions.model_fields["deploy_name"]})
QUEUE_ADD = Group("queue options", {"file": FILE, **QUEUE_OPTIONS})
QUEUE_DEPLOY = Group("deployment options", DEPLOY_OPTIONS)
QUEUE_ANSWERS = Group("options of students", STUDENT_OPTIONS)
QUEUE_STUDENTS = Group("queue options", QUEUE_OPTIONS)
QUEUE_CHANGE = Group("command options", CHANGE_OPTIONS)
QUEUE_RUNS = Group("command options", {"run": CHANGE_OPTIONS["run"]})
DASHBOARD = Group("command options", DashboardOptions.model_fields)
COMPLETION = Group("command options", CompletionOptions.model_fields)


def train(call: Call) -> dict[str, Any]:
    """Start a run, follow it and collect its result."""
    session = call.session()
    ended = session.run()
    status = session.state.status or session.state.phase
    return {"run": session.run_name, "status": status, "result": ended.get("result")}


def plan(call: Call) -> dict[str, Any]:
    """Plan a run over the hosts."""
    session = call.session()
    planned = session.plan(preview=True)
    if failure := session.state.failure:  # max_restarts leaves it to `follow`
        raise RunError(failure["msg"])
    state = session.state
    found = {"run": session.run_name, "phase": state.phase, "plan": state.plan, "data": session.prepared.data}
    return found | {"lines": planned["lines"]}


def data(call: Call) -> None:
    """Show what a run trains on."""
    from trainyard.run.data import show_data  # imports numpy, which other commands do not need

    options, output = DataOptions.from_variables(call.own(DATA), call.command), call.output
    show_data(call.spec(DATA), options.samples, output.as_json, call.top / ".trainyard", output.report)


def status(call: Call) -> dict[str, Any]:
    """List hardware and runs."""
    options = StatusOptions.from_variables(call.own(STATUS), call.command)
    watch = options.interval if options.watch else 0.0
    return _manage(call, "listed", options.run, watch=watch, every=options.all, hardware=options.hardware)


def stop(call: Call) -> dict[str, Any]:
    """Stop one run, or all."""
    options = StopOptions.from_variables(call.own(STOP), call.command)
    if bool(options.run) == options.all:
        raise UserError("stop: name one run, as in trainyard stop RUN, or set --all for every run")
    return _manage(call, "stopped", options.run, grace=options.grace, now=options.force, every=options.all)


def attach(call: Call) -> dict[str, Any]:
    """Follow a run that is already running."""
    options = RunOptions.from_variables(call.own(RUN), call.command)
    _require_run(call, options.run)
    return _manage(call, "followed", options.run)


def logs(call: Call) -> dict[str, Any]:
    """Copy the logs of a run from all its hosts."""
    options = LogsOptions.from_variables(call.own(LOGS), call.command)
    _require_run(call, options.run)
    hosts = {host.name: host for host in call.inventory.hosts}
    parts, missing = find_parts(
        options.run, hosts.values(), lambda name: call.inventory.connect(hosts[name]), call.launch.answer_limit
    )
    if not parts and not missing:
        raise no_such_run(options.run)
    default = call.top / "runs" / options.run / "logs-from"
    folder = user_path(options.logs_to, "logs_to").absolute() if options.logs_to else default
    values = {"run": options.run, "logs_to": str(folder), "logs_max_mib": options.logs_max_mib}
    run_playbook(call, "playbooks/logs.yml", values)
    files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    return {"run": options.run, "folder": str(folder), "files": files}


def distill(call: Call) -> dict[str, Any]:
    """Ask the teachers, and train students on their answers."""
    variables = call.inventory.variables
    return run_distill(call.everything(), _cluster(call), variables, call.top, call.output.report, call.check)


def merge(call: Call) -> dict[str, Any]:
    """Merge finished runs."""
    options, inventory = make_merge_options(call.own(MERGE)), call.inventory
    how: dict[str, Any] = {"home": call.top, "report": call.output.report, "check": call.check}
    return merge_runs(options, inventory.hosts, inventory.connect, call.launch, **how)


def deploy(call: Call) -> dict[str, Any]:
    """Deploy a run to every Ollama."""
    with following(call.service_records(), call.top / ".trainyard"):
        return _deployment(call, DEPLOY, remove=False).deploy()


def undeploy(call: Call) -> dict[str, Any]:
    """Remove a deployed model."""
    return _deployment(call, UNDEPLOY, remove=True).remove()


def preflight(call: Call) -> dict[str, Any]:
    """Check all hosts before a run."""
    options, inventory = PreflightOptions.from_variables(call.own(PREFLIGHT), call.command), call.inventory
    for host in inventory.hosts:
        host.check()
    port = call.launch.master_port or PORTS.start
    how = {"all_reduce": not options.quick, "write": not call.check}
    report = run_preflight(inventory.hosts, inventory.connect, port, run=options.run, **how)
    if report.error:
        raise RunError(report.error, lines=report.other_lines, **report.as_dict())
    return {"lines": report.lines, **report.as_dict()}


def queue(call: Call, verb: str) -> dict[str, Any]:
    """Add runs to the queue, list or change them."""
    values = {name: value for name, value in call.everything().items() if name != "limit"} | {"do": verb}
    return manage_queue(values, _cluster(call), call.top, call.output.report, call.check)


def dashboard(call: Call) -> dict[str, Any]:
    """Serve the dashboard until Ctrl-C."""
    options, inventory = DashboardOptions.from_variables(call.own(DASHBOARD), call.command), call.inventory
    find_queue = functools.partial(queue_host, inventory.groups)
    password = str(inventory.variable(inventory.hosts[0].name, PASSWORD) or "")
    project = Project.of(call.top, inventory.groups, inventory.variables)
    how: dict[str, Any] = {"find_queue": find_queue, "project": project, "check": call.check, "password": password}
    return run_dashboard(inventory.hosts, inventory.connect, call.launch, options, call.output.report, **how)


def _playbook(call: Call, playbook: str) -> dict[str, Any]:
    run_playbook(call, playbook)
    return {"playbook": playbook, "lines": []}


def _cluster(call: Call) -> Cluster:
    inventory = call.inventory
    return Cluster(inventory.hosts, inventory.groups, inventory.variable, inventory.connect_name, call.launch_with)


def _manage(call: Call, state: str, run: str, **how: Any) -> dict[str, Any]:
    inventory = call.inventory
    report = call.output.report
    return manage_runs(state, run, inventory.hosts, inventory.connect, call.launch, report, check=call.check, **how)


def _deployment(call: Call, group: Group, remove: bool) -> Deployment:
    options, inventory = make_deploy_options(call.own(group), remove=remove), call.inventory
    urls = {host.name: host_urls(host) for host in inventory.hosts}
    how: dict[str, Any] = {"work": call.top / ".trainyard", "report": call.output.report, "check": call.check}
    return Deployment(inventory.hosts, inventory.connect, urls, options, **how)


def _require_run(call: Call, run: str) -> None:
    if not run:
        raise UserError(
            f"{call.command}: name the run, as in trainyard {call.command} RUN; trainyard status lists them"
        )


@dataclass(frozen=True)
class Command:
    """One command of the program.

    Attributes:
        summary: one line.
        playbook: the playbook, or the command of the trainer, that does the same.
        run: does it; returns the result, whose `lines` are printed, or None if it has printed its result.
        groups: the flags, without those of every command.
        positional: the option that words without a flag set.
    """

    summary: str
    playbook: str
    run: Callable[[Call], dict[str, Any] | None]
    groups: tuple[Group, ...]
    positional: str = ""

    @property
    def all_groups(self) -> tuple[Group, ...]:
        """The flags with those of every command."""
        return (*self.groups, COMMON)


def _playbooks(entries: Iterable[tuple[str, str, str]]) -> dict[str, Command]:
    """Return the commands that run a playbook with roles. Words after `--` go to ansible-playbook."""
    return {
        name: Command(summary, path, functools.partial(_playbook, playbook=path), (_launch("limit"),))
        for name, path, summary in entries
    }


def _queue_commands() -> dict[str, Command]:
    """Return `queue add`, `queue list` and so on."""
    summaries = {
        "add": "add runs to the queue",
        "list": "list the runs that wait or run, with the reason",
        "history": "list all runs of the queue, with those that have ended",
        "cancel": "take runs out of the queue; those that run save a checkpoint first",
        "hold": "let waiting runs wait until they are released",
        "release": "let held runs start",
        "priority": "give waiting runs another priority",
        "again": "add runs again that have failed, or were cancelled or stopped",
    }
    found = {}
    for verb, summary in summaries.items():
        groups: tuple[Group, ...] = (QUEUE_RUNS, _launch("limit"))
        if verb == "add":
            groups = (QUEUE_ADD, QUEUE_DEPLOY, QUEUE_ANSWERS, SPEC, LAUNCH)
        elif verb == "priority":
            groups = (QUEUE_CHANGE, _launch("limit"))
        run = functools.partial(queue, verb=verb)
        positional = "spec" if verb == "add" else "run"
        found[f"queue {verb}"] = Command(summary, f"playbooks/queue.yml -e do={verb}", run, groups, positional)
    return found


COMMANDS: dict[str, Command] = {
    "train": Command("start a run, follow it, and collect its result", "train.yml", train, (SPEC, LAUNCH), "spec"),
    "plan": Command(
        "plan ranks, devices and ports of a run, and start nothing",
        "train.yml --tags plan",
        plan,
        (SPEC, LAUNCH),
        "spec",
    ),
    "data": Command(
        "show the text that a run trains on, with the trained parts marked, and what it drops",
        *("python -m trainer data", data, (DATA, SPEC, _launch("spec")), "spec"),
    ),
    "status": Command(
        "list the hardware of every host, and the runs",
        *("playbooks/status.yml", status, (STATUS, _launch("limit", "lost_limit")), "run"),
    ),
    "attach": Command(
        "follow a run that is already running",
        *("playbooks/attach.yml", attach),
        (RUN, _launch("limit", "lost_limit", "progress_interval", "stall_limit")),
        "run",
    ),
    "logs": Command(
        "copy the logs of a run from all its hosts", "playbooks/logs.yml", logs, (LOGS, _launch("limit")), "run"
    ),
    "stop": Command(
        "stop a run after a checkpoint",
        *("playbooks/stop.yml", stop, (STOP, _launch("limit", "lost_limit")), "run"),
    ),
    "distill": Command(
        "let Ollama servers answer prompts, and train students on the answers",
        *("playbooks/distill.yml", distill, (DISTILL, QUEUE_STUDENTS, SpecGroup(DISTILL_OPTIONS), LAUNCH)),
    ),
    "merge": Command(
        "merge finished runs, or let them vote",
        *("playbooks/merge.yml", merge, (MERGE, _launch("limit", "lost_limit")), "runs"),
    ),
    "deploy": Command(
        "put a finished run into the Ollama server of every host",
        *("playbooks/deploy.yml", deploy, (DEPLOY, _launch("limit")), "run"),
    ),
    "undeploy": Command(
        "remove a deployed model from every host",
        *("playbooks/undeploy.yml", undeploy, (UNDEPLOY, _launch("limit")), "deploy_name"),
    ),
    "preflight": Command(
        "check all hosts before a run",
        *("playbooks/preflight.yml", preflight, (PREFLIGHT, _launch("limit", "master_port"))),
    ),
    **_queue_commands(),
    "dashboard": Command(
        "serve a web page with the hosts, the runs and their curves",
        *("playbooks/dashboard.yml", dashboard, (DASHBOARD, _launch("limit", "lost_limit"))),
    ),
    **_playbooks(
        [
            ("site", "site.yml", "provision the hosts"),
            ("add-host", "playbooks/add_host.yml", "add a host to a running cluster"),
            ("remove-host", "playbooks/remove_host.yml", "remove a host from a cluster"),
            ("check-training", "playbooks/check_training.yml", "let every host train alone, and compare them"),
            ("reset", "playbooks/reset.yml", "undo site.yml"),
        ]
    ),
}
