"""The reported failure of a run when hosts answer at different times. The hosts are objects of this process."""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tables import table

from trainer.supervise.status import status
from trainyard.run.answer_times import HALF_LIFE, LONGEST, MARGIN, SHORTEST, AnswerTimes
from trainyard.run.follow import follower as follower_module
from trainyard.run.follow.follower import SHORT_POLL, Follower, evidence
from trainyard.run.follow.monitor import Cause, Progress
from trainyard.run.host_run import HostRun
from trainyard.run.launch_options import LaunchOptions
from trainyard.wire.connection import FanOut, InvalidReplyError
from trainyard.wire.run_errors import first_of

LOST_LIMIT = 2.0
LOST_PEER = {"type": "RuntimeError", "message": "Connection closed by peer", "traceback": "", "secondary": True}


class RunningHost:
    """Answers a status request after the wait that it asks for; as soon as `dead` is set, not at all.

    `slow`: seconds that its Python takes to start; it answers a probe at once.
    """

    def __init__(self, rank: int, slow: float = 0.0) -> None:
        self.rank, self.slow, self.probes = rank, slow, 0
        self.dead, self.failed = threading.Event(), threading.Event()

    def run(self, command: str, verb: str) -> dict[str, Any]:
        assert command.startswith("date ") and verb == "begin"
        self.probes += 1
        if self.dead.is_set():
            time.sleep(60)
        return {"now": time.time()}

    def call(self, verb: str, request: dict[str, Any]) -> dict[str, Any]:
        assert verb == "run_status"
        time.sleep(self.slow)
        wake = time.monotonic() + request["wait"]
        while time.monotonic() < wake and not self.failed.is_set():
            time.sleep(0.01)
        if self.dead.is_set():
            time.sleep(60)
        status = "failed" if self.failed.is_set() else "running"
        state: dict[str, Any] = table("follower")["call"] | {"time": time.time()}
        if self.failed.is_set():
            state |= {"status": "failed", "error": LOST_PEER}
        node = {"status": status, "failures": [], "exit_code": None, "node_rank": self.rank}
        return {"status": status, "node": node, "ranks": {str(self.rank): state}, "now": time.time()}


@pytest.mark.slow
def test_a_host_without_an_answer_is_the_cause_of_the_errors_of_its_peers() -> None:
    hosts = {"a": RunningHost(0), "b": RunningHost(1), "c": RunningHost(2)}
    options = LaunchOptions(lost_limit=LOST_LIMIT)
    parts = [HostRun(name, "/runs/r", host.rank, [host.rank]) for name, host in hosts.items()]
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
    assert not hosts["b"].probes, "an explicit limit holds"
    # The last answer, the wait of the request that got none, and the limit.
    assert time.monotonic() - began < 1.0 + 2 * follower.wait + LOST_LIMIT + 1.0


@pytest.mark.slow
def test_consequences_alone_end_a_run_once_every_host_answered() -> None:
    hosts = {"a": RunningHost(0), "b": RunningHost(1)}
    options = LaunchOptions(lost_limit=60)
    parts = [HostRun(name, "/runs/r", host.rank, [host.rank]) for name, host in hosts.items()]
    follower = Follower(parts, lambda name: hosts[name], Progress(2, 1.0, 600.0), options, lambda line: None)
    hosts["a"].failed.set()
    cause = follower.follow()
    assert cause and cause.text == "rank 0 on a: RuntimeError: Connection closed by peer"


def follower_of(hosts: dict[str, RunningHost], options: LaunchOptions) -> Follower:
    parts = [HostRun(name, "/runs/r", host.rank, [host.rank]) for name, host in hosts.items()]
    return Follower(parts, lambda name: hosts[name], Progress(2, 1.0, 600.0), options, lambda line: None)


