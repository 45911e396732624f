"""Signals that end a worker process of Ansible while it writes to the queue that all workers share."""

import multiprocessing
import os
import signal
import time
from multiprocessing.connection import Connection

import pytest

from trainyard.wire import worker_output

FORK = multiprocessing.get_context("fork")
CODE = 7  # exit code of the handler that stands in for Ansible's


class SlowQueue:
    """A queue with the lock of FinalQueue, whose writes take a while."""

    def __init__(self) -> None:
        self._wlock = FORK.Lock()

    def send_display(self, method: str, seconds: float, its: Connection) -> None:
        with self._wlock:
            its.send("locked")
            time.sleep(seconds)
        its.send("free")


def told(ours: Connection) -> str:
    """Return what a worker sends. A worker that ends early sends nothing."""
    assert ours.poll(20), "the worker sends nothing"
    found: str = ours.recv()
    return found


def work(queue: SlowQueue, its: Connection, seconds: float) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: os._exit(CODE))
    worker_output.end_between_writes(queue)
    queue.send_display("display", seconds, its)
    time.sleep(30)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_worker_ends_after_its_write(number: signal.Signals) -> None:
    queue, (ours, its) = SlowQueue(), FORK.Pipe()
    worker = FORK.Process(target=work, args=(queue, its, 0.3))
    worker.start()
    assert told(ours) == "locked"
    assert worker.pid
    os.kill(worker.pid, number)
    worker.join(20)
    assert worker.exitcode == CODE
    assert told(ours) == "free", "the write was complete"
    assert queue._wlock.acquire(block=False)


def test_a_worker_ends_without_a_write() -> None:
    queue, (ours, its) = SlowQueue(), FORK.Pipe()
    worker = FORK.Process(target=work, args=(queue, its, 0.0))
    worker.start()
    assert [told(ours), told(ours)] == ["locked", "free"]
    assert worker.pid
    with queue._wlock:  # of another worker, which has ended
        os.kill(worker.pid, signal.SIGINT)
        began = time.monotonic()
        worker.join(20)
    assert worker.exitcode == CODE and time.monotonic() - began >= worker_output.PATIENCE / 2
