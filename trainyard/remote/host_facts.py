"""The facts of a host that the plan of a run needs. Standard library only."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

from trainer.supervise import nvidia_smi
from trainer.supervise.cpu import multiplies_bfloat16
from trainer.supervise.environment import starts_system_unit
from trainer.supervise.interface import interface_of, source_address
from trainer.supervise.link_free import LinkFreePath, run_folder
from trainer.supervise.processes import held_gpus
from trainer.supervise.run_files import is_alive, other_runs, read_json, read_node, run_devices
from trainyard.remote.network import addresses, addresses_v6, interface_mbit, port_is_free
from trainyard.remote.package_versions import package_versions
from trainyard.remote.trees import files_below, path_below

SPEC_LIMIT = TEXT_LIMIT = 1 << 20  # bytes


def gather(request: dict[str, Any]) -> dict[str, Any]:
    """Return the facts of this host and the state of a run on it.

    Args:
        request: `head`, the head's address; `ports` to try on this host; `run_dir`; `data_dir`; `python`, the
            interpreter of the cluster's environment; `staged`, paths of files and folders of the run.

    Returns:
        Among others `source`, the address from which this host reaches the head, `interface` and `link_mbit` of that
        address; `route_error`, why there is none, or an empty string; `free_ports`; `cpu`, the model; `cpus`; `memory_mib`; `gpus`;
        `versions` of packages; `free_bytes` below `data_dir`; `staged`, the bytes of each path (see staged_bytes). Of
        the run: `spec`, the text of its spec if it has checkpoints or a result, or is alive; `layers`, the bytes of the weights that its ranks received; `result`; `rows` of its last step;
        `running`; `part`, the supervisor's state; `stop_wanted`. `busy_with` is another run that is alive on this host
        without GPUs of its own; `held_gpus` has the run that uses a GPU, by its UUID; `unreadable` are run folders
        beside it that cannot be read. `firewall` is the name of the active firewall, or an empty string;
        `system_unit` says whether a unit can limit the ranks.
    """
    run_dir, data_dir = run_folder(request["run_dir"]), Path(request["data_dir"])
    alive, unreadable = other_runs(run_dir)
    here = gpus()
    beside = {name: run_devices(run_dir.parent / name) for name in alive}
    held = {uuid: name for name, uuids in beside.items() for uuid in uuids}
    return {
        "boot_id": read("/proc/sys/kernel/random/boot_id"),
        "machine_id": read("/etc/machine-id"),
        "addresses": addresses(),
        "addresses_v6": addresses_v6(),
        "firewall": firewall(),
        "system_unit": starts_system_unit(),
        **route_to(request["head"]),
        "free_ports": [port for port in request["ports"] if port_is_free(port)],
        "bfloat16": multiplies_bfloat16(),
        "cpus": len(os.sched_getaffinity(0)),
        "memory_mib": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2**20,
        "gpus": here,
        "held_gpus": held | (held_gpus(run_dir.name) if here else {}),
        "allocator": allocator(),
        "compiler": any(shutil.which(name) for name in ("g++", "clang++", "c++")),
        "versions": package_versions(request["python"]),
        "python_exists": os.access(request["python"], os.X_OK),
        "free_bytes": shutil.disk_usage(nearest_folder(data_dir)).free,
        "staged": {path: staged_bytes(path_below(data_dir / "store", path)) for path in request.get("staged", [])},
        # A library of an environment there cannot be loaded.
        "noexec": bool(os.statvfs(nearest_folder(Path(request["python"]).parent)).f_flag & os.ST_NOEXEC),
        "may_write": os.access(nearest_folder(data_dir), os.W_OK | os.X_OK),
        **run_state(run_dir),
        "busy_with": next((name for name in alive if not (here and beside[name])), ""),
        "unreadable": unreadable,
    }


def route_to(head: str) -> dict[str, Any]:
    """Return `source`, `interface`, `link_mbit` and `route_error` of the route to the head."""
    try:
        source = source_address(head)
    except OSError as error:
        why = f"no route to the head {head}: {error.strerror}"
        return {"source": "", "interface": "", "link_mbit": 0, "route_error": why}
    interface = interface_of(source)
    return {"source": source, "interface": interface, "link_mbit": interface_mbit(interface), "route_error": ""}


def staged_bytes(path: LinkFreePath) -> int:
    """Return the bytes of all files at a path; a link counts as nothing."""
    with contextlib.suppress(OSError):
        found = [path] if path.is_file() else [path / name for name in files_below(path)] if path.is_folder() else []
        return sum(file.stat().st_size for file in found if file.is_file())
    return 0


def run_state(run_dir: LinkFreePath) -> dict[str, Any]:
    """Return the state of a run in its folder on this host."""
    running = is_alive(run_dir)
    spec = run_dir / "spec.yml"
    result = read_json(run_dir / "result.json")
    begun = spec.exists() and ((run_dir / "checkpoints").is_folder() or running or result is not None)
    return {
        "spec": spec.read(SPEC_LIMIT).decode() if begun else None,
        "result": result,
        "rows": last_rows(run_dir / "metrics.jsonl"),
        "running": running,
        "part": read_node(run_dir),
        "stop_wanted": (run_dir / "state/stop-wanted").exists(),
    }


def gpus() -> list[dict[str, Any]]:
    """Return name, memory in MiB, UUID and compute capability (0: unknown) of every NVIDIA GPU that the driver shows."""
    fields = ("name", "memory.total", "uuid")
    # Old drivers know no capability, and then answer nothing.
    rows = nvidia_smi.query(*fields, "compute_cap") or [[*row, ""] for row in nvidia_smi.query(*fields)]
    return [
        {
            "name": name,
            "memory_mib": nvidia_smi.mib(memory),
            "uuid": uuid,
            "capability": float(capability) if re.fullmatch(r"\d{1,2}\.\d", capability) else 0.0,
        }
        for name, memory, uuid, capability in rows
    ]


def allocator() -> str:
    """Return the path of gperftools' tcmalloc in Debian and Ubuntu (libtcmalloc-minimal4), or an empty string."""
    path = Path(f"/usr/lib/{os.uname().machine}-linux-gnu/libtcmalloc_minimal.so.4")
    return str(path) if path.exists() else ""


