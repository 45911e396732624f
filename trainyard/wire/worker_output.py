"""What a worker process of Ansible writes to the queue that all workers share, so that its end never leaves the queue locked.

A worker that ends while one of its threads holds the queue's lock blocks ansible-playbook for ever. A worker writes there every line that it
shows, and with -vvv connection plugins write there from other threads. Ctrl-C ends a worker at once, often while it writes: a person presses
it when a line appears.
"""

from __future__ import annotations

import functools
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

RETRY = 0.02  # s until a signal is handled that arrived while the queue was locked
PATIENCE = 1.0  # s after which it is handled all the same: another worker may have ended with the lock


def install(display: Any) -> None:
    """Replace the queue of Ansible's display in a worker, and the handlers of signals that end it; no effect elsewhere.

    Args:
        display: `ansible.utils.display.Display()`.
    """
    if display._final_q is None or isinstance(display._final_q, WorkerOutput):
        return
    display._final_q = output = WorkerOutput(display._final_q)
    for number in (signal.SIGINT, signal.SIGTERM):
        if callable(handler := signal.getsignal(number)):
            signal.signal(number, functools.partial(output.end, handler))


def close(display: Any) -> None:
    """Return when no other thread writes to the queue; none does afterwards."""
    if isinstance(display._final_q, WorkerOutput):
        display._final_q.close()


class WorkerOutput:
    """The queue, closed for all threads but the main one once `close` was called. Has the methods that Ansible's display uses."""

    def __init__(self, queue: Any) -> None:
        """`queue`: `ansible.executor.task_queue_manager.FinalQueue`, which is a SimpleQueue of multiprocessing."""
        self._queue = queue
        self._owner = threading.get_ident()
        self._lock = threading.Lock()  # held while another thread writes, so that close() waits for it
        self._closed = False
        self._signalled = 0.0  # when the first signal arrived

    def close(self) -> None:
        """Return when no other thread writes; none does afterwards."""
        with self._lock:
            self._closed = True

    def send_display(self, method: str, *args: Any, **kwargs: Any) -> None:
        """Write a message, as `FinalQueue.send_display` does."""
        if threading.get_ident() == self._owner:
            self._queue.send_display(method, *args, **kwargs)
            return
        with self._lock:
            if not self._closed:
                self._queue.send_display(method, *args, **kwargs)

    def send_prompt(self, **kwargs: Any) -> None:
        """Ask the user, as `FinalQueue.send_prompt` does."""
        self._queue.send_prompt(**kwargs)

    def end(self, handler: Callable[[int, Any], None], number: int, frame: Any) -> None:
        """Call the handler of a signal, which ends this process at once, when nobody writes to the queue."""
        self._signalled = self._signalled or time.monotonic()
        if self._queue._wlock.acquire(block=False):
            self._queue._wlock.release()
        elif time.monotonic() < self._signalled + PATIENCE:
            threading.Timer(RETRY, os.kill, (os.getpid(), number)).start()
            return
        handler(number, frame)
