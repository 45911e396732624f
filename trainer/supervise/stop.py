"""Stop one host's part of a run."""

from __future__ import annotations

import contextlib
import signal
import time
from typing import Any

from trainer.supervise.link_free import LinkFreePath, run_folder
from trainer.supervise.processes import belongs, descendants, is_running, process_stat, run_processes, send_signal
from trainer.supervise.run_files import UNTRUSTED, SupervisorError, holds_lock, read_node, write_json
from trainer.supervise.status import read_state

TERM_LIMIT = 10.0  # s between SIGTERM and SIGKILL
KILL_LIMIT = 10.0  # s for killed processes to end; longer means that they hang in the kernel
EXIT_LIMIT = 2.0  # s for a supervisor to exit after its processes have exited
UNTRUSTED_RECORD = (*UNTRUSTED, SupervisorError)


def stop(request: dict[str, Any]) -> dict[str, Any]:
    """Stop this host's part of a run; return when none of its processes is left. A part that has ended is unchanged.

    This needs nothing that the run wrote: see `run_processes`. `request`: `run_dir`; `grace`, the seconds that the
    ranks have to end by themselves (default 60), before SIGTERM and then SIGKILL; `now`, SIGKILL at once; `wanted`, a
    user stops the run, so that it is not restarted. Returns `status`, and the number of processes `killed`. Raises
    SupervisorError: a process cannot be killed.
    """
    run_dir = run_folder(request["run_dir"]).resolved()
    if not (run_dir / "state").is_folder():
        return {"status": "none", "killed": kill_processes(run_dir)}
    if request.get("wanted"):  # tells the controller that the run did not fail, so that it does not restart it
        mark(run_dir / "state/stop-wanted")
    status = "stopped"
    try:
        status = "failed" if read_state(run_dir)["status"] == "lost" else status
        end_supervised(run_dir, request)
    except UNTRUSTED_RECORD:
        pass  # the records of the run prevent an orderly end
    killed = kill_processes(run_dir)
    with contextlib.suppress(*UNTRUSTED):
        node = read_node(run_dir)
        if node and node["status"] in ("starting", "running"):
            write_json(run_dir / "state/node.json", {**node, "status": status, "ended": time.time()})
        status = read_state(run_dir)["status"]
    return {"status": status, "killed": killed}


def end_supervised(run_dir: LinkFreePath, request: dict[str, Any]) -> None:
    """Ask the ranks of a run, and then its supervisor, to end.

    Raises one of UNTRUSTED_RECORD for a record of the run that is not what a supervisor writes.
    """
    node = own_node(run_dir)
    if holds_lock(run_dir) and not request.get("now"):
        mark(run_dir / "stop")
        if not wait_end(run_dir, request.get("grace", 60.0)) and node:
            send_signal(node["pid"], signal.SIGTERM, node["pid_start"])
            wait_end(run_dir, TERM_LIMIT)
    if holds_lock(run_dir) and node:  # the supervisor kills its processes and reports the end
        send_signal(node["pid"], signal.SIGUSR1, node["pid_start"])
        wait_end(run_dir, EXIT_LIMIT)
    if node:
        wait_exit(run_dir, node)


def own_node(run_dir: LinkFreePath) -> dict[str, Any] | None:
    """Return the record of the newest start if it names a process of the run; None otherwise.

    Code of a rank could name another process, which would get the signals for the supervisor.
    """
    node = read_node(run_dir)
    if node is None or "pid" not in node or "pid_start" not in node:
        return None
    return node if not is_running(node["pid"]) or belongs(node["pid"], run_dir) else None


def mark(path: LinkFreePath) -> None:
    """Create an empty file. Code of a rank may have taken its name: then the run is stopped without it."""
    with contextlib.suppress(OSError):
        path.make_file()


def wait_end(run_dir: LinkFreePath, limit: float) -> bool:
    """Wait up to `limit` seconds for the supervisor to release its lock; return whether it has."""
    deadline = time.monotonic() + limit
    while holds_lock(run_dir):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def wait_exit(run_dir: LinkFreePath, node: dict[str, Any]) -> None:
    """Wait for a supervisor that has released its lock to exit, so that it does not count as killed."""
    deadline = time.monotonic() + EXIT_LIMIT
    while is_running(node["pid"]) and not holds_lock(run_dir) and time.monotonic() < deadline:
        if (found := process_stat(node["pid"])) is None or found[2] != node["pid_start"]:
            return
        time.sleep(0.01)


def kill_processes(run_dir: LinkFreePath) -> int:
    """Kill every process of the run; return their number. Raises SupervisorError if one does not end."""
    killed: set[int] = set()
    deadline = time.monotonic() + KILL_LIMIT
    while left := set(run_processes(run_dir)):
        if time.monotonic() > deadline:
            raise SupervisorError(
                f"cannot kill processes {sorted(left)} of run {run_dir.name}: they hang in the kernel; restart the host"
            )
        # Children first. Those of a supervisor that has ended belong to nobody, and may have no mark of the run.
        below = {*descendants(*left)}
        for pid in below or left:
            send_signal(pid, signal.SIGKILL)
        killed.update(below or left)
        time.sleep(0.01)
    return len(killed)
