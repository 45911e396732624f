"""Add runs to the queue: refuse what can never start, prepare and stage their files, and submit their jobs."""

from __future__ import annotations

import dataclasses
import getpass
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.common.errors import UserError, nearest
from trainer.common.formats import counted, printable, quoted
from trainer.config import RunSpec, parse_mapping
from trainer.data.data_report import DataReport
from trainer.data.samples import read_records
from trainer.planner.decisions import as_before
from trainer.planner.recommend import estimate_seconds
from trainer.spec import changed_fields, make_spec
from trainyard import front_end
from trainyard.queue.new_runs import NewRun
from trainyard.queue.queue_client import QueueClient, QueueState, SlurmNode
from trainyard.queue.queue_tables import run_state, state_words
from trainyard.queue.reasons import can_run, refusal
from trainyard.queue.request import MAX_MINUTES, Request, host_cores, slurm_options
from trainyard.queue.run_folder import QueuedStart, program_archive
from trainyard.queue.sweep import grids_of
from trainyard.run.plan.choose_fields import spec_here
from trainyard.run.prepare.host_files import HostAccess
from trainyard.run.prepare.spec_files import prepare
from trainyard.run.stage.transfer import copy_to_hosts
from trainyard.run.types import PlanEntry, PreparedRun, Report
from trainyard.wire.connection import Host, HostConnection, RemoteError, call_hosts

FILES = "files"  # folder of the run's files in its folder on the queue host
LIMIT_FACTOR = 2  # times the estimate
MIN_LIMIT = 10  # minutes of a derived time limit: a start takes a minute or two, whatever the estimate says
COUNTED_BYTES = 1 << 28  # of datasets whose samples are counted for the estimate
FACTS_LIMIT = 30.0  # s for a host to read files of its runs


@dataclass(frozen=True)
class Site:
    """Where a run is added."""

    hosts: Sequence[Host]  # hosts of the cluster that the runs may use, in inventory order
    limited: bool  # whether these are not all hosts of the cluster
    queue: QueueClient
    connect: Callable[[str], HostConnection]  # makes the connection to a host by its name; called in the main thread
    home: Path  # the project's folder on the controller
    report: Report
    token: str  # token of this controller's transfers
    check: bool = False


def add_runs(runs: Sequence[NewRun], site: Site) -> dict[str, Any]:
    """Add runs to the queue. Nothing is added if one of them is refused.

    Returns `changed`; `runs`, for each its name, job and time limit; `lines`, readable text. Raises UserError: a
    mistake in a run, or no host can satisfy its request; RunError: the queue host or Slurm refuses the request, or
    fails.
    """
    before = site.queue.state()
    waiting = _checked(runs, site, before)
    ready = [_prepared(run, site) for run, _ in waiting]
    names = [prepared.run for prepared in ready]
    if twice := [name for name in names if names.count(name) > 1]:
        raise UserError(f"run {twice[0]}: two runs have the same spec: name each model once")
    queue = site.queue.state(names)
    there = _specs_on_hosts(site, names)
    known = [_is_known(prepared, queue, there, site.hosts) for prepared in ready]
    # A run of `after` may have ended since.
    answers, jobs = [], {name: job.number for name, job in (before.jobs | queue.jobs).items()}
    for (run, after), prepared, is_known_run in zip(waiting, ready, known, strict=True):
        if is_known_run:
            name, job = prepared.run, queue.jobs.get(prepared.run)
            state = run_state(name, queue)
            what = f"{state} already, as job {job.number}" if job else "finished: nothing to do"
            number = job.number if job else None
            answers.append({"run": name, "job": number, "state": state, "line": f"run {name} is {what}"})
            continue
        run = dataclasses.replace(run, spec=run.spec.model_copy(update={"run": prepared.run}))
        continues = bool(there[prepared.run]) or prepared.run in queue.requests
        answers.append(_add(run, prepared, site, queue, jobs, after, continues=continues))
    lines = [answer.pop("line") for answer in answers]
    lines += [f"{line} (run {made.run})" for made in ready if (line := (made.data or DataReport()).loss.warning())]
    return {"changed": not all(known), "runs": answers, "lines": lines}


