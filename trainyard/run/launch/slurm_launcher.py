"""A run as a job of a Slurm cluster that others administer (`launcher=slurm`): its plan, and the checks before it.

The host of the run is a login host of that cluster, whose `cluster_data_dir` all nodes share. To the session it is one host with all
ranks, and the backend `slurm` of trainer.supervise submits, watches and stops the job.
"""

from __future__ import annotations

from typing import Any

from trainer.common.formats import counted
from trainer.config import RunSpec
from trainer.planner.decisions import as_before
from trainer.strategy import AUTO
from trainer.tools.slurm_script import gpus_of
from trainyard import front_end
from trainyard.preflight.host_state import HostState
from trainyard.remote.commit import start_of
from trainyard.run.launch.slurm_job import batch_script, resources
from trainyard.run.launch_options import OPTIONS, LaunchOptions
from trainyard.run.plan.choose_fields import staged_spec
from trainyard.run.plan.gather_facts import Connect, check_requirements, own_torchrun, usable_hosts
from trainyard.run.plan.make_plan import (
    check_running_spec,
    data_lines,
    finished_line,
    is_finished,
    stopped_line,
    was_stopped,
)
from trainyard.run.types import PlanEntry, PreparedRun, PreviousStart, RunPlan
from trainyard.wire.connection import RemoteError
from trainyard.wire.copy_files import in_time
from trainyard.wire.run_errors import PlanError, RunError

CHECK_LIMIT = 150.0  # s for a login host to check a job
# Launch options that only the ranks of this program's own hosts have, with the reason.
_NOT_WITH_SLURM = {
    "elastic": "Slurm restarts the job",
    "min_nodes": "a job has all its nodes: set slurm_nodes",
    "unit_properties": "the ranks are steps of a job: set slurm_mem and slurm_cpus",
    "eval_questions": "use trainyard evaluate on a host that has the weights",
    "render_only": "python -m trainer config slurm prints a script",
}


def check_options(options: LaunchOptions, hosts: int, spec: RunSpec) -> None:
    """Check without contacting a host that options, hosts and spec fit a job of Slurm. Raises PlanError.

    Args:
        hosts: number of hosts of the run.
    """
    if hosts != 1:
        raise PlanError(
            f"launcher=slurm: the run has {hosts} hosts: name the login host of the Slurm cluster alone, as in {front_end.option('limit', 'login1')}"
        )
    for name, why in _NOT_WITH_SLURM.items():
        if getattr(options, name) != OPTIONS[name].default:
            raise PlanError(f"{name}: has no effect with launcher=slurm ({why}): omit it")
    if options.isolate == "always":
        raise PlanError("isolate: launcher=slurm cannot filter the connections of the ranks: omit it")
    if spec.teacher_host:
        raise PlanError("teacher_host: launcher=slurm trains on nodes that Slurm chooses: omit teacher_host")
    if own_torchrun(spec):
        raise PlanError("diloco_membership: launcher=slurm has one torchrun for all nodes: set diloco_membership=fixed")


