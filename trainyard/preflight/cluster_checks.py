"""Checks that compare the answers of hosts. No I/O: every function returns findings, and an empty list if nothing is wrong."""

from __future__ import annotations

import ipaddress
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from trainyard import front_end
from trainyard.preflight.findings import Finding
from trainyard.preflight.host_state import HostState
from trainyard.remote.package_versions import FOREIGN

CLOCK_SKEW = 2.0  # s from the median of all clocks
CLOCK_WRONG = 300.0  # s, with which MUNGE, and so Slurm, refuses messages, and certificates seem expired
SLOW_LINK = 300.0  # Mbit/s: a 100 Mbit port or Wi-Fi, not a gigabit link under load
SLOW_PING = 5.0  # ms round trip
# Lets other machines connect to WSL2: learn.microsoft.com/windows/wsl/networking
HYPER_V = "Set-NetFirewallHyperVVMSetting -Name '{40E0AC32-46A5-438A-A0B2-2B479E8F2E90}' -DefaultInboundAction Allow"
STALL_SIZE = 128  # KiB that `mesh` sends at once to find paths that drop large packets


# Checks before every run: they need `facts` only ------------------------------------------------------------------------


def duplicates(states: Sequence[HostState]) -> list[Finding]:
    """Check for one machine under two names, and for loopback addresses between machines."""
    found = []
    seen: dict[tuple[str, ...], str] = {}
    for state in states:
        first = seen.setdefault(_identity(state), state.name)
        if first != state.name:
            text = f"{first} and {state.name} are one machine (same boot_id and machine-id)"
            found.append(Finding("twice", state.name, "failure", text, "remove one of them from the inventory"))
    loopback = [state.name for state in states if ipaddress.ip_address(state.address).is_loopback]
    if loopback and len({state.facts["boot_id"] for state in states}) > 1:
        text = "cluster_address is a loopback address, which other machines cannot reach"
        found.append(Finding("address", loopback[0], "failure", text, "set it to an address that they reach"))
    return found


def _identity(state: HostState) -> tuple[str, ...]:
    """Return the common property of inventory entries that are one machine with one data directory."""
    return (*_machine(state), state.host.data_dir)


def _machine(state: HostState) -> tuple[str, ...]:
    """Return the common property of inventory entries that are one machine."""
    # Containers share a boot_id, and cloned images share a machine-id. Entries that share both are one machine.
    return (state.facts["boot_id"], state.facts["machine_id"], *_own_addresses(state.facts))


def machines(states: Sequence[HostState]) -> list[HostState]:
    """Return the hosts, and of several that are one machine only the first: their measurements are the same."""
    return list({_machine(state): state for state in reversed(states)}.values())[::-1]


def _own_addresses(facts: Mapping[str, Any]) -> tuple[str, ...]:
    """Return what distinguishes containers and clones of one image: their addresses."""
    return tuple(sorted(facts.get("addresses") or ()))


def package_versions(states: Sequence[HostState]) -> list[Finding]:
    """Check that all environments have the same packages as the first host's; the version of Python may differ."""
    found = []
    first = next((state for state in states if state.facts["versions"]), None)
    for state in states:
        if first is None or state is first or not state.facts["versions"]:
            continue
        expected, actual = first.facts["versions"], state.facts["versions"]
        names = sorted({*expected, *actual} - {"python", FOREIGN})
        names = [name for name in names if expected.get(name) != actual.get(name)]
        if names:
            shown = ", ".join(f"{name} {expected.get(name, 'none')} / {actual.get(name, 'none')}" for name in names)
            text = f"{first.name} and {state.name} have different environments: {shown}"
            remedy = f"run {front_end.playbook('site')} on all hosts"
            found.append(Finding("versions", state.name, "failure", text, remedy))
    return found


# Checks of preflight only: they need `health` ---------------------------------------------------------------------------


def clones(states: Sequence[HostState]) -> list[Finding]:
    """Check for different machines with the same machine-id."""
    found = []
    seen: dict[str, HostState] = {}
    for state in states:
        machine_id = state.facts["machine_id"]
        first = seen.setdefault(machine_id, state) if machine_id else state
        if first is not state and _own_addresses(first.facts) != _own_addresses(state.facts):
            text = f"has the machine-id of {first.name}: both are clones of one image"
            remedy = "run rm /etc/machine-id && systemd-machine-id-setup on it: DHCP may give both the same address"
            found.append(Finding("twice", state.name, "warning", text, remedy))
    return found


