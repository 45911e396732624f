"""Which connections the system units of a run's ranks permit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trainer.config import RunSpec
from trainyard import front_end
from trainyard.preflight.host_state import HostState


@dataclass(frozen=True)
class Isolation:
    """What the system units of a run permit."""

    limited: bool = True  # whether the ranks connect to the run's hosts only, and accept connections of these only
    reason: str = ""  # what the ranks need outside the cluster; empty if nothing or if the user decides


NO_ISOLATION = Isolation(limited=False)


def choose_isolation(wanted: str, spec: RunSpec, has_dataset: bool, run_env: Mapping[str, str]) -> Isolation:
    """Return what the units permit with the launch option `isolate`.

    Args:
        wanted: `auto`, `always` or `never`.
        spec: the run spec.
        has_dataset: whether the controller stages the dataset; otherwise every host fetches it from the hub.
        run_env: environment variables for the ranks, of the run and of its hosts.
    """
    if wanted == "never":
        return NO_ISOLATION
    reason = "" if wanted == "always" else outside_need(spec, has_dataset, run_env)
    return Isolation(limited=not reason, reason=reason)


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


def exposed_hosts(isolation: Isolation, hosts: Sequence[HostState]) -> list[str]:
    """Return the hosts on which nothing keeps other machines from the ports of the run: neither a firewall nor a system unit."""
    if len({host.address for host in hosts}) == 1:
        return []  # all ports are on loopback
    return [
        host.name
        for host in hosts
        if not host.facts.get("firewall")
        and not (isolation.limited and host.facts.get("system_unit", True) and host.host.backend != "process")
    ]


def isolation_lines(isolation: Isolation, hosts: Sequence[HostState]) -> list[str]:
    """Return the sentences of the plan about the units' limits: why there are none, and a warning where nothing protects."""
    lines = []
    if isolation.reason:
        lines.append(f"connections of the ranks are not limited to these hosts, because of {isolation.reason}")
    if exposed := exposed_hosts(isolation, hosts):
        unit = "no system unit limits the ranks" if isolation.limited else "the units of the run do not limit them"
        remedy = "" if isolation.limited else ", or set isolate=always" if isolation.reason else ", or omit isolate"
        lines.append(
            f"warning: nothing keeps other machines from the ports of the run on {', '.join(exposed)}, where they can read its weights "
            f"and run code: no firewall is active, and {unit}; run {front_end.playbook('site')} --tags firewall{remedy}"
        )
    return lines


def unit_lines(hosts: Sequence[HostState], spec: RunSpec, run_env: Mapping[str, str]) -> list[str]:
    """Return the sentences of the plan about hosts without system units, and about keys that system units hide."""
    lines = []
    if bare := [
        host.name for host in hosts if host.facts.get("system_unit") is False and host.host.backend != "process"
    ]:
        lines.append(
            f"{', '.join(bare)}: no system unit protects what the login user has from code in a rank: that needs systemd, and root or "
            "sudo without a password"
        )
    given = run_env.keys() & {"WANDB_API_KEY", "WANDB_MODE"}
    head = hosts[0]  # of rank 0, which logs
    if "wandb" in spec.loggers and not given and head.facts.get("system_unit") and head.host.backend != "process":
        lines.append(f"warning: loggers=wandb: runs on {head.name} do not see ~/.netrc: give WANDB_API_KEY in run_env")
    return lines
