"""The teacher pool on simulated servers: in-process nodes with service times, slots and faults."""

import random
import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest

from trainer.common.errors import UserError
from trainer.generation import pool
from trainer.generation.ollama_client import Answer, Cancel, OllamaError
from trainer.generation.pool import Listed, Node, PoolResult, ServerPool
from trainyard.ollama.teacher_nodes import Prompt


class Simulated:
    """A server: `work` seconds of a prompt at `speed`, in one of `slots`; `fault` may raise before an answer."""

    digest = "d"

    def __init__(self, name: str, speed: float = 1.0, slots: int = 1) -> None:
        self.name, self.speed, self.slots = name, speed, threading.Semaphore(slots)
        self.alive = True
        self.most = self._now = 0
        self._lock = threading.Lock()

    def fault(self, prompt: Prompt) -> None:
        if not self.alive:
            raise OllamaError("the connection was lost")

    def ask(self, prompt: Prompt, cancel: Cancel) -> Answer:
        self.fault(prompt)
        with self._lock:
            self._now += 1
            self.most = max(self.most, self._now)
        start = time.monotonic()
        try:
            with self.slots:
                queued = time.monotonic() - start
                time.sleep(prompt.options["work"] / self.speed)
        finally:
            with self._lock:
                self._now -= 1
        self.fault(prompt)
        return Answer("text", "", "stop", 10, queued, time.monotonic() - start)

    def probe(self) -> None:
        if not self.alive:
            raise OllamaError("the connection was lost")


def prompts(count: int, work: float = 0.02) -> list[Prompt]:
    draw = random.Random(1)
    return [Prompt((), {"work": work * draw.uniform(0.5, 1.5)}, n) for n in range(count)]


def run(nodes: Sequence[Node], work: list[Prompt], **more: Any) -> tuple[PoolResult, list[int]]:
    answers: list[int] = []
    result = ServerPool(nodes, lambda new: answers.extend(p.sample for p, _, _ in new), **more).run(Listed(work))
    return result, answers


@pytest.mark.slow
def test_uses_the_sum_of_all_nodes() -> None:
    """At least 0.9 of the summed rates, and 1.6 x a static split, with one node at 20 %."""
    work = prompts(150)
    total = sum(prompt.options["work"] for prompt in work)
    result, answers = run([Simulated("fast"), Simulated("slow", 0.2)], work)
    assert sorted(answers) == list(range(150))
    assert result.seconds <= total / 1.2 / 0.9
    assert result.seconds <= total / 2 / 0.2 / 1.6
    assert result.answers["slow"] < result.answers["fast"] / 3


@pytest.mark.slow
def test_fills_parallel_slots_and_no_more() -> None:
    node = Simulated("node", slots=4)
    work = prompts(120, 0.1)
    result, _ = run([node], work)
    assert 4 <= node.most <= 8
    assert result.seconds <= sum(prompt.options["work"] for prompt in work) / 4 / 0.75


def test_work_of_a_dead_node_returns_and_the_node_comes_back() -> None:
    first, second = Simulated("first"), Simulated("second")
    second.alive = False
    timer = threading.Timer(0.6, lambda: setattr(second, "alive", True))
    timer.start()
    try:
        result, answers = run([first, second], prompts(100))
    finally:
        timer.cancel()
    assert sorted(answers) == list(range(100))
    assert result.answers["second"] > 0
    assert not result.failed


def test_a_prompt_that_every_server_refuses_is_given_up() -> None:
    class Picky(Simulated):
        def fault(self, prompt: Prompt) -> None:
            if prompt.sample == 3:
                raise OllamaError("invalid prompt", 400)

    result, answers = run([Picky("node")], prompts(6, 0.001))
    assert sorted(answers) == [0, 1, 2, 4, 5]
    assert [(prompt.sample, reason) for prompt, reason in result.failed] == [(3, "invalid prompt")]


def test_a_server_without_the_model_is_left_out() -> None:
    class Empty(Simulated):
        def fault(self, prompt: Prompt) -> None:
            raise OllamaError("model not found", 404)

    lines: list[str] = []
    result, answers = run([Empty("empty"), Simulated("node")], prompts(8, 0.01), report=lines.append, interval=0.01)
    assert len(answers) == 8 and result.answers == {"empty": 0, "node": 8}
    assert "empty left out (model not found)" in lines[-1]
    with pytest.raises(UserError, match="no server is left: empty: model not found"):
        run([Empty("empty")], prompts(1))


def test_gives_up_when_nobody_answers() -> None:
    node = Simulated("node")
    node.alive = False
    with pytest.raises(UserError, match=r"no server has answered for 0 s .*the answers so far are kept"):
        run([node], prompts(2), patience=0.4)


def test_a_silent_node_loses_its_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without power sends no reset: probes find it, and its requests go to another node."""
    monkeypatch.setattr(pool, "SILENCE", 0.1)
    monkeypatch.setattr(pool, "PROBE_PERIOD", 0.05)

    class Unresponsive(Simulated):
        def ask(self, prompt: Prompt, cancel: Cancel) -> Answer:
            while not cancel.cancelled:
                time.sleep(0.01)
            raise OllamaError("the request was cancelled")

        def probe(self) -> None:
            raise OllamaError("no complete reply within the time limit")

    _, answers = run([Unresponsive("silent"), Simulated("node")], prompts(10, 0.01))
    assert sorted(answers) == list(range(10))


def test_an_error_of_the_disk_ends_all_requests() -> None:
    def deliver(new: object) -> None:
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        ServerPool([Simulated("node")], deliver).run(Listed(prompts(50)))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("teacher")]
