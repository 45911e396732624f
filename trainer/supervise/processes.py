"""Processes of this host: which belong to a run, and signals that reach only the intended process."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import signal
import subprocess
from pathlib import Path

from trainer.supervise.link_free import LinkFreePath, run_folder
from trainer.supervise.run_files import DEVICE_LIMIT, gpu_names, run_devices

RUN_VARIABLE = "TRAINYARD_RUN_DIR"  # in the environment of every process of a run
_UNIT = re.compile(r"trainyard-.+-[0-9a-f]{6}\.service")  # of a run


def process_stat(pid: int) -> tuple[str, int, int] | None:
    """Return (state letter, parent, start time in clock ticks since boot) of a process, or None; see proc(5)."""
    try:
        # The kernel cuts the name after 15 bytes, perhaps inside a character.
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].decode().split()
    except OSError:
        return None
    return fields[0], int(fields[1]), int(fields[19])


def all_pids() -> list[int]:
    """Return the pid of every process of this host, zombies included."""
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def is_running(pid: int) -> bool:
    """Return whether a process exists and is not a zombie."""
    found = process_stat(pid)
    return found is not None and found[0] not in "ZX"


def is_own(pid: int) -> bool:
    try:  # not the owner of the folder: that is root if the process forbids core dumps
        found = re.search(rb"^Uid:\t(\d+)", Path(f"/proc/{pid}/status").read_bytes(), re.MULTILINE)
    except OSError:
        return False
    return found is not None and int(found[1]) == os.geteuid()


def environ(pid: int) -> dict[str, str]:
    """Return the environment with which a process started; empty for a process of another user."""
    try:
        entries = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return {}
    return dict(entry.split("=", 1) for entry in entries if "=" in entry)


def unit_name(run_dir: LinkFreePath) -> str:
    """Return the name of a run's unit. It depends on the folder, because two hosts of an inventory may be one machine."""
    name = re.sub(r"[^A-Za-z0-9_.-]", "-", run_dir.name)
    return f"trainyard-{name}-{hashlib.sha256(str(run_dir).encode()).hexdigest()[:6]}.service"


def units_of(pid: int) -> list[str]:
    """Return the names in the path of the cgroup of a process, among them that of its systemd unit."""
    try:
        return re.split(r"[/\n]", Path(f"/proc/{pid}/cgroup").read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return []


def descendants(*roots: int) -> list[int]:
    """Return every live process below `roots`, in any session or process group."""
    children: dict[int, list[int]] = {}
    for pid in all_pids():
        if (found := process_stat(pid)) and found[0] not in "ZX":
            children.setdefault(found[1], []).append(pid)
    result: list[int] = []
    pending = [*roots]
    while pending:
        below = children.pop(pending.pop(), [])
        result += below
        pending += below
    return result


def marked_runs() -> set[str]:
    """Return the folders of the runs that have a process on this host, as far as this user can see them."""
    return {folder for pid in all_pids() if (folder := environ(pid).get(RUN_VARIABLE))}


def run_processes(run_dir: LinkFreePath) -> list[int]:
    """Return every live process of a run: those with its variable in their environment, their descendants, and all in its unit.

    A process can clear its environment and leave its parents, but not a system unit. Without one, it is found as long as the
    supervisor lives, to which the kernel gives all orphans.
    """
    marked = [pid for pid in all_pids() if is_running(pid) and belongs(pid, run_dir)]
    return list({*marked, *descendants(*marked)})


def belongs(pid: int, run_dir: LinkFreePath) -> bool:
    """Return whether a process of this user names a run in its environment, which no other process can read in some units, or is in its unit."""
    return environ(pid).get(RUN_VARIABLE) == str(run_dir) or (unit_name(run_dir) in units_of(pid) and is_own(pid))


def held_gpus(run: str) -> dict[str, str]:
    """Return {UUID of a GPU: run} of the GPUs that other runs than `run` use, as far as their processes can be seen.

    This also finds runs in other data directories.
    """
    found: dict[str, str] = {}
    for pid in all_pids():
        values = environ(pid)
        folder = values.get(RUN_VARIABLE, "")
        if (name := Path(folder).name) not in ("", "..", run):
            found |= dict.fromkeys(gpu_names(values.get("CUDA_VISIBLE_DEVICES", "").split(",", DEVICE_LIMIT)), name)
    for run_dir in unit_folders():
        if run_dir.name != run:
            found |= dict.fromkeys(run_devices(run_dir), run_dir.name)
    return found


def unit_folders() -> list[LinkFreePath]:
    units = sorted({name for pid in all_pids() for name in units_of(pid) if _UNIT.fullmatch(name)})
    if not units:
        return []
    show = ["systemctl", "show", "--value", "--property=WorkingDirectory", "--", *units]
    try:
        shown = subprocess.run(show, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return []
    return [run_folder(line) for line in shown.stdout.splitlines() if line.startswith("/")]


def send_signal(pid: int, number: signal.Signals, start_time: int | None = None) -> None:
    """Signal a process if it is still the one that started at `start_time` (see process_stat; None skips the check)."""
    with contextlib.suppress(ProcessLookupError):
        if process_stat(pid) is None:  # a record may name what is no pid
            return
        pidfd = os.pidfd_open(pid)
        try:
            found = process_stat(pid)
            if found is not None and start_time in (None, found[2]):
                signal.pidfd_send_signal(pidfd, number)
        finally:
            os.close(pidfd)
