"""Signals that end a worker process of Ansible never leave the queue locked to which all workers write.

A worker writes there every line that it shows, and a person presses Ctrl-C when a line appears. A worker that ends while it holds the
queue's lock blocks ansible-playbook for ever.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

RETRY = 0.02  # s until a signal is handled that arrived while the queue was locked
PATIENCE = 1.0  # s after which it is handled all the same: another worker may have ended with the lock


def end_between_writes(queue: Any) -> None:
    """Let the handlers of SIGINT and SIGTERM run when nobody writes to the queue.

    Args:
        queue: `ansible.executor.task_queue_manager.FinalQueue`, which is a SimpleQueue of multiprocessing; None outside of a worker.
    """
    if queue is None:
        return
    handlers: dict[int, Any] = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    signalled: list[float] = []

    def end(number: int, frame: Any) -> None:
        signalled.append(time.monotonic())
        if queue._wlock.acquire(block=False):
            queue._wlock.release()
        elif time.monotonic() < signalled[0] + PATIENCE:
            threading.Timer(RETRY, os.kill, (os.getpid(), number)).start()
            return
        handlers[number](number, frame)

    for number, handler in handlers.items():
        if callable(handler):
            signal.signal(number, end)
