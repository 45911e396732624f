"""Checks of the answers of one host. No I/O: every function returns findings, and an empty list if nothing is wrong."""

from __future__ import annotations

import functools
import ipaddress
import sys
from collections.abc import Sequence
from typing import Any

from trainyard import front_end
from trainyard.preflight.findings import Finding
from trainyard.preflight.host_state import HostState
from trainyard.project_folder import FOREIGN, pip_install
from trainyard.provision.sudo import sudo_error
from trainyard.python_env.resolve import is_supported_python
from trainyard.remote import package_versions

RUN_OVERHEAD = 200 << 20  # bytes that a run writes beside staged files: logs, events, checkpoints of a small adapter
DISK_LOW = 10 << 30  # bytes
MEMORY_LOW = 2048  # MiB
LINK_LOW = 1000  # Mbit/s that a wired NIC should have negotiated
SLOW_LOOKUP = 3.0  # s to resolve the names of all peers
NODE = ("torch", "transformers", "peft", "datasets", "tensorboard")  # what a run imports
CORE_SHARE = 0.75  # minimum share of a core that a busy loop should get
WSL_CONFIG = r"[wsl2] in %UserProfile%\.wslconfig of Windows"
WSL_MEMORY = f"set memory under {WSL_CONFIG}, and run wsl --shutdown there"

# Messages of the OpenSSH client, and the remedy. The first match applies.
SSH_REMEDIES = {
    "Permission denied": "add your key to the host (ssh-copy-id), or correct ansible_user",
    "Host key verification failed": "if the host was reinstalled, remove its old key from known_hosts",
    "No route to host": "check that the host is on and its cable is connected, or correct ansible_host",
    "Connection refused": "start sshd on the host, or correct ansible_port",
    "Could not resolve": "set ansible_host to its IP address",
    "no answer within": "the host accepts connections but hangs: check its console, or power-cycle it",
    "timed out": "check that the host is on, its cable is connected and port 22 is open, or correct ansible_host",
    "not found": "install python3 on the host",
}


class _Findings:
    """Collects the findings of one host."""

    def __init__(self, host: str) -> None:
        self.host = host
        self.found: list[Finding] = []

    def _add(self, level: str, check: str, text: str, remedy: str) -> None:
        self.found.append(Finding(check, self.host, level, text, remedy))

    failure = functools.partialmethod(_add, "failure")
    warning = functools.partialmethod(_add, "warning")
    note = functools.partialmethod(_add, "note")


# Checks before every run: they need `facts` only ------------------------------------------------------------------------


def environment(state: HostState) -> list[Finding]:
    """Check for a Python with torch, a writable data directory, and no other run."""
    python, data_dir, facts = state.host.python, state.host.data_dir, state.facts
    out = _Findings(state.name)
    if not facts["python_exists"]:
        remedy = f"run {front_end.playbook('site')}, or correct cluster_python"
        out.failure("python", f"there is no Python at {python}", remedy)
    elif (version := facts["versions"].get("python")) and not is_supported_python(version):
        remedy = f"set python_base to a supported one, or python_env: conda, and run {front_end.playbook('site')}"
        out.failure("python", f"{python} is Python {version}, 3.11 to 3.14 is required", remedy)
    elif "torch" not in facts["versions"]:
        # The environment of the controller is the user's own: site.yml does not change it.
        own = pip_install(NODE) if python == sys.executable else front_end.playbook("site")
        out.failure("torch", f"{python} has no torch", f"run {own}, or correct cluster_python")
    if foreign := facts["versions"].get(package_versions.FOREIGN):
        text, _, remedy = FOREIGN.format(version=foreign, python=python).partition(": ")
        out.warning("python", text, remedy)
    if facts.get("noexec"):
        text = f"{python} is on a file system with the option noexec, which loads no library"
        out.failure("disk", text, "remove that option in /etc/fstab and remount it, or set cluster_data_dir")
    if not facts["may_write"]:
        out.failure("disk", f"cannot write to {data_dir}", "correct its permissions, or set cluster_data_dir")
    if facts.get("busy_with") and not state.host.lease:  # Slurm has leased other processors to that run
        text = f"run {facts['busy_with']} is in progress on this host"
        out.failure("busy", text, "stop that run, or select other hosts with --limit")
    return out.found


def disk_space(state: HostState, needed: int) -> list[Finding]:
    """Check for free disk space. `needed` is in bytes."""
    free = state.facts["free_bytes"]
    if free >= needed:
        return []
    text = f"{free / 1e6:.0f} MB free in {state.host.data_dir}, the run needs about {needed / 1e6:.0f} MB"
    return [Finding("disk", state.name, "failure", text, "free disk space, or set cluster_data_dir")]


# Checks of preflight only: they need `health` ---------------------------------------------------------------------------


def reachability(state: HostState) -> list[Finding]:
    """Report why the host does not answer, with the message of the OpenSSH client."""
    error = state.error
    remedies = (remedy for text, remedy in SSH_REMEDIES.items() if text.lower() in error.lower())
    remedy = next(remedies, "log in by hand to see the cause")
    return [Finding("ssh", state.name, "failure", f"does not answer: {error}", remedy)]


