"""Plan one start of a run: select the hosts, resolve the strategy, and see whether the run is already running or done."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence

from trainer.common.errors import UserError
from trainer.common.formats import quoted
from trainer.config import FIELDS, RunSpec
from trainer.costs.packing_forecast import packing_text, steps_about
from trainer.model_files.model_shape import shape_of
from trainer.spec import changed_fields
from trainer.strategy import AUTO, plan_of
from trainer.strategy.pipeline_split import check_ranks, given_layers
from trainyard import front_end
from trainyard.preflight.findings import PreflightReport
from trainyard.preflight.host_state import HostState
from trainyard.preflight.measurements import high_ports, measure_mesh
from trainyard.preflight.runner import check_plan, skipped_checks
from trainyard.run.launch_options import LaunchOptions
from trainyard.run.plan.choose_fields import choose_fields, spec_here, staged_spec
from trainyard.run.plan.gather_facts import Connect, check_consistency, check_requirements, usable_hosts
from trainyard.run.plan.isolation import choose_isolation, exposed_hosts, isolation_lines, unit_lines
from trainyard.run.plan.nodes import check_own_gpus, choose_port, head_first, plan_lines, plan_nodes
from trainyard.run.plan.rollout_plan import plan_servers
from trainyard.run.types import Phase, PlanEntry, PreparedRun, PreviousStart, RunPlan
from trainyard.wire.connection import Host
from trainyard.wire.run_errors import PartlyActiveError, PlanError, RunError

TORCHRUN_RESTARTS = 3  # consecutive restarts by torchrun where max_restarts is 0


def plan_run(
    hosts: list[HostState],
    connect: Connect,
    prepared: PreparedRun,
    options: LaunchOptions,
    previous: PreviousStart | None = None,
    preview: bool = False,
) -> RunPlan:
    """Plan a start of the run. This changes nothing on the hosts.

    Raises PlanError: the hosts cannot run the spec together; HostUnreachableError: a host does not answer. `hosts`: all
    hosts of the run in inventory order, reachable or not. `previous`: the session's previous start, if this is a
    restart. `preview`: nothing will be started, so another run in progress is only a line of the plan.
    """
    previous = previous or PreviousStart()
    run, spec = prepared.run, prepared.spec
    hosts = [host for host in head_first(hosts, options.head) if host.name not in previous.barred]
    hosts, left_out = usable_hosts(hosts, connect, prepared, options, previous.lost, preview)
    check_consistency(hosts)
    spec, chosen = _decide(hosts, connect, prepared)
    check_requirements(hosts, spec)
    check_own_gpus(hosts, spec)
    last_attempt = max((_attempt(host) or 0 for host in hosts), default=0)
    members = _running_members(hosts, run, last_attempt, options, previous)
    if not members and (extra := surplus([host.name for host in hosts], spec, options.min_nodes)):
        left_out |= extra
        hosts = [host for host in hosts if host.name not in extra]
    head, port = hosts[0], 0
    if not members:
        run_dir = f"{head.host.data_dir}/runs/{run}"
        port = choose_port(options.master_port, head.facts["free_ports"], head.name, run_dir, head.host.lease)
    if previous.begun:  # resume=never refuses checkpoints from before this session only
        spec = spec.model_copy(update={"resume": "auto"})
    if members:
        hosts = members
    variables = {name: value for host in hosts for name, value in host.host.env.items()} | options.run_env
    isolation = choose_isolation(options.isolate, spec, prepared.has_dataset, variables)
    entries = plan_nodes(
        hosts,
        run=run,
        port=port,
        attempt=last_attempt if members else last_attempt + 1,
        elastic=(options.min_nodes or len(hosts)) if options.elastic else 0,
        restarts=options.max_restarts or TORCHRUN_RESTARTS,
        # Scripts that start the run keep their id, so that rendering them again changes nothing.
        identity="" if options.render_only else f"{run}-{secrets.token_hex(16)}",
        isolation=isolation,
    )
    exposed = exposed_hosts(isolation, hosts)
    for entry in entries:
        entry.exposed = entry.host in exposed
    if members:
        check_running_spec(members[0], prepared, entries[0].data_dir, spec)
        return RunPlan(entries, "running", port, [f"run {run} is already running: following it"], spec)
    if previous.begun and any(h.facts["stop_wanted"] and _attempt(h) == last_attempt for h in hosts):  # by a user
        return RunPlan(entries, "stopped", port, [stopped_line(run)], spec)
    phase: Phase = "finished" if is_finished(hosts, prepared, spec) else "new"
    if phase == "finished" and not preview:
        return RunPlan(entries, phase, port, [], spec)
    done = f"run {run} is finished and will not start again: this is its plan, which a run of another name would have"
    lines = [done] if phase == "finished" else []
    lines += _host_lines(hosts, left_out, preview)
    lines += plan_lines(entries, spec, port, hosts[0].facts.get("rows", []))
    lines += plan_servers(spec, entries)
    if not spec.script:  # whose rows the plan does not know
        with spec_here(spec, prepared.files) as here:
            check_layers(here, [len(node.ranks) for node in entries])
            lines += [f"rows: {packing_text(here)}", *data_lines(prepared, here), *chosen]
    return RunPlan(
        entries, phase, port, lines + isolation_lines(isolation, hosts) + unit_lines(hosts, spec, variables), spec
    )


def data_lines(prepared: PreparedRun, here: RunSpec) -> list[str]:
    """Return the lines of the plan about the samples and the steps of a run. `here`: its spec with a model on the controller."""
    if prepared.spec.fake_data or prepared.spec.script:
        return []
    if not prepared.data:
        return ["data: the ranks count it before the first step"]
    return [*prepared.data.lines("data: "), *steps_about(here, prepared.data)]


def _host_lines(hosts: list[HostState], left_out: Mapping[str, str], preview: bool) -> list[str]:
    """Return the sentences of the plan about hosts that do not take part or are busy, and about folders that cannot be read."""
    lines = [f"{host} is left out: {why}" for host, why in left_out.items()]
    busy = {host.name: host.facts["busy_with"] for host in hosts if preview and host.facts.get("busy_with")}
    lines += [f"{name}: run {run} is in progress: this run can start there after its end" for name, run in busy.items()]
    return lines + [
        f"warning: {host.name}: cannot read {', '.join(names)} next to the run's folder: skipped"
        for host in hosts
        if (names := host.facts.get("unreadable"))
    ]


def surplus(names: Sequence[str], spec: RunSpec, min_nodes: int) -> dict[str, str]:
    """Return the last hosts to leave out, so that all pipelines have the same number of hosts, and the reason for each.

    Raises PlanError: `min_nodes` does not allow so few hosts.
    """
    size = plan_of(spec).pipeline_hosts(spec) or 0
    over = len(names) % size if 0 < size < len(names) else 0
    if over and not 0 < min_nodes <= len(names) - over:
        raise PlanError(
            f"replica_hosts: {len(names)} hosts cannot form pipelines of {size} hosts each: set replica_hosts to a divisor of "
            f"{len(names)}, or min_nodes to {len(names) - over} or less"
        )
    return dict.fromkeys(names[len(names) - over :], f"every pipeline has {size} hosts")


def check_layers(spec: RunSpec, processes: Sequence[int]) -> None:
    """Check that every rank of a pipeline has a layer, and that `pipeline_layers` has these ranks. Raises PlanError.

    `spec`: with a model whose config the controller can read. `processes`: number of ranks of every host.
    """
    hosts = plan_of(spec).pipeline_hosts(spec)
    if hosts is None:
        return
    ranks = sum(processes[: hosts or len(processes)])
    try:
        layers = shape_of(spec).layers
        check_ranks(ranks, layers)
        if spec.pipeline_layers:
            given_layers(spec.pipeline_layers, ranks, layers)
    except UserError as error:
        raise PlanError(str(error)) from None


def _decide(hosts: list[HostState], connect: Connect, prepared: PreparedRun) -> tuple[RunSpec, list[str]]:
    """Return the spec with what is `auto` decided, and a line for each decision."""
    spec = prepared.spec
    if spec.strategy != AUTO and not spec.automatic:
        return spec, []
    if spec.strategy == AUTO and not any(host.facts["spec"] for host in hosts):
        measure_mesh(hosts, high_ports(), lambda host: connect(host.name))
    return choose_fields(hosts, spec, prepared.files)


def _running_members(
    hosts: list[HostState], run: str, attempt: int, options: LaunchOptions, previous: PreviousStart
) -> list[HostState]:
    """Return the hosts of a start that runs and that this session did not make, by node rank; else an empty list.

    Raises PartlyActiveError: only a part of the run is alive, and the session may not restart it.
    """
    running = [host.name for host in hosts if host.facts["running"]]
    if not running:
        return []
    members: list[HostState] = []
    if not previous.begun or attempt > previous.attempt:
        members = members_of(hosts, attempt)
    if not members and not (previous.begun or options.max_restarts):
        raise PartlyActiveError(
            f"run {run} is only partly alive (on {', '.join(running)}): stop it first: {front_end.command('stop', run)}"
        )
    return members


def members_of(hosts: list[HostState], attempt: int) -> list[HostState]:
    """Return the hosts of a start by node rank if all of them run, else an empty list."""
    alive = {host.name: host for host in hosts if host.facts["running"] and _attempt(host) == attempt}
    names: list[str] = next((host.facts["part"]["hosts"] for host in alive.values()), [])
    return [alive[name] for name in names] if names and set(names) <= set(alive) else []


def _attempt(host: HostState) -> int | None:
    return (host.facts["part"] or {}).get("attempt")


def stopped_line(run: str) -> str:
    """Return what a user is told who stopped a run before its restart."""
    return f"run {run} was stopped: {front_end.playbook('train')} with the same spec continues it"


def check_running_spec(head: HostState, prepared: PreparedRun, data_dir: str, spec: RunSpec) -> None:
    """Check that a run that is already running has this spec, so that the user expects it to be followed.

    `head`: the state of the head, with the text of the run's spec. `data_dir`: the data directory on the head. `spec`:
    the spec of this plan. Raises PlanError: it has another spec.
    """
    here = prepared.spec_on(data_dir, spec)
    before, now = staged_spec(head).values(), here.values()
    may_differ = {"run", "resume", *(["rollout_servers"] if prepared.servers_found else [])}
    names = [name for name in FIELDS if name not in may_differ and before.get(name) != now.get(name)]
    if names:
        different = "; ".join(
            f"{name}: is {quoted(before.get(name))}, wanted {quoted(now.get(name))}" for name in names
        )
        raise PlanError(
            f"run {spec.run} is running with another spec ({different}): choose another name with {front_end.option('run', 'NAME')}, "
            "or repeat the options with which it was started"
        )


def is_finished(hosts: list[HostState], prepared: PreparedRun, spec: RunSpec) -> bool:
    """Return whether the run has finished on every host.

    Raises PlanError: the run's folder on a host holds another spec, or checkpoints while `resume` is never.
    """
    another = f"choose another name with {front_end.option('run', 'NAME')}"
    for host in (host for host in hosts if host.facts["spec"] is not None):
        folder = f"{host.host.data_dir}/runs/{spec.run}"
        if different := changed_fields(staged_spec(host), prepared.spec_on(host.host.data_dir, spec)):
            raise PlanError(
                f"run {spec.run} exists with another spec ({'; '.join(different)}) on {host.name}: repeat the options with which "
                f"it was started, {another}, or delete {folder} there"
            )
        if spec.resume == "never" and (host.facts["result"] or {}).get("status") != "finished":
            raise PlanError(f"run {spec.run} has checkpoints on {host.name} and resume is never: {another}")
    return all((host.facts["result"] or {}).get("status") == "finished" for host in hosts)


def check_plan_mesh(
    entries: list[PlanEntry], hosts: Mapping[str, Host], port: int, connect: Connect, *, write: bool = True
) -> list[str]:
    """Check that every host of a plan reaches every other one and has its own data directory; return warnings.

    A host that does not answer is left for the launch to report. `write`: whether to create a temporary file in each
    data directory, to find hosts that share it. Raises RunError: a connection fails, or hosts share a data directory;
    `lines` hold all findings.
    """
    states = [HostState(hosts[entry.host], facts={"interface": entry.interface}) for entry in entries]
    findings = check_plan(states, lambda host: connect(host.name), port, write=write)
    report = PreflightReport(findings, [finding.line for finding in findings])
    if report.error:
        raise RunError(report.error, **report.as_dict() | {"lines": report.other_lines})
    return [*report.lines, *skipped_checks(states, write)]