def clocks(states: Sequence[HostState]) -> list[Finding]:
    """Compare every clock with the median. The duration of the request does not count as a difference."""
    if len(states) < 2:
        return []
    offsets = {}
    for state in states:
        sent, received = state.asked
        began, ended = state.health["clock"]
        # The true offset is between these two.
        offsets[state.name] = (began - received + (ended - began), began - sent)
    median = statistics.median((low + high) / 2 for low, high in offsets.values())
    found = []
    for name, (low, high) in offsets.items():
        skew = max(low - median, median - high, 0.0)
        if skew > CLOCK_SKEW:
            text = f"its clock differs by {skew:.0f} s from the other hosts"
            remedy = f"run chrony on it ({front_end.playbook('site')}), or set the clock"
            level = "failure" if skew > CLOCK_WRONG else "warning"
            found.append(Finding("clock", name, level, text, remedy))
    return found


def mtus(states: Sequence[HostState]) -> list[Finding]:
    """Check that the NICs on the routes to the head have the same MTU."""
    sizes = {state.name: device["mtu"] for state in states if (device := state.device)}
    usual = statistics.mode(sizes.values()) if sizes else 0
    texts = {name: f"the MTU of its NIC is {size}, on the other hosts it is {usual}" for name, size in sizes.items()}
    remedy = "set the same MTU on all hosts (netplan) and on the switch"
    return [Finding("mtu", name, "failure", texts[name], remedy) for name, size in sizes.items() if size != usual]


def gpus(states: Sequence[HostState]) -> list[Finding]:
    """Check that all hosts have a GPU, or none."""
    with_gpu = [state.name for state in states if state.facts["gpus"]]
    if not with_gpu:
        return []
    text, remedy = f"has no GPU, but {with_gpu[0]} has one", "exclude it with --limit, or run nvidia-smi on it"
    return [Finding("gpu", state.name, "warning", text, remedy) for state in states if not state.facts["gpus"]]


def checksums(states: Sequence[HostState]) -> list[Finding]:
    """Check that shared datasets and the run's trainer are the same on all hosts."""
    digests: dict[str, dict[str, str]] = {}
    for state in states:
        for path, digest in state.health["files"]["equal"].items():
            digests.setdefault(path, {})[state.name] = digest
    found = []
    for path, by_host in digests.items():
        usual = statistics.mode(by_host.values())
        different = [state.name for state in states if by_host.get(state.name) not in (usual, None)]
        missing = [state.name for state in states if state.name not in by_host]
        remedy = f"run {front_end.playbook('site')} --tags nfs"
        if path.startswith("runs/"):
            remedy = f"run {front_end.playbook('train')} again: it copies what differs"
        for name in [*different, *missing]:
            text = f"{path} is missing" if name in missing else f"{path} differs from the other hosts"
            found.append(Finding("checksum", name, "failure", text, remedy))
    return found


# Checks of the mesh: they need `mesh` -----------------------------------------------------------------------------------


def connectivity(states: Sequence[HostState], ports: Sequence[int], head_port: int) -> list[Finding]:
    """Check every pair of hosts that have a `mesh`: the tried ports, among them `head_port` of the rendezvous, large packets,
    speed, and the data directory.
    """
    found = []
    for state in states:
        if head_port in _mesh(state)["taken"]:
            remedy = f"{front_end.playbook('train')} takes the next free port; to see what uses this one, run ss -ltnp"
            found.append(Finding("port", state.name, "warning", f"port {head_port} is in use on this host", remedy))
    found += firewalls(states, [port for port in ports if port != head_port], head_port)
    return [*found, *large_packets(states), *link_speeds(states), *data_dirs(states)]


def firewalls(states: Sequence[HostState], high_ports: Sequence[int], head_port: int) -> list[Finding]:
    """Report ports of a host that peers cannot reach, one finding per host."""
    found = []
    high = {str(port) for port in high_ports}
    for target in states:
        taken = {str(port) for port in _mesh(target)["taken"]}
        blocked: dict[str, dict[str, str]] = {}  # source: {port: error}
        for source in states:
            errors = _mesh(source)["reached"].get(target.name, {})
            if errors := {port: error for port, error in errors.items() if error and port not in taken}:
                blocked[source.name] = errors
        if not blocked:
            continue
        ports = set().union(*blocked.values())
        error = next(iter(next(iter(blocked.values())).values()))
        all_high = bool(high) and ports >= high - taken
        which = f"TCP port {', '.join(sorted(ports))}"
        if all_high and str(head_port) in ports:
            which = "any TCP port"
        elif all_high:
            which = "high TCP ports (32768-60999), on which gloo and NCCL listen,"
        text = f"{', '.join(blocked)} cannot reach {which} of this host ({error})"
        remedy = f"its firewall drops the connections: {front_end.playbook('site')} opens all TCP ports between cluster addresses"
        if target.health.get("wsl"):
            remedy = f"the Hyper-V firewall of Windows drops them: run {HYPER_V} in PowerShell as administrator"
        found.append(Finding("firewall", target.name, "failure", text, remedy))
    return found


