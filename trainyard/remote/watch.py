"""The end of a program on a host that nobody waits for: its time limit, and the end of its connection. Standard library only."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time
from types import FrameType
from typing import NoReturn

END_LIMIT = 3.0  # s for the program to remove its temporary files


class EndedError(BaseException):
    """Raised in the main thread, also out of a system call that blocks. No handler of other errors catches it."""


def watch(limit: float | None, *, finishes: bool) -> None:
    """End this program and its children after `limit` seconds (None: no limit), and when its standard output is closed.

    sshd closes standard output when the connection ends. Standard input says nothing: it ends with the request.
    `finishes`: the program completes what it has begun without its connection, within the limit.
    """
    with contextlib.suppress(OSError):  # the leader of a session, as under sshd, has a group
        os.setpgid(0, 0)
    reason, main = [""], threading.get_ident()

    def end(number: int, frame: FrameType | None) -> NoReturn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise EndedError(reason[0] or "it was ended")

    def wait() -> None:
        poll = select.poll()
        if not finishes:
            poll.register(1, 0)  # an error, which a pipe without a reader has, is always reported
        ended = poll.poll(None if limit is None else int(limit * 1000))
        reason[0] = "the connection has ended" if ended else f"not done within {limit:.0f} s"
        signal.pthread_kill(main, signal.SIGTERM)  # it may block in a system call, which this interrupts
        time.sleep(END_LIMIT)
        kill_group()

    signal.signal(signal.SIGTERM, end)
    if limit is not None:
        signal.setitimer(signal.ITIMER_REAL, limit + 2 * END_LIMIT)  # ends it without the interpreter
    threading.Thread(target=wait, daemon=True).start()


def kill_group() -> NoReturn:
    """End this process and those that it has started, except for what has a session of its own."""
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)
