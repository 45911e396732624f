"""The entry of each host in Slurm's configuration, from the facts that the hosts report, and which versions of Slurm
fit together.

A host may be compromised: a name, a number or a version that it reports is data until it is parsed here. Sources: slurm.conf(5),
gres.conf(5) and "Compatibility" in Slurm's upgrade guide.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainer.common.formats import quoted

PRIORITIES = ("low", "normal", "high", "critical")
# Slurm counts releases, not numbers: the controller is the newest, and at most two releases newer than any host.
RELEASES = ("20.11", "21.08", "22.05", "23.02", "23.11", "24.05", "24.11", "25.05", "25.11")
NEWER_BY = 2
USABLE = 0.95  # of the memory: the system needs the rest, and a new kernel may report a little less
MEMORY_STEP = 64  # MiB
MAX_GPUS = 64
CLOCK_LIMIT = 300.0  # s, with which MUNGE refuses messages
SLURM_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,61}[A-Za-z0-9])?")  # no brackets or commas, which Slurm expands
_DEVICE = re.compile(r"/dev/[a-z0-9]{1,20}")
_VERSION = re.compile(r"(\d{2}\.\d{2})\.")


@dataclass(frozen=True)
class QueueNode:
    """One host in the configuration of Slurm."""

    name: str  # in the inventory, and in Slurm
    hostname: str  # the host's own name, with which its daemons find their entry
    address: str  # address at which its peers reach it
    cpus: int
    memory_mib: int  # memory that jobs may use
    gpus: dict[str, int]  # number of GPUs by type
    gpu_memory: int  # memory of the smallest GPU, in GB as its vendor states it; 0 without GPUs
    devices: dict[str, list[str]]  # device files of the GPUs by type

    @property
    def core_memory_mib(self) -> int:
        """Memory for each core."""
        return max(1, self.memory_mib // self.cpus)

    @property
    def gres(self) -> str:
        """The value of `Gres=`, or an empty string. `vram` is not consumed: it only selects hosts."""
        if not self.gpus:
            return ""
        gpus = ",".join(f"gpu:{kind}:{count}" for kind, count in self.gpus.items())
        return f"{gpus},vram:no_consume:{self.gpu_memory}"


def queue_nodes(
    facts: Mapping[str, Mapping[str, Any]], addresses: Mapping[str, str], gpus: Mapping[str, Any] | None = None
) -> list[QueueNode]:
    """Return the nodes of the queue. Raises ValueError: a host reports something that Slurm's files cannot express.

    `facts`: by host, see the module queue_info. `addresses`: addresses of the hosts, in inventory order. `gpus`:
    `cluster_gpus` of the hosts that have it: numbers or UUIDs of the GPUs that runs may use.
    """
    return [_node(name, facts[name], address, (gpus or {}).get(name)) for name, address in addresses.items()]


def _node(name: str, facts: Mapping[str, Any], address: str, wanted: Any) -> QueueNode:
    for value, what in ((name, "its name"), (facts["hostname"], "its hostname")):
        if not SLURM_NAME.fullmatch(str(value)):
            raise ValueError(f"{name}: {what} is {quoted(str(value))}: Slurm needs letters, digits, dots and dashes")
    cpus, memory = int(facts["cpus"]), int(facts["memory_mib"])
    if not 1 <= cpus <= 65_533 or not 1 <= memory <= 1 << 30 or len(facts["gpus"]) > MAX_GPUS:
        raise ValueError(f"{name}: it reports {cpus} cores, {memory} MiB of memory and {len(facts['gpus'])} GPUs")
    devices: dict[str, list[str]] = {}
    sizes = []
    for number, gpu in enumerate(facts["gpus"]):
        if isinstance(wanted, list | tuple) and number not in wanted and gpu["uuid"] not in wanted:
            continue
        if not _DEVICE.fullmatch(str(gpu["device"])):
            raise ValueError(f"{name}: the device file of its GPU {number} is {quoted(str(gpu['device']))}")
        devices.setdefault(gpu_type(str(gpu["name"])), []).append(gpu["device"])
        sizes.append(round(int(gpu["memory_mib"]) / 1024))
    return QueueNode(
        name=name,
        hostname=facts["hostname"],
        address=address,
        cpus=cpus,
        memory_mib=max(1, int(memory * USABLE) // MEMORY_STEP * MEMORY_STEP),
        gpus=dict(Counter({kind: len(files) for kind, files in devices.items()})),
        gpu_memory=min(sizes, default=0),
        devices=devices,
    )


def gpu_type(name: str) -> str:
    """Return a GPU's name as a type of Slurm: `rtx3090` for `NVIDIA GeForce RTX 3090`."""
    words = [word for word in re.findall(r"[a-z0-9]+", name.lower()) if word not in ("nvidia", "geforce")]
    return "".join(words)[:32] or "gpu"


def version_problems(versions: Mapping[str, str], controller: str) -> list[str]:
    """Return one line for each host whose version of Slurm is not compatible with the controller.

    Args:
        versions: versions that each host has or would install, such as `22.05.8-4`.
        controller: the host of slurmctld, one of them.
    """
    problems = []
    releases = {host: _release(version) for host, version in versions.items()}
    newest = releases[controller]
    for host, release in releases.items():
        if release is None:
            what = f"has Slurm {quoted(versions[host])}" if versions[host] else "finds no package slurmd"
            problems.append(f"{host} {what}: use Debian 12 or later, or Ubuntu 22.04 or later")
        elif newest is not None and release > newest:
            what = f"newer than {RELEASES[newest]} of the queue host {controller}"
            problems.append(f"{host} has Slurm {RELEASES[release]}, {what}: put {host} into the group queue")
        elif newest is not None and newest - release > NEWER_BY:
            problems.append(
                f"{host} has Slurm {RELEASES[release]}, more than two releases older than {RELEASES[newest]} of the queue "
                f"host {controller}: upgrade the distribution of {host}, or remove it from the cluster"
            )
    return problems


def clock_problems(times: Mapping[str, float], controller: str) -> list[str]:
    """Return one line for each host whose clock, in seconds since the epoch, MUNGE refuses."""
    late = {host: float(at) - float(times[controller]) for host, at in times.items()}
    wrong = {host: seconds for host, seconds in late.items() if abs(seconds) > CLOCK_LIMIT}
    what = "from that of the queue host {0}, which refuses its messages: set it with date -s, or run chrony"
    return [f"the clock of {host} differs by {abs(wrong[host]):.0f} s {what.format(controller)}" for host in wrong]


def _release(version: str) -> int | None:
    match = _VERSION.match(version)
    return RELEASES.index(match[1]) if match and match[1] in RELEASES else None


def oldest(versions: Sequence[str]) -> str:
    """Return the oldest release among these versions, such as `22.05`. Raises ValueError if one is unknown."""
    found = [_release(version) for version in versions]
    if not found or None in found:
        raise ValueError(f"unknown version of Slurm: {quoted(', '.join(versions))}")
    return RELEASES[min(number for number in found if number is not None)]
