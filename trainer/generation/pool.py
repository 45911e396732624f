"""Ask several servers at once: each takes the next prompt when it is free.

The number of requests in flight on a node grows while the node's queue is short, and shrinks when it is not (additive
increase, multiplicative decrease). A request that fails returns to the queue, and its node pauses with a growing, random
delay; one that would fail everywhere is given up at once. A node that does not answer gets no request until a probe succeeds.
"""

from __future__ import annotations

import collections
import concurrent.futures
import math
import queue
import random
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

from trainer.common.errors import UserError
from trainer.common.formats import clock, printable, thousands
from trainer.generation.ollama_client import Answer, Cancel, OllamaError

MAX_IN_FLIGHT = 64  # requests of one node
QUEUE_SECONDS = 0.05  # time in a node's queue that is short for any answer
QUEUE_SHARE = 0.1  # or the share of the answer's own time
CUT = 0.7  # factor of the requests in flight after a long queue
MAX_DELAY = 30.0  # s between two attempts on a node that fails
FAILURES = 6  # rounds of errors in a row after which a server is left out
STRIKES = 3  # errors of servers after which a prompt is given up
LOSSES = 20  # lost connections after which a prompt is given up
SILENCE = 10.0  # s without a byte after which a node that owes an answer is probed
PROBE_PERIOD = 5.0  # s between two probes of such a node
PATIENCE = 300.0  # s without any live node after which the pool gives up
_WINDOW = 30.0  # s over which the current rate is measured
_TICK = 0.2  # s between two checks of silent and failed nodes


@dataclass(kw_only=True)
class Task:
    """What a node answers, in a subclass. `strikes`: errors of servers; `losses`: lost connections."""

    strikes: int = 0
    losses: int = 0


T = TypeVar("T", bound=Task)
In = TypeVar("In", bound=Task, contravariant=True)
Out = TypeVar("Out", bound=Task, covariant=True)


class Node(Protocol[In]):
    """A server that answers. Its methods are called in several threads at once and raise OllamaError."""

    @property
    def name(self) -> str:
        """Name of the host."""
        ...

    def ask(self, prompt: In, cancel: Cancel) -> Answer:
        """Return the answer to a prompt."""
        ...

    def probe(self) -> None:
        """Return if the server answers at all."""
        ...


N = TypeVar("N", bound=Node[Any])


class Source(Protocol[Out]):
    """Where a pool gets its prompts. Its methods are called in the thread of the pool."""

    def take(self) -> Out | None:
        """Return the next prompt; None if there is none now."""
        ...

    def left(self) -> int:
        """Return how many prompts `take` would return now."""
        ...

    def ended(self) -> bool:
        """Return whether `take` will never return a prompt again."""
        ...


class Listed(Generic[T]):
    """A Source of a fixed number of prompts."""

    def __init__(self, prompts: Iterable[T]) -> None:
        self._prompts = collections.deque(prompts)

    def take(self) -> T | None:
        """Return the next prompt."""
        return self._prompts.popleft() if self._prompts else None

    def left(self) -> int:
        """Return how many prompts are left."""
        return len(self._prompts)

    def ended(self) -> bool:
        """Return whether no prompt is left."""
        return not self._prompts


@dataclass
class _State(Generic[N, T]):
    """The state of a node in the pool. Times are of time.monotonic()."""

    node: N
    window: float = 1.0
    in_flight: dict[int, _Request[T]] = field(default_factory=dict)
    cut_at: float = -math.inf
    failed_at: float = -math.inf
    failures: int = 0
    retry_at: float = 0.0
    down: bool = False
    waits: bool = False  # it says that it answers later, or has lost all requests of some rounds
    removed: str = ""
    error: str = ""
    probing: bool = False
    probed_at: float = -math.inf
    missed: int = 0
    latency: float = 0.0
    answers: int = 0
    tokens: int = 0

    def free(self, now: float) -> bool:
        """Return whether the node takes another request."""
        return not (self.down or self.removed) and now >= self.retry_at and len(self.in_flight) < int(self.window)

    @property
    def rate(self) -> float:
        """Answers per second with the present number of requests; 0 if it is not known."""
        return len(self.in_flight) / self.latency if self.latency and not self.down else 0.0

    @property
    def alive(self) -> bool:
        """Whether an answer may come: a server that waits has begun one at least."""
        begun = any(request.cancel.begun for request in self.in_flight.values())
        return not (self.down or self.removed) and (begun or not self.waits)