def resources(state: HostState) -> list[Finding]:
    """Check what site.yml needs, and the disk."""
    out, health, free = _Findings(state.name), state.health, state.facts["free_bytes"]
    said, site = health["site"], front_end.playbook("site")
    if error := said.get("sudo"):
        text, _, remedy = sudo_error(error).partition(": ")
        text, remedy = text or f"sudo fails ({error})", remedy or "run sudo -n true on this host to see the cause"
        remedy = f"{remedy}; {site} needs it, {front_end.playbook('train')} does not"
        (out.warning if "password" in text else out.failure)("sudo", text, remedy)
    if names := said.get("packages"):
        remedy = f"run sudo dpkg --configure -a on this host: {site} installs packages"
        out.failure("packages", f"dpkg has not configured {names}", remedy)
    if names := said.get("folders"):
        text = f"root cannot open {names}, so the service manager cannot show it to runs"
        out.failure("disk", text, "set cluster_data_dir and cluster_python to folders on a disk of this host")
    for service, program in (("ollama", "Ollama"), ("queue", "Slurm")):
        if names := said.get(service):
            remedy = f"remove them: {site} does not replace what it did not install"
            out.failure(service, f"has files of another {program} ({names})", remedy)
    if 0 < free < DISK_LOW:
        out.warning("disk", f"{free / 1e9:.1f} GB free in {state.host.data_dir}", "free disk space for checkpoints")
    if health["inodes_free"] == 0 and free > 0:
        out.failure("disk", f"there is no free inode in {state.host.data_dir}", "delete small files")
    return out.found


def memory(state: HostState, memory_mib: int) -> list[Finding]:
    """Check the memory. `memory_mib` is what one process must be able to allocate."""
    out, health = _Findings(state.name), state.health
    available, total = health["memory"]["available_mib"], health["memory"]["total_mib"]
    raise_limit = WSL_MEMORY if health.get("wsl") else "raise the memory limit of the host"
    if not health["memory_allocated"]:
        text = f"a process cannot allocate {memory_mib} MiB of memory ({available} of {total} MiB are reported as free)"
        out.failure("memory", text, f"end the programs that use it, or {raise_limit}")
    elif available < MEMORY_LOW:
        text = f"{available} of {total} MiB of memory are free"
        other = WSL_MEMORY if health.get("wsl") else "use a smaller model"
        out.warning("memory", text, f"end the programs that use it, or {other}")
    return out.found


def wsl(state: HostState, hosts: int) -> list[Finding]:
    """Check what Windows sets for a host that runs in WSL2. `hosts`: the number of hosts in the cluster."""
    out, found = _Findings(state.name), state.health.get("wsl")
    if not found:
        return []
    reached = hosts > 1 and state.facts["interface"] != "lo"  # by other machines
    if reached and found["networking"] not in ("mirrored", "bridged"):
        text = f"runs in WSL2 with the networking mode {found['networking']}, in which other machines do not reach it"
        remedy = f"set networkingMode=mirrored under {WSL_CONFIG} (11 22H2 or newer), and run wsl --shutdown there"
        out.failure("wsl", text, remedy)
    if reached and not found["sshd"]:
        text = f"runs in WSL2, and no SSH server listens on port {state.host.login.port or 22}"
        remedy = "install openssh-server in WSL2, set systemd=true under [boot] in /etc/wsl.conf, and run wsl --shutdown in Windows"
        out.warning("wsl", text, remedy)
    if found["driver"]:
        names = " ".join(found["driver"])
        text = f"runs in WSL2, where the driver of Windows must be the only one, and has the packages {names}"
        out.failure("wsl", text, f"run sudo apt-get purge {names}, and install the driver in Windows")
    if not found["memory_set"]:
        total = state.health["memory"]["total_mib"] / 1024
        text = f"WSL2 has {total:.1f} GiB of memory, by default half of that of Windows"
        out.note("wsl", text, f"if a run needs more, {WSL_MEMORY}")
    return out.found


def processor(state: HostState) -> list[Finding]:
    """Check for a CPU quota and for other programs that use the CPUs."""
    out, health, cpus = _Findings(state.name), state.health, state.facts["cpus"]
    spin, load, quota = health["spin"], health["load"], health["quota"]
    # Half of what a busy loop gets on this host: on an overloaded machine that is less than half a core.
    others = [row for row in health["busy"] if row["cores"] > min(1.0, spin["share"]) / 2]
    slow = spin["share"] < CORE_SHARE
    if quota is not None and quota < cpus:
        text = f"a CPU quota limits the host to {quota:g} of {cpus} CPUs"
        out.warning("cpu", text, "raise the quota: every rank waits for the slowest")
    elif slow and spin["pauses"] >= 3 and load < 1.5 * cpus:
        text = f"a busy loop gets {spin['share']:.0%} of a core and pauses for up to {spin['gap'] * 1e3:.0f} ms, as under a CPU quota"
        out.warning("cpu", text, "raise the quota: every rank waits for the slowest")
    elif slow and not others:
        text = f"a busy loop gets {spin['share']:.0%} of a core (load {load:.1f} on {cpus} CPUs)"
        out.warning("load", text, "end other programs on this host or on the machine that it shares")
    for row in others:
        text = f"{row['name']} (pid {row['pid']}, uid {row['uid']}) uses {row['cores']} cores"
        out.warning("load", text, "end it or wait for it: every rank waits for the slowest")
    for row in health["torchruns"]:
        text = f"another training run is in progress (pid {row['pid']}: {row['command']})"
        out.failure("busy", text, "wait until it ends, or select other hosts with --limit")
    return out.found


