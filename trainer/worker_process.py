"""The first things that a rank does under torchrun, before torch is imported: tie its life to the launcher's, open its log."""

import ctypes
import os
import signal
import sys
from pathlib import Path

PR_SET_PDEATHSIG = 1  # prctl(2)


def die_with_launcher() -> None:
    """Ask the kernel to end this process when the one that started it dies: kill -9 of torchrun leaves its workers otherwise."""
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def redirect_output(path: Path) -> None:
    """Send this process's stdout and stderr, C code's too, to the end of a log file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    os.close(handle)
    # A log that is followed live must not wait for a full buffer.
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