def _checked(runs: Sequence[NewRun], site: Site, queue: QueueState) -> list[tuple[NewRun, list[str]]]:
    """Return each run, with the names of runs as `after`, and those of them that have not finished. Raises UserError."""
    allowed = [host.name for host in site.hosts] if site.limited else []
    for run in runs:
        if why := refusal(run.request(allowed), queue.nodes):
            raise UserError(f"{_label(run)}: {why}")
    batch = [run.spec.run for run in runs if run.spec.run]
    grids = grids_of((name, request.grid) for name, request in queue.requests.items())
    found = [run.waiting_for(grids, [*batch, *queue.requests]) for run in runs]
    return [(run, _open_runs(run, batch, queue)) for run in found]


def _label(run: NewRun) -> str:
    return f"run {run.spec.run}" if run.spec.run else "the run"


def _open_runs(run: NewRun, batch: Sequence[str], queue: QueueState) -> list[str]:
    """Return the runs of `after` that have not finished. Raises UserError for one that is unknown or has failed."""
    left = []
    for name in run.options.after:
        state = run_state(name, queue)
        if state in ("waiting", "held", "running", "ending") or (name in batch and state != "finished"):
            left.append(name)
        elif state == "unknown":
            grids = (request.grid for request in queue.requests.values())
            known = sorted({*queue.requests, *batch, *filter(None, grids)})
            near, listed = nearest(name, known), front_end.command("queue history")
            raise UserError(f"after: the queue has no run and no grid {name}{near}: {listed} lists the runs")
        elif state != "finished":
            why = f"run {name} {state_words(state)}, so {_label(run)} would never start"
            raise UserError(f"after: {why}: add {name} again first")
    return left


def _prepared(run: NewRun, site: Site) -> PreparedRun:
    """Check and, if needed, create the files of a run on this machine. Raises UserError."""
    queue_host = site.queue.host
    hosts = [queue_host, *(host for host in site.hosts if host.name != queue_host.name)]
    access = HostAccess(hosts, site.connect, run.launch.run_env, site.check)
    return prepare(run.spec, site.home / ".trainyard", site.report, access)


def _is_known(
    prepared: PreparedRun, queue: QueueState, there: Mapping[str, Mapping[str, str]], hosts: Sequence[Host]
) -> bool:
    """Return whether the queue has the run already, and it waits, runs or has finished.

    `there`: the text of the spec in the run's folder, by run and host. Raises UserError: a run of this name has another
    spec, or a job that is no run has this name.
    """
    name = prepared.run
    remedy = "choose another name with run=NAME, or repeat the options with which it was added"
    if name in queue.jobs and name not in queue.requests:
        number = queue.jobs[name].number
        raise UserError(f"run {name}: job {number} of Slurm has this name: choose another one with run=NAME")
    if different := _differences(prepared, queue.specs.get(name), has_job=name in queue.jobs):
        where = "is in the queue" if name in queue.jobs else "exists"
        raise UserError(f"run {name} {where} with another spec ({'; '.join(different)}): {remedy}")
    for host in hosts:
        text = there[name].get(host.name)
        if text is not None and (different := _differences_there(prepared, text, host)):
            raise UserError(f"run {name} exists on {host.name} with another spec ({'; '.join(different)}): {remedy}")
    return name in queue.requests and (name in queue.jobs or run_state(name, queue) == "finished")


