"""Which connections of a run's ranks are filtered: those from other machines, and those to other machines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trainer.config import RunSpec
from trainyard import front_end
from trainyard.preflight.host_state import HostState


@dataclass(frozen=True)
class Isolation:
    """The filter of a run.

    Attributes:
        incoming: whether the ranks accept connections of the run's hosts only.
        outgoing: whether the ranks connect to the run's hosts only. Only a system unit of systemd enforces it.
        reason: what the ranks need outside the cluster; empty if nothing or if the user decides.
    """

    incoming: bool = True
    outgoing: bool = False
    reason: str = ""


NO_ISOLATION = Isolation(incoming=False)


def choose_isolation(wanted: str, spec: RunSpec, has_dataset: bool, run_env: Mapping[str, str]) -> Isolation:
    """Return the filter for the launch option `isolate`.

    Args:
        wanted: `auto`, `always` or `never`.
        spec: the run spec.
        has_dataset: whether the controller stages the dataset; otherwise every host fetches it from the hub.
        run_env: environment variables for the ranks, of the run and of its hosts.
    """
    if wanted == "never":
        return NO_ISOLATION
    reason = "" if wanted == "always" else outside_need(spec, has_dataset, run_env)
    return Isolation(outgoing=not reason, reason=reason)


def outside_need(spec: RunSpec, has_dataset: bool, run_env: Mapping[str, str]) -> str:
    """Return the setting for which the ranks connect to machines outside the run, or an empty string.

    Models need no such connection, because the controller stages them.
    """
    if "wandb" in spec.loggers:
        return "loggers=wandb"
    if spec.backend == "unsloth":
        return "backend=unsloth"
    if not has_dataset and not spec.fake_data:
        return f"dataset={spec.dataset_name}"
    for name, value in run_env.items():
        # A proxy or a server; or another network, whose addresses are unknown here.
        ends = ("_proxy", "_host", "_endpoint", "_socket_ifname", "trackio_space_id")
        if "://" in value or name.lower().endswith(ends):
            return f"{name} in run_env or cluster_env"
    return ""


def isolation_lines(isolation: Isolation, hosts: Sequence[HostState]) -> list[str]:
    """Return the sentences of the plan about the filter: what remains open, and a warning where nothing protects."""
    if isolation.reason:
        lines = [f"outgoing connections of the ranks are not limited to these hosts, because of {isolation.reason}"]
        return lines + _unfiltered_lines(isolation, hosts)
    if isolation.incoming or len({host.address for host in hosts}) == 1:
        return _unfiltered_lines(isolation, hosts)
    open_hosts = [host.name for host in hosts if not host.facts.get("firewall")]
    if not open_hosts:
        return []
    return [
        f"warning: isolate=never, and no firewall is active on {', '.join(open_hosts)}: every machine that reaches "
        "the ports of the run can read its weights and run code on the hosts; omit isolate, or run "
        f"{front_end.playbook('site')} --tags firewall"
    ]


def unit_lines(hosts: Sequence[HostState]) -> list[str]:
    """Return the sentence of the plan about hosts on which no unit keeps ranks from the files of the login user."""
    bare = [host.name for host in hosts if host.facts.get("system_unit") is False and host.host.backend != "process"]
    if not bare:
        return []
    return [
        f"{', '.join(bare)}: no system unit protects what the login user has from code in a rank: that needs systemd, and root or "
        "sudo without a password"
    ]


def _unfiltered_lines(isolation: Isolation, hosts: Sequence[HostState]) -> list[str]:
    """Return what protects a run on hosts whose kernel permits no socket filter, and a warning where nothing does."""
    if len({host.address for host in hosts}) == 1:
        return []  # all ports are on loopback
    refused = [host for host in hosts if host.facts.get("socket_filter") is False]
    walled = [host.name for host in refused if host.facts.get("firewall")]
    limited = [
        host.name
        for host in refused
        if host.name not in walled
        and isolation.outgoing
        and host.facts.get("system_unit")
        and host.host.backend != "process"
    ]
    bare = [host.name for host in refused if host.name not in [*walled, *limited]]
    protected = (("their firewalls keep", walled), ("the systemd units of the run keep", limited))
    lines = [
        f"{', '.join(names)}: the kernel permits no socket filter without privileges; {what} other machines from the ports of the run"
        for what, names in protected
        if names
    ]
    if bare:
        unit = "" if isolation.outgoing else ", or set isolate=always"
        lines.append(
            f"warning: nothing keeps other machines from the ports of the run on {', '.join(bare)}: the kernel permits no socket "
            f"filter without privileges, no firewall is active, and no system unit limits the ranks; run {front_end.playbook('site')} --tags firewall{unit}"
        )
    return lines
