"""Which failure a run is ended for, when hosts answer at different times. The hosts are objects of this process."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from trainyard.run.follower import Follower
from trainyard.run.monitor import Part, Progress
from trainyard.run.options import LaunchOptions

LOST_LIMIT = 2.0
LOST_PEER = {"type": "RuntimeError", "message": "Connection closed by peer", "traceback": "", "secondary": True}


class RunningHost:
    """Answers a status request after the wait that it asks for; as soon as `dead` is set, not at all."""

    def __init__(self, rank: int) -> None:
        self.rank, self.dead, self.failed = rank, threading.Event(), threading.Event()

    def call(self, verb: str, request: dict[str, Any]) -> dict[str, Any]:
        assert verb == "run_status"
        wake = time.monotonic() + request["wait"]
        while time.monotonic() < wake and not self.failed.is_set():
            time.sleep(0.01)
        if self.dead.is_set():
            time.sleep(60)
        status = "failed" if self.failed.is_set() else "running"
        state: dict[str, Any] = {
            "status": "training",
            "step": 5,
            "steps": 80,
            "loss": 5.0,
            "time": time.time(),
            "pid": 1,
        }
        if self.failed.is_set():
            state |= {"status": "failed", "error": LOST_PEER}
        node = {"status": status, "failures": [], "exit_code": None, "node_rank": self.rank}
        return {"status": status, "node": node, "ranks": {str(self.rank): state}, "now": time.time()}


@pytest.mark.slow
def test_a_host_without_an_answer_is_the_cause_of_the_errors_of_its_peers() -> None:
    hosts = {"a": RunningHost(0), "b": RunningHost(1), "c": RunningHost(2)}
    options = LaunchOptions(lost_limit=LOST_LIMIT)
    parts = [Part(name, "/runs/r", host.rank, [host.rank]) for name, host in hosts.items()]
    progress = Progress(3, options.progress_interval, options.stall_limit)
    follower = Follower(parts, lambda name: hosts[name], progress, options, lambda line: None)

    def lose_power() -> None:
        time.sleep(1.0)
        hosts["b"].dead.set()
        time.sleep(0.2)
        hosts["a"].failed.set()
        hosts["c"].failed.set()

    threading.Thread(target=lose_power, daemon=True).start()
    began = time.monotonic()
    cause = follower.follow()
    assert cause and cause.text.startswith("b has not answered for 2 s"), cause
    # The last answer, the wait of the request that got none, and the limit.
    assert time.monotonic() - began < 1.0 + 2 * follower.wait + LOST_LIMIT + 1.0


@pytest.mark.slow
def test_consequences_alone_end_a_run_once_every_host_answered() -> None:
    hosts = {"a": RunningHost(0), "b": RunningHost(1)}
    options = LaunchOptions(lost_limit=60)
    parts = [Part(name, "/runs/r", host.rank, [host.rank]) for name, host in hosts.items()]
    follower = Follower(parts, lambda name: hosts[name], Progress(2, 1.0, 600.0), options, lambda line: None)
    hosts["a"].failed.set()
    cause = follower.follow()
    assert cause and cause.text == "rank 0 on a: RuntimeError: Connection closed by peer"