def test_a_host_whose_record_is_unreadable_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Code of a rank has closed it. A lost host would get no request to stop."""

    def call(_: object, verb: str, request: dict[str, Any]) -> dict[str, Any]:
        if not request.get("plain"):
            raise InvalidReplyError("Permission denied")
        return {"status": "unreadable", "node": None, "ranks": {}, "now": time.time()}

    monkeypatch.setattr(RunningHost, "call", call)
    follower = follower_of({"a": RunningHost(0)}, LaunchOptions(lost_limit=0.5))
    cause = follower.follow()
    assert cause and cause.text == "a cannot read the record of the run" and follower.parts[0].silent < 0.25


@pytest.mark.slow
def test_without_a_limit_a_lost_host_is_noticed_within_five_seconds() -> None:
    hosts = {"a": RunningHost(0), "b": RunningHost(1)}
    follower = follower_of(hosts, LaunchOptions())
    lost: list[float] = []

    def lose_power() -> None:
        time.sleep(2.5)
        hosts["b"].dead.set()
        lost.append(time.monotonic())

    threading.Thread(target=lose_power, daemon=True).start()
    cause = follower.follow()
    assert cause and cause.kind == "lost" and cause.host == "b"
    assert SHORTEST < time.monotonic() - lost[0] < SHORT_POLL + SHORTEST + 0.5 < 5
    assert hosts["b"].probes, "a host is probed before it counts as lost"


def test_a_host_is_asked_more_often_once_its_ranks_train() -> None:
    part = HostRun("a", "/runs/r", 0, [0])
    adapts = follower_of({"a": RunningHost(0)}, LaunchOptions())
    fixed = follower_of({"a": RunningHost(0)}, LaunchOptions(lost_limit=6))
    assert adapts.delay(part) == fixed.delay(part) == fixed.wait > SHORT_POLL
    part.answer = {"status": "running", "ranks": {"0": {"status": "starting"}}}
    assert adapts.delay(part) > SHORT_POLL
    part.answer = {"status": "running", "ranks": {"0": {"status": "training"}}}
    assert (adapts.delay(part), fixed.delay(part)) == (SHORT_POLL, fixed.wait)


@pytest.mark.long
def test_a_host_whose_status_takes_long_is_not_lost_while_it_shows_signs_of_life(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(follower_module, "ALIVE_LIMIT", LONGEST + 2)
    hosts = {"a": RunningHost(0), "b": RunningHost(1)}
    follower = follower_of(hosts, LaunchOptions())
    ended: list[object] = []
    watch = threading.Thread(target=lambda: ended.append(follower.follow()), daemon=True)
    watch.start()
    time.sleep(2.0)
    hosts["b"].slow = SHORTEST + 3.0  # load: longer than the limit so far
    watch.join(9.0)
    assert watch.is_alive() and hosts["b"].probes and not ended
    hosts["b"].slow = 60.0  # alive, but it returns no status any more
    began = time.monotonic()
    watch.join(LONGEST + 2 * SHORT_POLL + 10.0)
    assert not watch.is_alive() and time.monotonic() - began > LONGEST
    assert ended and "b has not answered" in str(ended[0])


def follow_two_hosts() -> None:
    """Follow two healthy hosts whose silence limit is one second, in a process that the test below stops and continues."""
    hosts = {"a": RunningHost(0), "b": RunningHost(1)}
    follower = follower_of(hosts, LaunchOptions(lost_limit=1.0))
    threading.Timer(6.0, lambda: [host.failed.set() for host in hosts.values()]).start()
    print("following", flush=True)
    request = FanOut({"c": lambda: [time.sleep(0.1) for _ in range(20)]})
    waiting = threading.Thread(target=request.wait, args=(3.0,))
    waiting.start()
    cause = follower.follow()
    waiting.join()
    print(cause and cause.text, request.errors, flush=True)


@pytest.mark.slow
def test_a_controller_that_was_stopped_does_not_count_its_pause_as_silence() -> None:
    code = f"import sys; sys.path[:0] = {sys.path!r}; import test_follower; test_follower.follow_two_hosts()"
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent)}
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as controller:
        assert controller.stdout and controller.stdout.readline() == "following\n"
        time.sleep(1.0)
        controller.send_signal(signal.SIGSTOP)
        time.sleep(3.0)
        controller.send_signal(signal.SIGCONT)
        said = controller.stdout.readline()
        assert said.startswith("rank 0 on a: RuntimeError") and said.endswith(" {}\n"), said


def test_a_traceback_that_the_log_has_too_is_shown_once() -> None:
    traceback = "Traceback (most recent call last):\n  File \"t.py\", line 5\nKeyError: 'column'\n"

    class Host:
        def call(self, verb: str, request: dict[str, Any]) -> dict[str, Any]:
            lines = ["before the end", *traceback.splitlines()] if self.more else traceback.splitlines()
            return {"logs": {"rank0.log": {"lines": lines, "path": "/logs/rank0.log"}}}

        more = True

    host = Host()
    error = {"message": "KeyError: 'column'", "traceback": traceback}
    part = HostRun("node1", "/run", 0, [0], answer={"ranks": {"0": {"error": error}}, "status": "failed"})
    found = lambda: evidence([part], Cause(0, 0, "node1", "a column", "rank"), lambda name: host)  # type: ignore  # noqa: E731
    shown = found()
    assert shown[:3] == traceback.splitlines() and shown.count("KeyError: 'column'") == 1
    assert shown[3:5] == ["last lines of rank0.log:", "  before the end"] and shown[5].endswith("/logs/rank0.log")
    host.more = False
    assert "last lines of rank0.log:" not in found()
    error["plain"] = True
    assert found() == ["rank0.log on node1: /logs/rank0.log", "torchrun.0.log on node1: /run/logs/torchrun.0.log"]


def test_a_path_that_the_unit_hides_is_named_with_its_option(tmp_path: Path) -> None:
    (tmp_path / "my corpus").touch()
    host = SimpleNamespace(call=lambda verb, request: status(request))
    part = HostRun("node1", str(tmp_path / "run"), 0, [0])
    for path, unit, told in (
        (
            tmp_path / "my corpus",
            "trainyard-r",
            [f"{tmp_path}/my corpus is not shown to runs: -e run_shows='{tmp_path}/my corpus'"],
        ),
        (tmp_path / "my corpus", None, []),
        (tmp_path / "nothing", "trainyard-r", []),
    ):
        error = {"type": "FileNotFoundError", "message": f"[Errno 2] No such file or directory: '{path}'"}
        part.answer = {"ranks": {"0": {"error": error}}, "status": "failed", "node": {"unit": unit}}  # type: ignore[typeddict-item]
        assert evidence([part], Cause(0, 0, "node1", "a file", "rank"), lambda name: host)[:-2] == told  # type: ignore


def test_each_of_several_problems_is_in_one_line() -> None:
    assert first_of({"node1": "full"}) == ("node1: full", [])
    message, others = first_of({"node1": "full", "node2": "away", "run r": "x"})
    assert message == "node1: full (and 2 more problems, listed below)" and others == ["node2: away", "run r: x"]


# The limit for lost hosts --------------------------------------------------------------------------------------------


def test_before_the_first_answer_hosts_have_the_longest_limit() -> None:
    assert AnswerTimes().limit(0.0) == LONGEST


@pytest.mark.parametrize("seed", range(20))
def test_the_limit_is_bounded_and_leaves_a_margin_to_recent_answers(seed: int) -> None:
    draw, times, now, answers = random.Random(seed), AnswerTimes(), 1000.0, []
    scale = draw.choice((0.01, 0.1, 1.0, 5.0))
    for _ in range(draw.randrange(1, 200)):
        now += draw.expovariate(1 / draw.choice((0.1, 1.0, 30.0)))
        answers.append((now, draw.expovariate(1 / scale)))
        times.add(answers[-1][1], now)
        asked = now + draw.uniform(0.0, 100.0)
        limit = times.limit(asked)
        assert SHORTEST <= limit <= LONGEST
        for at, seconds in answers:
            remembered = seconds * 0.5 ** ((asked - at) / HALF_LIFE)
            assert limit >= min(LONGEST, SHORTEST + MARGIN * remembered) - 1e-9, (at, seconds)
        # No answer explains a longer limit than the slowest one does.
        assert limit <= SHORTEST + MARGIN * max(seconds for _, seconds in answers) + 1e-9
        assert limit >= times.limit(asked + 1.0), "without further answers the limit never grows"


def test_a_quiet_network_has_a_short_limit_and_load_a_long_one_at_once() -> None:
    times = AnswerTimes()
    for second in range(600):
        times.add(0.08, float(second))
    assert times.limit(600.0) < 3.0
    times.add(2.0, 601.0)
    assert times.limit(601.0) == LONGEST
    for second in range(602, 1202):
        times.add(0.08, float(second))
    assert times.limit(1202.0) < 3.0, "a slow answer is forgotten"
