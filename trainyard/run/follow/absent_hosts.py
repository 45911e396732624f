"""The hosts of a run that take no part in its current start, and whether they may return."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from trainer.config import RunSpec
from trainyard.run.follow.rejoin import Rejoin, Speeds
from trainyard.run.launch_options import LaunchOptions
from trainyard.run.plan.gather_facts import Connect, describe, fit_hosts
from trainyard.run.plan.make_plan import surplus
from trainyard.run.types import PlanEntry, PreparedRun
from trainyard.wire.connection import Host


def watch_absent(
    plan: list[PlanEntry],
    spec: RunSpec,
    hosts: Mapping[str, Host],
    connect: Connect,
    prepared: PreparedRun,
    options: LaunchOptions,
    speeds: Speeds,
    failed_at: float | None,
) -> Rejoin | None:
    """Return what watches the hosts without which a start continues; None if the run may not be restarted for them.

    Args:
        plan: the entries of this start.
        spec: its spec, whose strategy is never `auto`.
        hosts: all hosts of the run by name, in inventory order.
        speeds: measurements of earlier starts.
        failed_at: when the start before this one failed, on the monotonic clock; None if this is the first.
    """
    present = {entry.host for entry in plan}
    absent = [name for name in hosts if name not in present]
    if options.elastic or not options.max_restarts:
        return None

    def fits(names: list[str]) -> Callable[[], list[str]]:
        head = plan[0]
        states = [describe(hosts[name]) for name in (head.host, *names)]
        connected = {state.name: connect(state.name) for state in states}.__getitem__
        ask = (states, connected, prepared, options, spec.strategy)

        def check() -> list[str]:
            found = fit_hosts(*ask)
            extra = surplus([*present, *found], spec, 1)
            return [name for name in found if name not in extra]

        return check

    return Rejoin(present, absent if options.min_nodes else [], connect, fits, speeds, failed_at)