def firewall() -> str:
    """Return the name of the firewall that is active on this host, as far as a user can see; or an empty string."""
    if "ENABLED=yes" in read("/etc/ufw/ufw.conf").split():
        return "ufw"
    services = ("firewalld", "nftables")
    with contextlib.suppress(OSError):
        done = subprocess.run(["systemctl", "is-active", *services], capture_output=True, text=True, check=False)
        states = zip(services, done.stdout.split(), strict=False)
        return next((name for name, state in states if state == "active"), "")
    return ""


def nearest_folder(path: Path) -> Path:
    """Return `path`, or the nearest folder above it that exists."""
    while not path.exists():
        path = path.parent
    return path


def read(path: str | Path, default: str = "") -> str:
    """Return a file's text, at most TEXT_LIMIT bytes, without surrounding white space; `default` if it cannot be read."""
    try:
        with Path(path).open("rb") as file:
            return file.read(TEXT_LIMIT).decode(errors="replace").strip()
    except OSError:
        return default


def last_rows(metrics: LinkFreePath) -> list[int]:
    """Return how many rows of the batch each rank had at the last recorded step; empty if unknown."""
    try:
        with metrics.open_read() as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - (1 << 16)))
            rows = json.loads(file.read().splitlines()[-1]).get("rows", [])
    except (OSError, ValueError, IndexError, AttributeError, RecursionError):
        return []
    return rows if isinstance(rows, list) and all(isinstance(count, int) for count in rows) else []
