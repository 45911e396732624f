"""Set up a worker process of torchrun before torch is imported: end with the launcher, and write to a log file."""

import ctypes
import os
import signal
import sys
from pathlib import Path

PR_SET_PDEATHSIG = 1  # prctl(2)


def die_with_launcher() -> None:
    """Ask the kernel to kill this process when its parent dies: otherwise the workers survive a kill -9 of torchrun."""
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def redirect_output(path: Path) -> None:
    """Append stdout and stderr of this process, including those of C code, to a log file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    os.close(handle)
    # Line buffering: readers follow the log while it grows.
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