def plan_job(
    hosts: list[HostState],
    connect: Connect,
    prepared: PreparedRun,
    options: LaunchOptions,
    previous: PreviousStart | None = None,
    preview: bool = False,
) -> RunPlan:
    """Plan a run as a job; arguments and result are those of `plan_run`. This changes nothing. Raises PlanError."""
    previous, run, spec = previous or PreviousStart(), prepared.run, prepared.spec
    check_options(options, len(hosts), spec)
    hosts, _ = usable_hosts(hosts, connect, prepared, options, previous.lost, preview)
    login = hosts[0]
    # The login host may have neither GPUs nor a compiler.
    check_requirements(hosts, spec.model_copy(update={"backend": "auto", "torch_compile": False}))
    part = login.facts["part"] or {}
    processes = login.host.processes or gpus_of(options.slurm_gres) or 1
    if login.facts["spec"]:  # its nodes have chosen
        spec, _ = as_before(spec, staged_spec(login))
    if previous.begun:
        spec = spec.model_copy(update={"resume": "auto"})
    attempt = int(part.get("attempt") or 0)
    entry = PlanEntry(
        host=login.name,
        ranks=list(range(processes * options.slurm_nodes)),
        address=login.address,
        run_dir=f"{login.host.data_dir}/runs/{run}",
        data_dir=login.host.data_dir,
        command=[login.host.python],
        backend="slurm",
        attempt=attempt + 1,
        versions=login.facts["versions"],
        job_nodes=options.slurm_nodes,
        link_mbit=login.facts["link_mbit"],
        previous=start_of(login.facts["part"]),
    )
    entry.script = batch_script(entry, processes, options)
    here = prepared.spec_on(entry.data_dir, spec)
    if login.facts["running"]:
        check_running_spec(login, prepared, entry.data_dir, spec)
        entry.ranks, entry.attempt = list(part.get("ranks") or entry.ranks), attempt or 1
        return RunPlan([entry], "running", 0, [f"run {run} is already running: following it"], spec)
    if previous.begun and was_stopped(hosts, attempt):
        return RunPlan([entry], "stopped", 0, [stopped_line(run)], spec)
    lines = [*_plan_lines(login, options, processes, spec), *data_lines(prepared)]
    if is_finished(hosts, here):
        return RunPlan([entry], "finished", 0, [finished_line(run), *lines] if preview else [], spec)
    return RunPlan([entry], "new", 0, lines, spec)


def _plan_lines(login: HostState, options: LaunchOptions, processes: int, spec: RunSpec) -> list[str]:
    asked = " ".join(option for option in resources(options).options if not option.startswith("--ntasks-per-node"))
    world = processes * options.slurm_nodes
    lines = [
        f"job of Slurm, submitted on {login.name}: {asked}",
        f"world size {world}: {counted(options.slurm_nodes, 'node')} with {counted(processes, 'rank')} each, in {login.host.data_dir}",
    ]
    if spec.script:
        return lines
    chosen = "which the nodes choose" if spec.strategy == AUTO else spec.strategy
    strategy = f"{chosen} unless it does not fit" if "strategy" in spec.automatic else chosen
    size = "a size that the nodes choose" if "batch_size" in spec.automatic else spec.batch_size
    batches = f"{spec.rows_per_step} rows per step in micro-batches of {size}"
    return [*lines, f"strategy {strategy}, {batches}"]


def check_job(entry: PlanEntry, options: LaunchOptions, connect: Connect, *, write: bool = True) -> list[str]:
    """Check before the job is submitted that Slurm would accept it, and that nodes have the folder and the interpreter.

    Args:
        write: whether to inspect nodes, which needs a file in the data directory.

    Returns:
        Warnings.

    Raises:
        RunError: a mistake that the user has to correct; nothing was submitted.
    """
    name, python = entry.host, entry.command[0]
    request = {
        "script": entry.script,
        "options": _step_options(options),
        "partition": options.slurm_partition,
        "data_dir": entry.data_dir,
        "python": python,
        "write": write,
    }
    connection = connect(name)
    try:
        answer: dict[str, Any] = in_time(connection, lambda: connection.call("slurm_check", request), CHECK_LIMIT)
    except RemoteError as error:
        raise RunError(f"{name}: {error}") from None
    if answer["refused"]:
        known = f": choose one of {', '.join(answer['partitions'])}" if answer["partitions"] else ""
        raise RunError(f"{name}: Slurm refuses the job: {answer['refused']}{known}")
    for node, shared, found in answer["nodes"]:
        if not shared:
            raise RunError(
                f"node {node} does not share {entry.data_dir} with {name}: set cluster_data_dir of {name} to a folder that "
                "all nodes share"
            )
        if found != "torch":
            lacks = f"no Python at {python}" if found == "none" else f"a Python at {python} without torch"
            raise RunError(
                f"node {node} has {lacks}: set cluster_python of {name} to an environment in a shared folder"
            )
    if answer["unseen"]:
        return [f"no node is free to be looked at before the job starts ({answer['unseen']}): the job looks itself"]
    return []


def _step_options(options: LaunchOptions) -> list[str]:
    """Return the options of srun for an inspection of nodes of the same kind, with one core of each."""
    asked = resources(options)
    given = {"nodes": asked.nodes, "ntasks-per-node": 1, "partition": asked.partition, "account": asked.account}
    return [f"--{name}={value}" for name, value in given.items() if value]
