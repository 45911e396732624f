"""Files of a run folder: JSON state, the supervisor's lock, logs."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import json
import os
import re
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from trainer.supervise.link_free import LinkFreePath, link_free

LOG_LIMIT = 64 * 1024  # bytes of a log in one status
_NODE_TYPES: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("status", "backend"), (str,)),
    **dict.fromkeys(("attempt", "node_rank", "pid"), (int,)),
    **dict.fromkeys(("ranks", "hosts", "failures"), (list,)),
    "started": (int, float),
    "pid_start": (int, type(None)),
    "unit": (str, type(None)),
}
AnyPath = TypeVar("AnyPath", Path, LinkFreePath)
JSON_LIMIT = 4 << 20  # bytes of a state file; a larger one is not ours
# Of what code of a rank can write: one run must not fill the reply about all runs, or the memory of who reads it.
RECORD_LIMIT = 256 << 10  # bytes of a record
RANKS_LIMIT = 1 << 20  # bytes of the heartbeats of all ranks on a host together
DEPTH_LIMIT = 6  # nested lists and objects of a record
DEVICE_LIMIT = 64  # GPUs of a run on a host
# What must not end a program that reads such records.
UNTRUSTED = (ArithmeticError, LookupError, MemoryError, OSError, RecursionError, TypeError, ValueError)
_RANK_FILE = re.compile(r"rank[0-9]{1,6}\.json")
_DEVICE = re.compile(r"[A-Za-z0-9/:.-]{1,80}")


class SupervisorError(RuntimeError):
    """A request that cannot be carried out; the message is one line for the user."""


def set_umask() -> None:
    """Let others write to no file of this process, whatever the login's umask is, and its owner read and write all."""
    os.umask(os.umask(0o077) & 0o077 | 0o022)


def open_regular(path: Path) -> int:
    """Return a descriptor that reads a regular file. Never blocks, unlike the opening of a FIFO.

    Raises OSError, also if `path` is not a regular file.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return handle


def read_json(path: Path | LinkFreePath, limit: int = JSON_LIMIT) -> dict[str, Any] | None:
    """Return the object in `path`, or None if there is none of at most `limit` bytes. Writers rename, so a file is never incomplete."""
    try:
        value = json.loads(link_free(path).read(limit))
    except (OSError, ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def read_record(path: LinkFreePath) -> dict[str, Any] | None:
    """Return an object that code of a rank may have written; None if it is larger than RECORD_LIMIT bytes, or nested too deeply."""
    value = read_json(path, RECORD_LIMIT)
    return value if value is not None and _is_shallow(value, DEPTH_LIMIT) else None


def _is_shallow(value: object, depth: int) -> bool:
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return parts is None or (depth > 0 and all(_is_shallow(part, depth - 1) for part in parts))


def write_json(path: Path | LinkFreePath, value: dict[str, Any]) -> None:
    """Replace the object in `path` in one step. Raises OSError."""
    link_free(path).write(json.dumps(value).encode())


def newest_first(paths: Iterable[AnyPath]) -> list[AnyPath]:
    """Return paths by the time of their last change, without those that no longer exist."""
    found = []
    for path in paths:
        with contextlib.suppress(OSError):
            found.append((path.stat().st_mtime, str(path), path))
    return [path for *_, path in sorted(found, key=lambda entry: entry[:2], reverse=True)]


@contextlib.contextmanager
def hold_lock(path: Path | LinkFreePath, wait: float = 0.0) -> Iterator[bool]:
    """Try for up to `wait` seconds to lock `path`; yield whether this process holds the lock. It ends with the process."""
    with link_free(path).open_append() as file:  # closed on exec, so children do not inherit it
        deadline = time.monotonic() + wait
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                yield True
                return
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    yield False
                    return
                time.sleep(0.01)


def is_alive(run_dir: LinkFreePath) -> bool:
    """Return whether a supervisor of this run folder is alive on this host. Raises OSError if that cannot be found out."""
    return is_locked(run_dir / "lock")


def holds_lock(run_dir: LinkFreePath) -> bool:
    """Return whether a supervisor holds the lock of a run. A rank may have replaced the file: that is no lock."""
    try:
        return is_alive(run_dir)
    except OSError:
        return False


def is_locked(path: Path | LinkFreePath, lock: Callable[[Any, int], object] = fcntl.flock) -> bool:
    """Return whether a process holds the lock of a file. Raises OSError if that cannot be found out.

    `lock`: fcntl.lockf for a lease, whose lock a rank cannot take, because its unit shows the file read-only.
    """
    try:
        file = link_free(path).open_read()
    except (FileNotFoundError, NotADirectoryError):
        return False
    with file:
        try:
            lock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return False
        except BlockingIOError:
            return True


def read_node(run_dir: LinkFreePath) -> dict[str, Any] | None:
    """Return the record of the newest start on this host, `state/node.json`; None without one.

    Code of a rank can replace it: a record with a field of another type counts as none.
    """
    node = read_record(run_dir / "state/node.json")
    if node is None or not {"status", "started"} <= node.keys():
        return None
    right = all(
        isinstance(node[name], kinds) and not isinstance(node[name], bool)
        for name, kinds in _NODE_TYPES.items()
        if name in node
    )
    return node if right else None


def rank_files(run_dir: LinkFreePath) -> list[LinkFreePath]:
    """Return the files of heartbeats; none if code of a rank has closed or replaced their folder."""
    state = run_dir / "state"
    with contextlib.suppress(OSError):
        return [state / name for name in state.entries() if _RANK_FILE.fullmatch(name)]
    return []


def read_ranks(run_dir: LinkFreePath) -> list[dict[str, Any]]:
    """Return the heartbeats of a run's ranks on this host; those beyond RANKS_LIMIT bytes are left out."""
    ranks, left = [], RANKS_LIMIT
    for path in sorted(rank_files(run_dir), key=lambda path: (len(path.name), path.name)):
        with contextlib.suppress(OSError):
            left -= path.stat().st_size
            if left < 0:
                break
            if (rank := read_record(path)) is not None:
                ranks.append(rank)
    return ranks


