"""The functions behind the commands. Each returns its result, whose `lines` are printed, or None if it has printed it."""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from trainer.common.errors import UserError
from trainer.common.inputs import user_path
from trainer.config.removed_fields import REMOVED_DASHBOARD_OPTIONS, replacement
from trainyard import front_end
from trainyard.commands.call import Call
from trainyard.commands.command_options import (
    DataOptions,
    InitOptions,
    LogsOptions,
    RunOptions,
    StatusOptions,
    StopOptions,
)
from trainyard.dashboard.dashboard_options import DashboardOptions, run_dashboard
from trainyard.dashboard.project import Project
from trainyard.deploy.deploy_options import make_deploy_options
from trainyard.deploy.deployment import Deployment
from trainyard.evaluate.side_by_side import EvaluateOptions
from trainyard.evaluate.side_by_side import evaluate as run_evaluate
from trainyard.import_file.import_options import ImportOptions
from trainyard.inventory_problems import inventory_problems
from trainyard.new_project import make_project
from trainyard.ollama.servers import host_urls
from trainyard.preflight.findings import Finding
from trainyard.preflight.runner import run_preflight
from trainyard.queue.manage import manage_queue
from trainyard.queue.queue_client import queue_host
from trainyard.run.follow.gathered_logs import copy_logs
from trainyard.run.follow.manage_runs import manage_runs
from trainyard.run.plan.nodes import PORTS
from trainyard.run.types import SessionState, plain, read
from trainyard.wire.run_errors import RunError
from trainyard.workflows.check_training import check_spec
from trainyard.workflows.check_training import check_training as train_alone
from trainyard.workflows.distill import distill as run_distill
from trainyard.workflows.merge_runs import make_merge_options, merge_runs
from trainyard.workflows.push_run import PushOptions, push_run


def train(call: Call) -> dict[str, Any]:
    """Start a run, follow it and collect its result."""
    session = call.session(spec=call.spec())
    ended = session.run()
    status = session.state.status or session.state.phase
    return {"run": session.run_name, "status": status, "result": ended.get("result")}


def plan(call: Call) -> dict[str, Any]:
    """Plan a run over the hosts."""
    session = call.session(spec=call.spec())
    planned = session.plan(preview=True)
    if failure := session.state.failure:  # max_restarts leaves it to `follow`
        raise RunError(failure["msg"])
    state = session.state
    totals = asdict(session.prepared.data) if session.prepared.data else {}
    found = {"run": session.run_name, "phase": state.phase, "plan": session.plan_rows(), "data": totals}
    return found | {"lines": planned["lines"]}


def train_step(call: Call, step: str, state: Mapping[str, Any]) -> dict[str, Any]:
    """Do one step of a run, such as `stage`. Returns its result, and the `session` that the next step gets as `state`."""
    spec = {"spec": call.spec()} if step == "prepare" else {}
    session = call.session(state=read(SessionState, state), **spec)
    how = {"preview": True} if step == call.command == "plan" else {}
    return getattr(session, step)(**how) | {"session": plain(session.state)}


def data(call: Call) -> None:
    """Show what a run trains on."""
    from trainyard.run.prepare.data import show_data  # imports numpy, which other commands do not need

    show_data(call.spec(), call.options(DataOptions).samples, call.as_json, call.work, call.report)


def import_config(call: Call) -> dict[str, Any]:
    """Turn configuration files of other tools into a run spec."""
    from trainyard.import_file.spec_text import write_spec  # the names of these tools, which other commands do not need

    return write_spec(call.options(ImportOptions), call.check)


def init(call: Call) -> dict[str, Any]:
    """Make a project folder."""
    folder = call.options(InitOptions).folder
    return make_project(user_path(folder, "folder") if folder else Path.cwd(), call.check)


def status(call: Call) -> dict[str, Any]:
    """List hardware and runs."""
    options = call.options(StatusOptions)
    watch = options.interval if options.watch else 0.0
    return _manage(call, "listed", options.run, watch=watch, every=options.all, hardware=options.hardware)


def stop(call: Call) -> dict[str, Any]:
    """Stop one run, or all."""
    options = call.options(StopOptions)
    if bool(options.run) == options.all:
        one, every = front_end.command("stop", "RUN"), front_end.option("all")
        raise UserError(f"stop: name one run, as in {one}, or set {every} for every run")
    return _manage(call, "stopped", options.run, grace=options.grace, now=options.force, every=options.all)


def attach(call: Call) -> dict[str, Any]:
    """Follow a run that is already running."""
    return _manage(call, "followed", _named_run(call, call.options(RunOptions)))


def logs(call: Call) -> dict[str, Any]:
    """Copy the logs of a run from all its hosts."""
    options, cluster = call.options(LogsOptions), call.cluster
    run = _named_run(call, options)
    default = call.top / "runs" / run / "logs-from"
    folder = user_path(options.logs_to, "logs_to").absolute() if options.logs_to else default
    return copy_logs(run, cluster.hosts, cluster.connect, folder, options.logs_max_mib << 20, call.check)