@dataclass(frozen=True)
class _Request(Generic[T]):
    prompt: T
    cancel: Cancel
    sent: float
    full: bool  # whether it filled the node's window


@dataclass(frozen=True)
class PoolResult(Generic[T]):
    """What became of the prompts. `answers, tokens`: by node."""

    failed: list[tuple[T, str]]  # the prompts without an answer, with the reason
    answers: dict[str, int]
    tokens: dict[str, int]
    seconds: float  # duration


# A node, the request that has ended or None for a probe, and its outcome.
Event: TypeAlias = tuple[_State[N, T], _Request[T] | None, Answer | Exception | None]


class ServerPool(Generic[N, T]):
    """Distributes prompts over nodes. One thread decides; a thread per request waits for its answer.

    Args:
        nodes: the servers.
        deliver: receives new answers, several at once; when it returns, they are safe.
        report: receives a line of progress every `interval` seconds.
        patience: seconds without any live node after which `run` raises UserError.
        watch: receives `numbers` with each line of progress, at the beginning and at the end.
        give_up: receives a prompt without an answer, with the reason, instead of the result of `run`.
    """

    def __init__(
        self,
        nodes: Iterable[N],
        deliver: Callable[[list[tuple[T, N, Answer]]], None],
        report: Callable[[str], None] = lambda line: None,
        *,
        interval: float = 5.0,
        patience: float = PATIENCE,
        watch: Callable[[dict[str, Any]], None] = lambda numbers: None,
        give_up: Callable[[T, str], None] | None = None,
    ) -> None:
        self._states: list[_State[N, T]] = [_State(node) for node in nodes]
        self._deliver, self._report, self._watch = deliver, report, watch
        self._interval, self._patience = interval, patience
        self._events: queue.SimpleQueue[Event[N, T] | None] = queue.SimpleQueue()
        self._recent: collections.deque[tuple[float, int]] = collections.deque()  # time and tokens of each new answer
        self._failed: list[tuple[T, str]] = []
        self._give_up = give_up or (lambda prompt, why: self._failed.append((prompt, why)))
        self._returned: collections.deque[T] = collections.deque()  # of requests that failed
        self._random = random.Random()
        self._stopped = False

    def wake(self) -> None:
        """Let the pool ask its source again. Any thread may call it."""
        self._events.put(None)

    def stop(self) -> None:
        """End `run`, and the requests of its nodes. Any thread may call it."""
        self._stopped = True
        self.wake()

    def leave_out(self, name: str, why: str) -> None:
        """Send no more prompts to a node. Any thread may call it."""
        for state in self._states:
            if state.node.name == name:
                state.removed = why
        self.wake()

    def run(self, source: Source[T]) -> PoolResult[T]:
        """Answer all prompts of a source, until it has ended.

        Raises UserError: no node is left, or none has answered for `patience` seconds. Delivered answers are safe.
        """
        self._source = source
        self._total = source.left()
        self._started = self._reported = self._alive_at = time.monotonic()
        threads = len(self._states) * (MAX_IN_FLIGHT + 1) + 1
        executor = concurrent.futures.ThreadPoolExecutor(threads, thread_name_prefix="teacher")
        self._executor = executor
        self._watch(self.numbers(self._started))
        try:
            while not self._stopped and (
                self._left() or not source.ended() or any(state.in_flight for state in self._states)
            ):
                self._step()
        finally:
            for state in self._states:
                for request in state.in_flight.values():
                    request.cancel.cancel()
            executor.shutdown(wait=True, cancel_futures=True)
        self._watch(self.numbers(time.monotonic()))
        return PoolResult(
            self._failed,
            {state.node.name: state.answers for state in self._states},
            {state.node.name: state.tokens for state in self._states},
            time.monotonic() - self._started,
        )

    def _step(self) -> None:
        """Hand out prompts, wait for the next event, and process all that have arrived."""
        now = time.monotonic()
        self._check_nodes(now)
        self._dispatch(now)
        events = []
        try:
            events.append(self._events.get(timeout=_TICK))
            while True:
                events.append(self._events.get_nowait())
        except queue.Empty:
            pass
        delivered = []
        now = time.monotonic()
        for state, request, outcome in filter(None, events):
            if request is None:
                self._probed(state, outcome, now)
            elif isinstance(outcome, Answer):
                del state.in_flight[id(request)]
                self._succeeded(state, request, outcome, now)
                delivered.append((request.prompt, state.node, outcome))
            else:
                del state.in_flight[id(request)]
                self._lost(state, request, outcome, now)
        if delivered:
            self._dispatch(now)  # no node waits for the disk
            self._deliver(delivered)
        if now - self._reported >= self._interval:
            self._reported = now
            self._report(self.progress(now))
            self._watch(self.numbers(now))

    # Requests -----------------------------------------------------------------------------------------------------------

    def _left(self) -> int:
        """Return the number of prompts that no node has."""
        return len(self._returned) + self._source.left()

    def _dispatch(self, now: float) -> None:
        while self._left():
            free = [state for state in self._states if state.free(now) and self._worth_it(state)]
            if not free:
                return
            prompt = self._returned.popleft() if self._returned else self._source.take()
            if prompt is None:
                return
            self._send(min(free, key=lambda s: (len(s.in_flight) / s.window, s.latency)), prompt, now)

    def _worth_it(self, state: _State[N, T]) -> bool:
        """Return whether a node would end a prompt before the others end all that are left."""
        rates = sum(other.rate for other in self._states if other is not state)
        if not rates or not state.latency:
            return True
        others = min(other.latency for other in self._states if other is not state and other.rate)
        return state.latency <= self._left() / rates + others

    def _send(self, state: _State[N, T], prompt: T, now: float) -> None:
        request = _Request(prompt, Cancel(), now, full=len(state.in_flight) + 1 >= int(state.window))
        state.in_flight[id(request)] = request

        def work() -> None:
            outcome: Answer | Exception
            try:
                request.cancel.heard = time.monotonic()
                outcome = state.node.ask(prompt, request.cancel)
            except Exception as error:
                outcome = error
            self._events.put((state, request, outcome))

        self._executor.submit(work)

    def _succeeded(self, state: _State[N, T], request: _Request[T], answer: Answer, now: float) -> None:
        seconds = now - request.sent
        state.latency = seconds if not state.latency else 0.8 * state.latency + 0.2 * seconds
        state.answers += 1
        state.tokens += answer.tokens
        state.failures, state.error, state.waits = 0, "", False
        self._recent.append((now, answer.tokens))
        own = max(0.0, answer.seconds - answer.queued)
        if answer.queued <= max(QUEUE_SECONDS, QUEUE_SHARE * own):
            if request.full:
                state.window = min(MAX_IN_FLIGHT, state.window + 1 / state.window)
        elif request.sent > state.cut_at:  # one decrease for the requests of one round
            state.window, state.cut_at = max(1.0, state.window * CUT), now

    def _lost(self, state: _State[N, T], request: _Request[T], error: Exception | None, now: float) -> None:
        """Return the prompt to the queue, and let its node pause."""
        prompt, failure = request.prompt, error.failure if isinstance(error, OllamaError) else "error"
        why = printable(error)
        if failure == "final":
            self._give_up(prompt, why)
            return
        state.error = why
        prompt.strikes += failure == "error"
        prompt.losses += failure == "lost"
        state.down |= failure == "lost"
        self._pause(state, request.sent, now)
        state.waits |= failure == "wait" or (failure == "lost" and state.failures >= FAILURES)
        if failure == "refused" or (failure == "error" and state.failures >= FAILURES):
            state.removed = why  # it answers requests, but never with an answer
        if prompt.strikes >= STRIKES or prompt.losses >= LOSSES:
            self._give_up(prompt, why)
        else:
            self._returned.appendleft(prompt)

    def _pause(self, state: _State[N, T], sent: float, now: float) -> None:
        if sent < state.failed_at:
            return  # one pause for the requests of one round
        state.failures += 1
        state.failed_at = now
        state.window = max(1.0, state.window / 2)
        state.retry_at = now + min(MAX_DELAY, 0.25 * 2.0 ** min(state.failures, 10)) * self._random.uniform(0.5, 1.0)

    # Nodes --------------------------------------------------------------------------------------------------------------

    def _check_nodes(self, now: float) -> None:
        """Probe nodes that are down or silent. Raises UserError if none is left."""
        for state in self._states:
            if state.removed or state.probing:
                continue
            silent = any(request.cancel.silent > SILENCE for request in state.in_flight.values())
            due = now >= state.retry_at if state.down else silent and now - state.probed_at > PROBE_PERIOD
            if due:
                state.probing, state.probed_at = True, now
                self._executor.submit(self._check_server, state)
        if any(state.alive for state in self._states):
            self._alive_at = now
            return
        reasons = "; ".join(f"{s.node.name}: {s.removed or s.error}" for s in self._states)
        if all(state.removed for state in self._states):
            raise UserError(f"no server is left: {reasons}")
        if now - self._alive_at > self._patience:
            raise UserError(
                f"no server has answered for {self._patience:.0f} s ({reasons}): the answers so far are kept; "
                "start the servers, then run the same command again"
            )

    def _check_server(self, state: _State[N, T]) -> None:
        try:
            state.node.probe()
        except Exception as error:
            self._events.put((state, None, error))
        else:
            self._events.put((state, None, None))

    def _probed(self, state: _State[N, T], error: Answer | Exception | None, now: float) -> None:
        state.probing = False
        if error is None:
            state.down, state.missed = False, 0
            return
        state.missed += 1
        if state.down:
            self._pause(state, now, now)
        elif state.missed >= 2:
            state.missed = 0
            for request in state.in_flight.values():
                request.cancel.cancel()

    # Progress -----------------------------------------------------------------------------------------------------------

    def numbers(self, now: float) -> dict[str, Any]:
        """Return the progress.

        Returns:
            `answers` of `total`; `tokens_per_second`; `eta`, seconds until the last answer, or None if it is unknown; `nodes`:
            for each `name`, `answers`, `tokens_per_second`, `in_flight`, and why it is `down` or left out, or an empty text.
        """
        while self._recent and self._recent[0][0] < now - _WINDOW:
            self._recent.popleft()
        span = max(0.1, min(_WINDOW, now - self._started))
        left = self._left() + sum(len(state.in_flight) for state in self._states)
        rate = len(self._recent) / span
        return {
            "answers": self._total - left,
            "total": self._total,
            "tokens_per_second": sum(count for _, count in self._recent) / span,
            "eta": left / rate if rate else None,
            "nodes": [self._describe(state, now) for state in self._states],
        }

    def progress(self, now: float) -> str:
        """Return one line: answers, tokens per second, remaining time, and the state of every node."""
        found = self.numbers(now)
        eta = "unknown" if found["eta"] is None else clock(found["eta"])
        nodes = ", ".join(map(_node_text, found["nodes"]))
        speed = thousands(found["tokens_per_second"])
        return f"answers {found['answers']}/{found['total']}  {speed} tokens/s  ETA {eta}  {nodes}"

    def _describe(self, state: _State[N, T], now: float) -> dict[str, Any]:
        why = printable(state.removed or state.error, 60)
        how = "left out" if state.removed else "down" if state.down else ""
        how = how or (f"waits up to {self._patience:.0f} s" if state.waits else "")
        return {
            "name": printable(state.node.name, 40),
            "answers": state.answers,
            "tokens_per_second": state.tokens / max(0.1, now - self._started),
            "in_flight": len(state.in_flight),
            "down": f"{how} ({why})" if how else "",
        }


def _node_text(node: Mapping[str, Any]) -> str:
    if node["down"]:
        return f"{node['name']} {node['down']}"
    speed = thousands(node["tokens_per_second"])
    return f"{node['name']} {node['answers']} ({speed} tokens/s, {node['in_flight']} in flight)"