def _differences(prepared: PreparedRun, before: Mapping[str, Any] | None, *, has_job: bool) -> list[str]:
    """Return what differs from a run of the queue, which is not trusted, in fields that must not change: with a job, any."""
    if before is None:
        return []
    try:
        known = {name: value for name, value in before["spec"].items() if name != "rows_per_step"}
        earlier = make_spec(known, "the queue host")
    except UserError:
        return ["its spec on the queue host is damaged"]
    now, _ = as_before(prepared.spec, earlier)
    # Paths may differ where the files are the same.
    same_files = sorted(map(tuple, before["digests"])) == sorted((file.kind, file.digest) for file in prepared.files)
    if same_files:
        paths = {name: getattr(now, name) for name in ("model", "dataset", "teacher", "script")}
        earlier = earlier.model_copy(update=paths)
        if len(earlier.reward_files) == len(now.reward_files):
            earlier = earlier.with_reward_files(now.reward_files)
    given = [name for name in earlier.automatic if name not in now.automatic]
    found = [f"{name}: was left to the hosts, now {quoted(getattr(now, name))}" for name in given]
    named = earlier.model_copy(update={name: getattr(now, name) for name in given})
    found += changed_fields(named, now, resumes=not has_job)
    changed = {kind for kind, _ in {*map(tuple, before["digests"])} ^ {(f.kind, f.digest) for f in prepared.files}}
    return [printable(line) for line in found] or [
        f"{kind}: another content" for kind in sorted(changed & {"dataset", "model", "teacher", "script", "reward"})
    ]


def _differences_there(prepared: PreparedRun, text: str, host: Host) -> list[str]:
    """Return what differs from the run's folder on a host, which was started before."""
    try:
        earlier = make_spec(parse_mapping(text, f"{host.name}: spec.yml"), f"{host.name}: spec.yml")
    except UserError:
        return ["its spec.yml is damaged"]
    now = prepared.spec_on(host.data_dir)
    now, _ = as_before(now, earlier)
    return [printable(line) for line in changed_fields(earlier, now)]


def _specs_on_hosts(site: Site, names: Sequence[str]) -> dict[str, dict[str, str]]:
    """Return the text of spec.yml in the runs' folders, by run and host. A host that does not answer has none."""
    files = [f"{name}/spec.yml" for name in names]
    requests = {host.name: {"folder": f"{host.data_dir}/runs", "text": files} for host in site.hosts}
    answers = call_hosts(site.connect, "read_files", requests).wait(FACTS_LIMIT).answers
    texts = {name: {host: answer["text"].get(f"{name}/spec.yml") for host, answer in answers.items()} for name in names}
    return {name: {host: text for host, text in of.items() if text is not None} for name, of in texts.items()}


def _add(
    run: NewRun,
    prepared: PreparedRun,
    site: Site,
    queue: QueueState,
    jobs: dict[str, int],
    after: Sequence[str],
    *,
    continues: bool,
) -> dict[str, Any]:
    """Stage the files of a run on the queue host and submit its job after others; its id is added to `jobs`."""
    minutes, why = time_limit(run, prepared, queue)
    more = {"time_limit": minutes, "submitted": queue.now, "user": _user()}
    allowed = [host.name for host in site.hosts] if site.limited else []
    request = run.request(allowed, **more)
    answer: dict[str, Any] = {"run": request.run, "priority": request.priority, "time_limit": minutes}
    waits = f" after {', '.join(after)}" if after else ""
    what = f"run {request.run}, priority {request.priority}, {counted(request.nodes, 'host')}{waits}; {why}"
    if site.check:
        return answer | {"job": None, "line": f"would add {what}"}
    staged, links = stage(prepared, site, run.launch.transfer)
    excluded = sorted(set(queue.nodes) - set(allowed)) if allowed else []
    arguments = slurm_options(request, excluded)
    if after:
        if unknown := [name for name in after if name not in jobs]:
            raise RemoteError(f"Slurm does not list the job of {', '.join(unknown)}: run the same command again")
        arguments.append(f"--dependency=afterok:{':'.join(str(jobs[name]) for name in after)}")
    options = run.launch.model_copy(update={"spec": "", "limit": "cluster"})
    session = QueuedStart(list(site.hosts), options, staged, continues).as_json()
    contents = {"session.json": session, "program.zip": program_archive()}
    job = jobs[request.run] = site.queue.add(request, contents, links, arguments)
    return answer | {"job": job, "line": f"added {what} (job {job})"}


