"""The hosts that a plan is for, and the memory that their processes have. No torch at import."""

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainer.errors import UserError
from trainer.formats import printable
from trainer.inputs import read_regular

MAX_HOSTS = 10_000
_MAX_PROCESSES = 1024  # per host
_MAX_FILE = 64 * 1024 * 1024  # bytes
BASE = 475  # MiB of host memory per process for Python and its libraries
_USABLE = 0.92  # fraction of memory that processes can use


def read_hosts(source: str) -> list[dict[str, Any]]:
    """Read the value of --hosts: a number of hosts, or a JSON file.

    Returns:
        For each host its name (`host`), `processes`, and `memory_mib` if a file names it (0: unknown).

    Raises:
        UserError: no such file, or one without a list of hosts.
    """
    if re.fullmatch(r"[0-9]{1,5}", source) and 1 <= int(source) <= MAX_HOSTS:
        return [{"host": f"host{place + 1}", "processes": 1} for place in range(int(source))]
    try:
        hosts = json.loads(read_regular(Path(source), _MAX_FILE))
        return [_host(place, host) for place, host in enumerate(hosts[:MAX_HOSTS])]
    except OSError as error:
        raise UserError(
            f"--hosts: expected a number of hosts or a file, got {printable(source)}: {error.strerror}"
        ) from None
    except (ValueError, TypeError, AttributeError, LookupError, ArithmeticError, RecursionError):
        raise UserError(
            f"--hosts: {printable(source)}: expected a JSON list with one object per host (host, processes, memory_mib)"
        ) from None


def _host(place: int, host: dict[str, Any]) -> dict[str, Any]:
    processes = int(host.get("processes") or len(host.get("ranks", [0])))
    memory = float(host.get("memory_mib") or 0)
    if not (1 <= processes <= _MAX_PROCESSES and 0 <= memory < 1e12):
        raise ValueError
    return {"host": str(host.get("host", f"host{place + 1}")), "processes": processes, "memory_mib": memory}


def usable_bytes(device: str, memory: Sequence[tuple[float, int]]) -> float | None:
    """Return the bytes that a process has for tensors on the smallest host, or None if `memory` is empty.

    `memory`: for each host the MiB of one GPU or of the host, and the number of its processes.
    """
    if not memory:
        return None
    if device == "cpu":
        return min(size * _USABLE / processes - BASE for size, processes in memory) * 2**20
    return min(size for size, _ in memory) * _USABLE * 2**20


def own_memory_mib(device: str) -> float:
    """Return the memory of this machine in MiB: of its smallest GPU, or of the host."""
    if device == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**20
    import torch

    sizes = [torch.cuda.get_device_properties(place).total_memory for place in range(torch.cuda.device_count())]
    return min(sizes) / 2**20


def available_bytes(device: str, processes: int) -> float:
    """Return the bytes that this process can still use for tensors: of its current GPU, or its share of host memory.

    Limits of the process's cgroups (version 2) count. https://docs.kernel.org/admin-guide/cgroup-v2.html

    Args:
        processes: number of processes that share the memory of this host.
    """
    if device == "cuda":
        import torch

        return torch.cuda.mem_get_info()[0] * _USABLE
    meminfo = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines() if ":" in line)
    free = [float(meminfo["MemAvailable"].split()[0]) * 1024]
    own = next((line[3:] for line in Path("/proc/self/cgroup").read_text().splitlines() if line.startswith("0::")), "")
    folder = Path("/sys/fs/cgroup", own.lstrip("/"))
    for group in (folder, *folder.parents):
        try:
            limit, used = ((group / f"memory.{name}").read_text().strip() for name in ("max", "current"))
            cached = next(
                line.split()[1] for line in (group / "memory.stat").read_text().splitlines() if line.startswith("file ")
            )
            free.append(int(limit) - int(used) + int(cached))  # the kernel reclaims pages of files
        except (OSError, ValueError, StopIteration):
            continue  # no limit here
    return min(free) * _USABLE / processes