def ollama_ports(states: Sequence[HostState], unreached: Mapping[str, str]) -> list[Finding]:
    """Report hosts whose Ollama peers or the controller (`unreached`: its error by host) cannot reach, one finding per host."""
    found = []
    for target in states:
        errors = {s.name: e for s in states if s.mesh and (e := s.mesh.get("services", {}).get(target.name))}
        errors |= {"the controller": error} if (error := unreached.get(target.name)) else {}
        if errors:
            port, first = target.host.ollama_port, next(iter(errors.values()))
            text = f"{', '.join(errors)} cannot reach TCP port {port} of its Ollama ({first})"
            remedy = f"run {front_end.playbook('site')} --tags firewall, or allow port {port} from these addresses with firewall_allow"
            found.append(Finding("ollama", target.name, "warning", text, remedy))
    return found


def large_packets(states: Sequence[HostState]) -> list[Finding]:
    """Report paths that carry small packets and drop large ones."""
    found = []
    mtu_of = {state.name: _mesh(state)["mtu"] for state in states}
    for state in states:
        mtu = mtu_of[state.name]
        for peer, link in _mesh(state)["lines"].items():
            # `mtus` reports unequal MTUs.
            dropped = link.get("ping_small") and link.get("ping_large") is False and mtu <= mtu_of.get(peer, 0)
            if dropped or "stalled" in link:
                size = f"packets of {mtu} bytes" if dropped else f"{STALL_SIZE} KiB sent at once"
                text = f"{size} do not reach {peer}"
                remedy = "the path has a smaller MTU (a tunnel or a switch): set that MTU on both hosts"
                found.append(Finding("mtu", state.name, "failure", text, remedy))
    return found


def link_speeds(states: Sequence[HostState]) -> list[Finding]:
    """Report slow links to the head. If all links are slow, the head's own link is the cause."""
    links = [(state.name, link.get("mbit")) for state in states for link in _mesh(state)["lines"].values()]
    rates = {name: rate for name, rate in links if rate is not None}
    slow = {name: rate for name, rate in rates.items() if rate < SLOW_LINK}
    remedy = "check cable, switch port and NIC (ethtool): every step waits for the slowest link"
    if len(slow) > 1 and len(slow) == len(rates):
        head = next((state.name for state in states if state.name not in rates), states[0].name)
        text = f"all links to it are slow ({min(slow.values()):.0f} to {max(slow.values()):.0f} Mbit/s)"
        return [Finding("link", head, "warning", text, remedy)]
    texts = {name: f"its link to the head carries {rate:.0f} Mbit/s" for name, rate in slow.items()}
    found = [Finding("link", name, "warning", text, remedy) for name, text in texts.items()]
    for state in states:
        ping = _mesh(state)["lines"].get(states[0].name, {}).get("latency_ms", 0.0)
        if ping > SLOW_PING:
            text = f"the round trip to {states[0].name} takes {ping:.1f} ms"
            remedy = "use a cable: every all-reduce waits for the round trip"
            found.append(Finding("link", state.name, "warning", text, remedy))
    return found


def data_dirs(states: Sequence[HostState]) -> list[Finding]:
    """Report folders that several hosts share, one finding per group of hosts, and data directories that cannot be written to."""
    found = []
    groups: list[list[HostState]] = []
    for state in states:
        error = _mesh(state)["write_error"]
        if error and state.facts.get("may_write", True):  # else `environment` reports it
            text = f"cannot write to {state.host.data_dir}: {error}"
            remedy = "correct the cause, or set cluster_data_dir to a folder on ext4, XFS or Btrfs"
            found.append(Finding("disk", state.name, "failure", text, remedy))
        group = next((group for group in groups if any(_shared_folder(state, other) for other in group)), None)
        if group:
            group.append(state)
        else:
            groups.append([state])
    for first, *others in groups:
        if others:
            names = ", ".join(other.name for other in others)
            if {_shared_folder(first, other) for other in others} <= {"runs", ""}:
                text = f"shares its folder of runs {first.host.data_dir}/runs with {names}"
                remedy = "replace it by a folder on a local disk of each host, or set another cluster_data_dir"
            else:
                text = f"shares its data directory {first.host.data_dir} with {names}"
                remedy = "set cluster_data_dir to a folder on a local disk of each host, for example /srv/trainyard"
            found.append(Finding("shared", first.name, "failure", text, remedy))
    return found


def _shared_folder(one: HostState, other: HostState) -> str:
    """Return which folder two hosts share, see `measure` of the mesh; empty if none, or if both are one machine, which `duplicates` reports."""
    if "boot_id" in one.facts and _identity(one) == _identity(other):
        return ""
    # The host that ends first has removed its markers by then; the later one may not see them.
    return _mesh(one)["shares_with"].get(other.name) or _mesh(other)["shares_with"].get(one.name, "")


def _mesh(state: HostState) -> dict[str, Any]:
    """Return the host's part of the mesh. Raises ValueError if it has none."""
    if state.mesh is None:
        raise ValueError(f"{state.name} has not taken part in the mesh")
    return state.mesh
