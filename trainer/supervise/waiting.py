"""Between two starts: the supervisor of a run waits with the standby process, and the next start hands its request over.

The supervisor has released the lock of the run folder, so the run does not count as active. The request is the file
`state/start.json`, which only the user of the run can write. Standard library only.
"""

from __future__ import annotations

import os
import signal
import stat
import time
from typing import Any

from trainer.supervise.link_free import LinkFreePath
from trainer.supervise.processes import belongs, is_running, process_stat, send_signal, waiting_processes
from trainer.supervise.run_files import JSON_LIMIT, SupervisorError, read_json, write_json
from trainer.supervise.start_request import StartRequest

REQUEST, STATE = "state/start.json", "state/standby.json"
AGAIN = "state/again"  # the run is stopped with a checkpoint to be started again
POLL = 0.02  # s between two checks for a request
TAKE_LIMIT = 10.0  # s for a waiting supervisor to take a request on a loaded machine
END_LIMIT = 5.0  # s for it to end after SIGTERM


def begin_waiting(run_dir: LinkFreePath, request: StartRequest, standby: int, trainer: str) -> None:
    """Record that this process waits for the next start of a run. Raises OSError.

    Args:
        request: request of the start that has ended.
        standby: pid of the standby process.
        trainer: digest of the staged trainer that both processes have imported.
    """
    (run_dir / REQUEST).remove(missing_ok=True)  # ranks could write it
    entry: dict[str, Any] = {
        "unit": request.unit,
        "settings": request.settings,
        "reachable": request.reachable,
        "lease": request.lease,
        "trainer": trainer,
    }
    for name, pid in (("pid", os.getpid()), ("standby", standby)):
        found = process_stat(pid)
        entry |= {name: pid, f"{name}_start": found[2] if found else None}
    write_json(run_dir / STATE, entry)


def end_waiting(run_dir: LinkFreePath) -> None:
    """Remove the files of this process's wait."""
    for name in (REQUEST, STATE):
        (run_dir / name).remove(missing_ok=True)


def take_request(run_dir: LinkFreePath) -> StartRequest | None:
    """Return the request that a start has handed over, or None. Raises SupervisorError if another user could have written it."""
    path = run_dir / REQUEST
    try:
        file = path.open_read()
    except FileNotFoundError:
        return None
    with file:
        found = os.fstat(file.fileno())
        if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
            raise SupervisorError(f"{path} is not from the user of the run")
        return StartRequest.read(file.read(JSON_LIMIT))


def waiting_supervisor(run_dir: LinkFreePath) -> dict[str, Any] | None:
    """Return the record of the supervisor that waits for the next start of a run; None if none does."""
    return read_json(run_dir / STATE) if waiting_processes(run_dir) else None


def hand_over(run_dir: LinkFreePath, request: StartRequest) -> bool:
    """Hand a request to the supervisor that waits; return whether it takes it. Otherwise it ends. Raises OSError."""
    pids = waiting_processes(run_dir)
    if not pids:
        return False
    (run_dir / REQUEST).write(request.to_json().encode(), 0o600)
    send_signal(pids[0], signal.SIGCHLD)  # it looks for the request at once
    deadline = time.monotonic() + TAKE_LIMIT
    while read_json(run_dir / "state/node.json") is None:
        if not is_running(pids[0]) or time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


def end_supervisor(run_dir: LinkFreePath) -> None:
    """End the supervisor that waits for the next start of a run, with its standby process."""
    if not (pids := waiting_processes(run_dir)):
        return
    supervisor = pids[0]
    if belongs(supervisor, run_dir):  # code of a rank could name another process
        send_signal(supervisor, signal.SIGTERM, (process_stat(supervisor) or ("", 0, -1))[2])
    deadline = time.monotonic() + END_LIMIT
    while any(map(is_running, pids)) and time.monotonic() < deadline:
        time.sleep(0.01)
    end_waiting(run_dir)
