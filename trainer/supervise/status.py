"""The status of one host's part of a run, and of all runs of a host."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import Any

from trainer.supervise.link_free import LinkFreePath, run_folder
from trainer.supervise.processes import all_pids, marked_runs, process_stat, run_processes, unit_name, units_of
from trainer.supervise.run_files import UNTRUSTED, SupervisorError, holds_lock, read_log, read_node, read_ranks

POLL = 0.2  # s between two reads of the state while a request waits for a change
_OF_ALL_RANKS = ("step_seconds", "comm_share", "mfu")  # of a heartbeat
ENDED_WELL = ("finished", "stopped")  # a rank that ended as intended
HALTED = ("T", "t")  # states of a process that a signal or a debugger has stopped


def status(request: dict[str, Any]) -> dict[str, Any]:
    """Return the status of this host's part of a run.

    Args:
        request: `run_dir`; `wait`, the seconds to wait for a change before answering (default 0); `logs_from`, {name in
            logs/: byte offset, or -N for the last N lines}; `brief`, leave out what all hosts would repeat, see `shorten`;
            `outside`, a path that a rank has not found: the reply has `outside`, whether this user finds it;
            `plain`, leave out what the run wrote, see `without_records`.

    Returns:
        `status` is none, starting, running, finished, failed, stopped, lost (the supervisor died without a report), or
        unreadable (alive, but its record is not what a supervisor writes). See `read_state` for the other keys; `logs` holds the requested part, see `read_log`.
    """
    run_dir = run_folder(request["run_dir"])
    if request.get("plain"):
        return without_records(run_dir, holds_lock(run_dir) or bool(run_processes(run_dir.resolved()))) | {"logs": {}}
    deadline = time.monotonic() + request.get("wait", 0.0)
    state = read_state(run_dir)
    before = rank_statuses(state)
    while is_uneventful(state) and rank_statuses(state) == before and time.monotonic() < deadline:
        time.sleep(POLL)
        state = read_state(run_dir)
    wanted: dict[str, int] = request.get("logs_from", {})
    logs = {name: read_log(run_dir / "logs" / name, since) for name, since in wanted.items()}
    outside = bool(request.get("outside")) and os.path.lexists(request["outside"])
    return {**(shorten(state) if request.get("brief") else state), "logs": logs, "outside": outside}


def shorten(state: dict[str, Any]) -> dict[str, Any]:
    """Return the state without what has an entry for every host of the run and is the same on all of them.

    These are the names of the hosts, and the times of all ranks except in the heartbeat of rank 0.
    """
    node = state["node"] and {**state["node"], "hosts": []}
    ranks = {
        name: rank if name == "0" else {key: value for key, value in rank.items() if key not in _OF_ALL_RANKS}
        for name, rank in state["ranks"].items()
    }
    return {**state, "node": node, "ranks": ranks}


def without_records(run_dir: LinkFreePath, alive: bool) -> dict[str, Any]:
    """Return a state that needs no record of the run: a rank may have closed their folder, or written other types."""
    status = "unreadable" if alive else "none"
    found = {"now": time.time(), "run_dir": str(run_dir), "alive": alive, "left": alive, "status": status}
    return {**found, "node": None, "ranks": {}}


def list_runs(request: dict[str, Any]) -> dict[str, Any]:
    """Return `runs`, the state of every run folder below `data_dir` that has one.

    `skipped` are the names of run folders whose state cannot be read.
    """
    runs, skipped, marked = [], [], marked_runs()
    units = {name for pid in all_pids() for name in units_of(pid)}
    folders = LinkFreePath(Path(request["data_dir"], "runs"))
    for name in folders.entries():
        folder, has_processes = folders / name, False
        try:
            real = folder.resolved()
            has_processes = str(real) in marked or unit_name(real) in units
            if not has_processes:
                (folder / "state/node.json").stat()
            state = read_state(folder, has_processes)
        except (FileNotFoundError, NotADirectoryError):
            continue  # not started yet, or no run folder
        except UNTRUSTED:
            if has_processes:
                runs.append(without_records(folder, alive=True))
            else:
                skipped.append(folder.name)
        else:
            if state["node"] is None and not state["alive"]:
                skipped.append(folder.name)
            else:
                runs.append(state)
    return {"now": time.time(), "runs": runs, "skipped": skipped}


def rank_statuses(state: dict[str, Any]) -> dict[str, str]:
    return {name: rank.get("status", "") for name, rank in state["ranks"].items()}


def is_uneventful(state: dict[str, Any]) -> bool:
    """Return whether the controller has nothing to act on: the part runs, and no rank failed or ended."""
    ranks = state["ranks"].values()
    if state["status"] not in ("starting", "running") or (state["node"] and state["node"]["failures"]):
        return False
    return not any(rank["process"] is None or rank.get("status") in ("failed", *ENDED_WELL) for rank in ranks)


def read_state(run_dir: LinkFreePath, has_processes: bool = True) -> dict[str, Any]:
    """Return `status`, `alive`, the supervisor's `node`, `ranks` with their `process` state letter, `stop_wanted`, `left`, `halted` (the supervisor is), `disk_full`.

    Processes are `left` if there are some although no supervisor holds the lock of the run. A run whose record cannot
    be read is `alive` as long as it has processes.

    A lost part has `why`: the reason as far as it is known. `has_processes`: whether the run may have processes here.
    """
    alive = holds_lock(run_dir)
    node = read_node(run_dir)  # after the lock, so that an end written in between is seen
    left = not alive and has_processes and bool(run_processes(run_dir.resolved()))
    ranks = {}
    for rank in read_ranks(run_dir):
        found = process_stat(rank["pid"]) if isinstance(rank.get("pid"), int) else None
        ranks[str(rank.get("rank"))] = {**rank, "process": found[0] if found else None}
    state = {"now": time.time(), "alive": alive, "node": node, "ranks": ranks, "run_dir": str(run_dir)}
    state["stop_wanted"] = (run_dir / "state/stop-wanted").exists()
    state["left"] = left
    supervisor = process_stat(node["pid"]) if node and isinstance(node.get("pid"), int) else None
    state["disk_full"] = disk_full(run_dir)
    state["halted"] = supervisor is not None and supervisor[0] in HALTED
    if node is None:
        status = "unreadable"
        with contextlib.suppress(OSError):
            status = "starting" if not left and "node.json" not in (run_dir / "state").entries() else status
        return {**state, "alive": alive or left, "status": status if alive or left else "none"}
    if node["status"] in ("starting", "running") and not alive:
        return {**state, "status": "lost", "why": why_lost(node, run_dir)}
    return {**state, "status": node["status"]}


def why_lost(node: dict[str, Any], run_dir: LinkFreePath) -> str:
    """Return why a supervisor vanished: a full disk, a reboot, or systemd's result (oom-kill, signal, ...); may be empty."""
    if disk_full(run_dir):
        return "the disk is full"
    with contextlib.suppress(OSError):
        booted = time.time() - float(Path("/proc/uptime").read_text(encoding="utf-8").split()[0])
        if node["started"] < booted - 1:
            return "the machine was restarted"
        if node.get("unit"):
            return unit_result(unit_name(run_dir.resolved()))  # code of a rank could name another unit
    return ""


def disk_full(run_dir: LinkFreePath) -> bool:
    """Return whether a rank may have reported nothing for lack of space."""
    with contextlib.suppress(OSError):
        return os.statvfs(run_dir.path).f_bavail == 0
    return False


def unit_result(unit: str) -> str:
    """Return systemd's result of a unit that failed, or an empty string."""
    import subprocess

    from trainer.supervise.environment import choose_backend, systemctl_environment

    user = False
    with contextlib.suppress(SupervisorError):
        user = "--user" in (choose_backend("systemd") or [])
    query = ["systemctl", *(["--user"] if user else []), "show", "--value", "--property=Result", "--", unit]
    shown = subprocess.run(query, capture_output=True, text=True, check=False, env=systemctl_environment())
    result = shown.stdout.strip()
    return "" if result == "success" else result