def stage(prepared: PreparedRun, site: Site, transfer: str) -> tuple[PreparedRun, dict[str, str]]:
    """Copy what not every host has already (`host:/path`) to the store of the queue host, which the runs share.

    Returns the run with paths below its folder as `src`; and the path in the store of each file, by the name there.
    Raises RunError.
    """
    holders = {file.fetched_by for file in prepared.files} - {""}
    members = [site.queue.host, *(host for host in site.hosts if host.name in holders and host != site.queue.host)]
    entries = [PlanEntry(host.name, address=host.address, data_dir=host.data_dir) for host in members]
    copy_to_hosts(entries, prepared.files, site.connect, site.token, transfer=transfer, report=site.report)
    staged, links = [], {}
    for file in prepared.files:
        if file.on_hosts:
            staged.append(file)
            continue
        for name in file.sha256:
            path = f"{file.dest}/{name}" if name else file.dest
            links[f"{FILES}/{path}"] = f"{site.queue.host.data_dir}/{path}"
        staged.append(dataclasses.replace(file, src=f"{FILES}/{file.dest}", fetched_by=""))
    return dataclasses.replace(prepared, files=staged), links


# Time limits ------------------------------------------------------------------------------------------------------------


def time_limit(run: NewRun, prepared: PreparedRun, queue: QueueState) -> tuple[int, str]:
    """Return the time limit of a run in minutes (0: none), and where it comes from."""
    if run.options.time_limit:
        return run.options.time_limit, f"time limit {_minutes(run.options.time_limit)}"
    if run.spec.script:
        return 0, "no time limit, because the plan cannot estimate a script: set time_limit=MINUTES"
    if run.spec.learns_from_prompts:
        return 0, "no time limit, because the plan cannot estimate completions and rewards: set time_limit=MINUTES"
    request = run.request()
    able = [node for node in queue.nodes.values() if can_run(request, node)]
    hosts = [_as_host(request, node) for node in sorted(able, key=lambda node: node.cores)[: request.nodes]]
    try:
        with spec_here(prepared.spec, prepared.files) as here:
            seconds = estimate_seconds(here, hosts, _samples(here, prepared)) if hosts else 0.0
    except UserError as error:
        return 0, f"no time limit, because the plan has no estimate ({error}): set time_limit=MINUTES"
    if not seconds:
        return 0, "no time limit, because the size of the dataset is unknown: set time_limit=MINUTES"
    minutes = max(MIN_LIMIT, math.ceil(LIMIT_FACTOR * seconds / 60))
    estimate = _minutes(max(1, round(seconds / 60)))
    least = f", at least {MIN_LIMIT} minutes" if minutes == MIN_LIMIT else ""
    minutes = min(MAX_MINUTES, minutes)
    return minutes, f"time limit {_minutes(minutes)}: twice the plan's estimate of {estimate}{least}"


def _minutes(number: int) -> str:
    return counted(number, "minute") if number < 120 else f"{number // 60}:{number % 60:02d} h"


def _as_host(request: Request, node: SlurmNode) -> dict[str, Any]:
    """Return a host of the queue as the planner takes it."""
    gpus = node.gpus if request.whole_host else (request.gpus or 0)
    cores = node.cores if request.whole_host else host_cores(request)
    processes = max(1, gpus)
    memory = {"gpu_mib": 1024 * node.gpu_memory if gpus else 0, "memory_mib": node.memory}
    return {"processes": processes, "threads": max(1, cores // processes), "link_mbit": 0, **memory}


def _samples(spec: RunSpec, prepared: PreparedRun) -> int:
    """Return the number of samples of the run's datasets; 0 if this machine does not have them, or they are large."""
    if spec.fake_data:
        return spec.fake_rows
    datasets = [file for file in prepared.files if file.kind == "dataset"]
    if not prepared.has_dataset or not all(file.src for file in datasets):
        return 0
    if sum(file.bytes for file in datasets) > COUNTED_BYTES:
        return 0
    paths = [file.src for file in sorted(datasets, key=lambda file: file.source)]
    return sum(1 for source in spec.with_dataset_paths(paths).sources for _ in read_records(source))


def _user() -> str:
    """Return who calls this, if the name is one that a request may have."""
    try:
        return str(Request(run="run", user=getpass.getuser()).user)
    except (ValueError, OSError, KeyError):
        return ""