def other_runs(run_dir: LinkFreePath) -> tuple[list[str], list[str]]:
    """Return the names of other runs that are alive on this host, and those of run folders that cannot be read."""
    alive, unreadable = [], []
    for name in run_dir.parent.entries():
        try:
            if name != run_dir.name and is_alive(run_dir.parent / name):
                alive.append(name)
        except OSError:
            unreadable.append(name)
    return alive, unreadable


def run_devices(run_dir: LinkFreePath) -> list[str]:
    """Return the UUIDs of the GPUs that the newest start of a run uses on this host; empty if there are none."""
    found = (read_record(run_dir / "state/node.json") or {}).get("devices")
    return gpu_names(found) if isinstance(found, list) else []


def gpu_names(values: Iterable[object]) -> list[str]:
    """Return those of at most DEVICE_LIMIT values that can name a GPU."""
    first = itertools.islice(values, DEVICE_LIMIT)
    return [name for name in first if isinstance(name, str) and _DEVICE.fullmatch(name)]


def run_lease(run_dir: LinkFreePath) -> str:
    """Return the lease file of the newest start of a run on this host; empty without a queue."""
    found = (read_record(run_dir / "state/node.json") or {}).get("lease")
    return found if isinstance(found, str) else ""


def check_lease(lease: str) -> None:
    """Check that the step of a Slurm job still keeps a file locked, its lease; empty without a queue. Raises SupervisorError."""
    if lease and not is_locked(Path(lease), fcntl.lockf):
        raise SupervisorError(f"the lease of this host has ended ({Path(lease).name}): the queue starts the run again")


def read_log(path: LinkFreePath, since: int) -> dict[str, Any]:
    """Return complete lines from byte `since` on, or the last -`since` lines if it is negative.

    At most LOG_LIMIT bytes are read. `offset` is the byte at which the next call continues.
    """
    try:
        with path.open_read() as file:
            size = file.seek(0, os.SEEK_END)
            at = since if 0 <= since <= size else max(0, size - LOG_LIMIT)
            file.seek(at)
            text = file.read(LOG_LIMIT)
    except OSError:
        return {"path": str(path), "offset": 0, "lines": []}
    # A single line longer than the limit is returned in pieces.
    complete = len(text) if since < 0 or (len(text) == LOG_LIMIT and b"\n" not in text) else text.rfind(b"\n") + 1
    lines = text[:complete].decode(errors="replace").splitlines()
    return {"path": str(path), "offset": at + complete, "lines": lines[since:] if since < 0 else lines}
