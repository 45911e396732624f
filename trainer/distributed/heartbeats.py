"""Signs of life between the workers of a galaxy: whoever does not hear of one for 10 s ends, and says which."""

import contextlib
import threading
import time
from collections.abc import Callable

import torch.distributed as dist

from trainer.common.errors import first_line
from trainer.distributed.meeting import ENDED, SILENCE, Meeting, connect

_INTERVAL = 1.0  # s between two signs
_TICK = 0.25
_FAREWELL = 3.0  # s for which the store of a worker that fails still answers, so that the others learn why
_LAST = 30.0  # s for which the store of a worker that has finished waits for the others


class Heartbeats:
    """Sends signs of life of this worker from its first rank, and watches those of the others on every rank."""

    def __init__(self, meeting: Meeting, *, leads: bool, end: Callable[[str], object]) -> None:
        """Start. `end` is called in another thread, with why the run has to end; it ends the process."""
        self._meeting, self._leads, self._end = meeting, leads, end
        # A connection of its own: a call that waits holds others up.
        self._keys = dist.PrefixStore(meeting.prefix, connect(meeting.galaxy))
        self._names = [f"beat/{worker.rank}" for worker in meeting.workers]
        self._mine, self._failure = f"beat/{meeting.me.rank}", f"failed/{meeting.me.rank}"
        self._answered = time.monotonic()
        self._seen = {worker.rank: ("", self._answered) for worker in meeting.workers}
        self._failed: dict[int, str] = {}
        self._lost, self._closed, self._lock = "", threading.Event(), threading.Lock()
        for loop in (self._exchange, self._watch):
            threading.Thread(target=loop, daemon=True).start()

    def why(self) -> str:
        """Return why the run has to end: the first worker that failed or is silent, or the store; empty if nothing is wrong."""
        others = [worker for worker in self._meeting.workers if worker.rank != self._meeting.me.rank]
        for worker in others:
            if failure := self._failed.get(worker.rank):
                return f"{worker} failed: {failure}"
        for worker in others:
            value, since = self._seen[worker.rank]
            if value != ENDED and self._answered - since > SILENCE:
                return f"{worker} has been silent for {SILENCE:.0f} s: look at its log, and start all workers again"
        if self._lost or time.monotonic() - self._answered > SILENCE:
            who = next(
                (str(one) for one in self._meeting.workers if one.serves), f"the store at {self._meeting.galaxy.peer}"
            )
            what = f"has ended ({self._lost})" if self._lost else f"has been silent for {SILENCE:.0f} s"
            return f"{who} {what}: look at its log, and start all workers again"
        return ""

    def explain(self) -> None:
        """Wait, after an error of a collective, until the worker that caused it is known: another one, which ends this rank, or this one."""
        deadline = time.monotonic() + SILENCE + 3 * _INTERVAL
        while time.monotonic() < deadline and not self._failed.get(self._meeting.me.rank):
            time.sleep(_TICK)

    def fail(self, error: BaseException) -> None:
        self._closed.set()
        with contextlib.suppress(RuntimeError):
            self._keys.set(self._failure, first_line(error)[:500])
        if self._leads and self._meeting.me.serves:
            time.sleep(_FAREWELL)

    def close(self) -> None:
        """End in good order. The worker that serves the store waits for the others."""
        with self._lock:
            self._closed.set()
        if not self._leads:
            return
        with contextlib.suppress(RuntimeError):
            self._keys.set(self._mine, ENDED)
        deadline = time.monotonic() + _LAST
        while self._meeting.me.serves and time.monotonic() < deadline:
            with contextlib.suppress(RuntimeError):
                if all(value == ENDED.encode() for value in self._keys.multi_get(self._names)):
                    return
            time.sleep(_TICK)

    def _exchange(self) -> None:
        number = 0
        while not self._closed.is_set():
            try:
                with self._lock:
                    if self._leads and not self._closed.is_set():
                        number += 1
                        self._keys.set(self._mine, f"{self._meeting.me.token} + {number}")
                found = self._keys.multi_get([*self._names, *(name.replace("beat", "failed") for name in self._names)])
            except RuntimeError as error:
                self._lost = first_line(error)
                return
            self._answered = time.monotonic()
            texts = [value.decode(errors="replace") for value in found]
            for worker, value, failure in zip(
                self._meeting.workers, texts[: len(self._names)], texts[len(self._names) :], strict=True
            ):
                self._failed[worker.rank] = failure
                if self._seen[worker.rank][0] != value:
                    self._seen[worker.rank] = value, self._answered
            self._closed.wait(_INTERVAL)

    def _watch(self) -> None:
        while not self._closed.wait(_TICK):
            if why := self.why():
                if not self._closed.is_set():
                    self._end(why)
                return