def accelerator(state: HostState) -> list[Finding]:
    """Check that the driver shows every NVIDIA card, and that no other process uses a GPU."""
    out, gpu = _Findings(state.name), state.health["gpu"]
    if gpu["cards"] > len(gpu["gpus"]):
        text = f"there are {gpu['cards']} NVIDIA cards on the PCI bus, the driver shows {len(gpu['gpus'])}"
        remedy = f"run {front_end.playbook('site')} -e nvidia_install=true, or reboot after a driver update"
        out.warning("gpu", text, remedy)
    for index in gpu["exclusive"]:
        text = f"GPU {index} is in an exclusive compute mode: only one process can use it, and runs share no MPS server"
        out.warning("gpu", text, f"run sudo nvidia-smi -i {index} -c DEFAULT on this host")
    for line in gpu["users"]:
        out.warning("gpu", f"another process uses the GPU ({line})", "end it, or wait until it ends")
    return out.found


def datasets(state: HostState) -> list[Finding]:
    """Check that staged datasets have the digest that their name contains."""
    out, remedy = _Findings(state.name), f"delete it: {front_end.playbook('train')} copies it again"
    for path in state.health["files"]["damaged"]:
        out.failure("checksum", f"{path} is damaged: its SHA-256 digest is not the one in its name", remedy)
    return out.found


def network(state: HostState, states: Sequence[HostState]) -> list[Finding]:
    """Check the NIC on the route to the head, other NICs, and name resolution."""
    return [*_route(state, len(states)), *_other_nics(state, states), *_names(state, states)]


def _route(state: HostState, hosts: int) -> list[Finding]:
    out, facts = _Findings(state.name), state.facts
    if facts["route_error"] or not facts["interface"]:
        text = facts["route_error"] or f"no network device has the address {facts['source']}"
        out.failure("nic", text, "correct cluster_address")
    elif facts["source"] != state.address and hosts > 1:
        text = f"connects to the head from {facts['source']} ({facts['interface']}), but its cluster_address is {state.address}"
        out.failure("nic", text, "set cluster_address to an address in the network that all hosts share")
    device = state.device
    if device and device["wireless"]:
        out.warning("nic", f"{device['name']} is wireless", "use a cable: every step waits for the slowest link")
    if device and 0 < device["mbit"] < LINK_LOW:
        text = f"{device['name']} runs at {device['mbit']} Mbit/s"
        out.warning("link", text, "check the cable and the switch port")
    return out.found


def _other_nics(state: HostState, states: Sequence[HostState]) -> list[Finding]:
    """Programs without GLOO_SOCKET_IFNAME may choose a NIC whose network has no peer."""
    out, interface = _Findings(state.name), state.facts["interface"]
    if interface == "lo":  # one machine is several hosts: its NICs do not matter
        return []
    peers = [ipaddress.ip_address(other.address) for other in states if other is not state]
    for device in state.health["devices"]:
        if device["virtual"] or device is state.device or device["address"].startswith("127."):
            continue
        subnet = ipaddress.ip_network(f"{device['address']}/{device['mask']}", strict=False)
        if not any(peer in subnet for peer in peers):
            text = f"has a second NIC, {device['name']} ({device['address']}), in a network without peers"
            remedy = f"{front_end.playbook('train')} uses {interface}; for other programs set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME"
            out.warning("nic", text, remedy)
    return out.found


def _names(state: HostState, states: Sequence[HostState]) -> list[Finding]:
    out, health = _Findings(state.name), state.health
    resolved: dict[str, Any] = health["names"]["addresses"]
    for peer in states:
        answers = resolved.get(peer.name, [])
        if peer is not state and answers and peer.address not in answers:
            text = f"resolves {peer.name} to {', '.join(answers)}, but its address is {peer.address}"
            site = front_end.playbook("site")
            remedy = f"correct /etc/hosts on this host, or DNS: {site} writes the names of all hosts"
            out.failure("names", text, remedy)
    own = resolved.get(health["hostname"], [])
    if own and all(ipaddress.ip_address(address).is_loopback for address in own) and state.facts["interface"] != "lo":
        text = f"resolves its own name {health['hostname']} to {own[0]}"
        train = front_end.playbook("train")
        out.note("names", text, f"runs of {train} are not affected; other gloo programs need GLOO_SOCKET_IFNAME")
    if health["names"]["seconds"] > SLOW_LOOKUP:
        text = f"name resolution takes {health['names']['seconds']:.0f} s"
        remedy = "its DNS server does not answer: correct /etc/resolv.conf, torchrun resolves names too"
        out.warning("names", text, remedy)
    return out.found
