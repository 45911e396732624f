"""The hosts that a plan is for, and the memory that their processes have. No torch at import."""

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer.common.errors import UserError
from trainer.common.formats import printable
from trainer.common.inputs import read_regular
from trainer.costs.cost import Layout

MAX_HOSTS = 10_000
_MAX_PROCESSES = 1024  # per host
_MAX_SPEED = 1000.0
_MAX_CAPABILITY = 100.0
_MAX_FILE = 64 * 1024 * 1024  # bytes
BASE = 475  # MiB of host memory per process for Python and its libraries
_USABLE = 0.92  # fraction of memory that processes can use


def read_hosts(source: str) -> list[dict[str, Any]]:
    """Read the value of --hosts: a number of hosts, or a JSON file.

    Returns:
        For each host its name (`host`), `processes`, and from a file also `device` (a name; empty: unknown), `memory_mib`, `gpu_mib` and `capability` (0: unknown),
        `threads` per process, and `speed` of a process in relation to other hosts (1).

    Raises UserError: no such file, or one without a list of hosts.
    """
    if re.fullmatch(r"[0-9]{1,5}", source) and 1 <= int(source) <= MAX_HOSTS:
        return [{"host": f"host{place + 1}", "processes": 1} for place in range(int(source))]
    try:
        hosts = json.loads(read_regular(Path(source), _MAX_FILE))
        if not hosts:
            raise ValueError
        return [_host(place, host) for place, host in enumerate(hosts[:MAX_HOSTS])]
    except OSError as error:
        raise UserError(
            f"--hosts: expected a number of hosts or a file, got {printable(source)}: {error.strerror}"
        ) from None
    except (ValueError, TypeError, AttributeError, LookupError, ArithmeticError, RecursionError):
        raise UserError(
            f"--hosts: {printable(source)}: expected a JSON list with one object per host (host, processes, device, memory_mib, "
            "gpu_mib, capability, threads, speed)"
        ) from None


def _host(place: int, host: dict[str, Any]) -> dict[str, Any]:
    processes = int(host.get("processes") or len(host.get("ranks", [0])))
    memory, gpu = (float(host.get(name) or 0) for name in ("memory_mib", "gpu_mib"))
    threads = int(host.get("threads") or 1)
    capability = float(host.get("capability") or 0)
    speed = float(1 if host.get("speed") is None else host["speed"])
    if not (
        1 <= processes <= _MAX_PROCESSES
        and 0 <= memory < 1e12
        and 0 <= gpu < 1e12
        and 1 <= threads <= _MAX_PROCESSES
        and 0 <= capability < _MAX_CAPABILITY
        and 1 / _MAX_SPEED <= speed <= _MAX_SPEED
    ):
        raise ValueError
    return {
        "host": str(host.get("host", f"host{place + 1}")),
        "processes": processes,
        "memory_mib": memory,
        "gpu_mib": gpu,
        "capability": capability,
        "threads": threads,
        "speed": speed,
    }


def have_gpus(hosts: Sequence[Mapping[str, Any]]) -> bool:
    return all(host.get("gpu_mib") for host in hosts)


def layout_of(hosts: Sequence[Mapping[str, Any]], device: str) -> Layout:
    """Return the ranks of these hosts with the memory that each of them has for tensors.

    `hosts`: for each its `processes`, `memory_mib`, and `gpu_mib` of its smallest GPU (0 or missing: unknown). On GPUs,
    `memory_mib` is the memory of a GPU if `gpu_mib` is unknown. `speed` of its processes (missing: 1).
    """
    rooms: list[float | None] = []
    host_rooms: list[float | None] = []
    for host in hosts:
        processes, memory, gpu = host["processes"], host.get("memory_mib", 0), host.get("gpu_mib", 0)
        of_host = (memory * _USABLE / processes - BASE) * 2**20 if memory else None
        of_gpu = (gpu or memory) * _USABLE * 2**20 or None
        rooms += [of_gpu if device == "cuda" else of_host] * processes
        host_rooms += [of_host if gpu else None] * processes
    return Layout(tuple(host["processes"] for host in hosts), _assumed(rooms), _assumed(host_rooms), speeds(hosts))


def speeds(hosts: Sequence[Mapping[str, Any]]) -> tuple[float, ...]:
    """Return the relative speed of every rank; empty if they are equally fast."""
    found = tuple(float(host.get("speed", 1)) for host in hosts for _ in range(host["processes"]))
    return found if set(found) - {1.0} else ()


def _assumed(rooms: list[float | None]) -> tuple[float | None, ...]:
    """Return the memory of every rank, where unknown ones get that of the smallest known one."""
    least = min((room for room in rooms if room is not None), default=None)
    return tuple(least if room is None else room for room in rooms)


def own_memory_mib(device: str) -> float:
    """Return the memory of this machine in MiB: of its smallest GPU, or of the host."""
    if device == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**20
    import torch

    sizes = [torch.cuda.get_device_properties(place).total_memory for place in range(torch.cuda.device_count())]
    return min(sizes) / 2**20


def available_bytes(device: str, processes: int) -> float:
    """Return the bytes that this process can still use for tensors: of its current GPU, or its share of host memory.

    Limits of the process's cgroups count, of both versions. https://docs.kernel.org/admin-guide/cgroup-v2.html
    `processes`: number of processes that share the memory of this host.
    """
    if device == "cuda":
        import torch

        return torch.cuda.mem_get_info()[0] * _USABLE
    meminfo = dict(
        line.split(":", 1) for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines() if ":" in line
    )
    free = [float(meminfo["MemAvailable"].split()[0]) * 1024]
    for line in Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines():
        _, controllers, own = line.split(":", 2)
        if controllers == "":
            free += _below_limits(Path("/sys/fs/cgroup", own.lstrip("/")), "max", "current", "file")
        elif "memory" in controllers.split(","):
            group = Path("/sys/fs/cgroup/memory", own.lstrip("/"))
            free += _below_limits(group, "limit_in_bytes", "usage_in_bytes", "total_cache")
    return min(free) * _USABLE / processes


def _below_limits(folder: Path, limit: str, used: str, cached: str) -> list[float]:
    """Return the free bytes of a cgroup and of those that contain it. The others: names of the kernel's files and counter."""
    free = []
    for group in (folder, *folder.parents):
        try:
            most, now = (int((group / f"memory.{name}").read_text(encoding="utf-8")) for name in (limit, used))
            pages = next(
                int(line.split()[1])
                for line in (group / "memory.stat").read_text(encoding="utf-8").splitlines()
                if line.startswith(f"{cached} ")
            )
            free.append(float(most - now + pages))  # the kernel reclaims pages of files
        except (OSError, ValueError, StopIteration):
            continue  # no limit here
    return free