def identity(call: Call) -> dict[str, Any]:
    """Find entries of the inventory that are one machine, by the playbook."""
    assert call.play
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "identity.json"
        call.play({"identity_save": str(file)})
        found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return found | {"lines": []}  # the playbook has printed them


def distill(call: Call) -> dict[str, Any]:
    """Ask the teachers, and train students on their answers."""
    return run_distill(call.values, call.cluster, call.top, call.report, call.check)


def merge(call: Call) -> dict[str, Any]:
    """Merge finished runs."""
    options, cluster = make_merge_options(call.given), call.cluster
    how: dict[str, Any] = {"home": call.top, "report": call.report, "check": call.check}
    return merge_runs(options, cluster.hosts, cluster.connect, call.launch, **how)


def evaluate(call: Call) -> dict[str, Any]:
    """Let models answer questions, side by side."""
    options, cluster = EvaluateOptions.from_variables(call.given, "evaluate"), call.cluster
    how: dict[str, Any] = {"home": call.top, "report": call.report, "check": call.check}
    return run_evaluate(options, cluster.hosts, cluster.connect, call.launch, **how)


def push(call: Call) -> dict[str, Any]:
    """Put the result of a run into a repository of the hub."""
    options, cluster = PushOptions.from_variables(call.given, "push"), call.cluster
    how: dict[str, Any] = {"home": call.top, "report": call.report, "check": call.check}
    return push_run(options, cluster.hosts, cluster.connect, **how)


def deploy(call: Call) -> dict[str, Any]:
    """Deploy a run to every Ollama."""
    return _deployment(call, remove=False).deploy()


def undeploy(call: Call) -> dict[str, Any]:
    """Remove a deployed model."""
    return _deployment(call, remove=True).remove()


def preflight(call: Call) -> dict[str, Any]:
    """Check all hosts before a run."""
    options, cluster = call.options(RunOptions), call.cluster
    for host in cluster.hosts:
        host.check()
    port = call.launch.master_port or PORTS.start
    problems = inventory_problems(cluster.variables, {host.name: host.address for host in cluster.hosts})
    found = [Finding(check, host, "failure", text, remedy) for host, check, text, remedy in problems]
    report = run_preflight(cluster.hosts, cluster.connect, port, run=options.run, write=not call.check, known=found)
    lines = report.output(str(call.extra_vars.get("json") or ""))
    if report.error:
        raise RunError(report.error, lines=lines, **report.as_dict())
    return {"changed": False, "lines": lines, **report.as_dict()}


def queue(call: Call, verb: str) -> dict[str, Any]:
    """Add runs to the queue, list or change them."""
    values = {name: value for name, value in call.values.items() if not call.play or name != "limit"} | {"do": verb}
    return manage_queue(values, call.cluster, call.top, call.report, call.check)


def dashboard(call: Call) -> dict[str, Any]:
    """Serve the dashboard until Ctrl-C."""
    for name, entry in REMOVED_DASHBOARD_OPTIONS.items():
        if reason := replacement(call.given.get(name), entry):
            raise UserError(f"dashboard: {name} {reason}")
    options, cluster = call.options(DashboardOptions), call.cluster
    find_queue = functools.partial(queue_host, cluster.groups)
    how: dict[str, Any] = {"find_queue": find_queue, "project": Project(call.top), "check": call.check}
    return run_dashboard(cluster.hosts, cluster.connect, call.launch, options, call.report, **how)


def check_training(call: Call) -> dict[str, Any]:
    """Let every host train alone, and compare them."""
    spec, cluster = check_spec(call.spec(), call.options(RunOptions).run), call.cluster
    for host in cluster.hosts:
        host.check()
    how: dict[str, Any] = {"home": call.top, "report": call.report, "check": call.check}
    return train_alone(cluster.hosts, cluster.connect, call.launch, spec, **how)


def _manage(call: Call, state: str, run: str, **how: Any) -> dict[str, Any]:
    cluster = call.cluster
    return manage_runs(state, run, cluster.hosts, cluster.connect, call.launch, call.report, check=call.check, **how)


def _deployment(call: Call, remove: bool) -> Deployment:
    options, cluster = make_deploy_options(call.given, remove=remove), call.cluster
    urls = {host.name: host_urls(host) for host in cluster.hosts}
    how: dict[str, Any] = {"work": call.work, "report": call.report, "check": call.check}
    return Deployment(cluster.hosts, cluster.connect, urls, options, **how)


def _named_run(call: Call, options: RunOptions) -> str:
    if not options.run:
        example, listed = front_end.command(call.command, "RUN"), front_end.command("status")
        raise UserError(f"{call.command}: name the run, as in {example}; {listed} lists them")
    return options.run
