"""The servers of a run that learns from rewards, as its first rank uses them: prompts go out, and completions come back.

A server takes the next prompt when it is free, as in a teacher pool. The prompts of up to `max_staleness` steps after the newest adapter
are open, so that servers write while the ranks train, and no completion is older than that. Ranks claim prompts from the same counters.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trainer.common.errors import UserError
from trainer.common.formats import counted, printable
from trainer.generation.journal import Completion, Journal
from trainer.generation.ollama_client import Answer, OllamaError
from trainer.generation.pool import ServerPool
from trainer.generation.rollout_servers import RolloutRequest, RolloutServer

_CLOSING = 20.0  # s for the end of requests: a server may hang while it takes an adapter
_TRIES = 20  # texts without tokens that servers write for one prompt before a run without other workers fails


@dataclass
class OpenStep:
    """A step whose completions are written.

    Attributes:
        places: those that had no completion when the step was opened, in the order in which they are claimed.
        asked: the places that servers have now, with the time of the request.
        tries: how often servers have written a place whose text has no tokens.
    """

    prompts: Sequence[Sequence[int]]  # the tokens of the prompt of every place
    places: Sequence[int]
    written: dict[int, Completion]  # the completions by place
    asked: dict[int, float] = field(default_factory=dict)
    returned: list[int] = field(default_factory=list)  # the places that a server has given back
    tries: dict[int, int] = field(default_factory=dict)


class Rollouts:
    """Hands out prompts to servers and keeps their completions. It is the Source of a pool, whose thread calls `take`.

    Args:
        servers: ready ones; see RolloutServer.prepare.
        claim: adds a number to the counter of a step that all ranks share, and returns the sum; thread-safe.
        tokens_of: returns the tokens of the completion of a request; None if its text is not one that tokens give.
        text_of: returns the text of a prompt's tokens.
        seed_of: returns the seed of the random numbers for a step, a place and a try.
        ranks: whether ranks write, too: they get what servers give back.
        patience: seconds without any live server after which these are given up.
        log: receives lines for people.
    """

    def __init__(
        self,
        servers: Sequence[RolloutServer],
        journal: Journal,
        *,
        claim: Callable[[int, int], int],
        tokens_of: Callable[[RolloutRequest, Answer], list[int] | None],
        text_of: Callable[[Sequence[int]], str],
        seed_of: Callable[[int, int, int], int],
        ranks: bool,
        patience: float,
        prefix: str = "",
        log: Callable[[str], None] = print,
    ) -> None:
        self._servers, self._journal, self._claim = servers, journal, claim
        self._tokens_of, self._text_of, self._seed_of, self._log = tokens_of, text_of, seed_of, log
        self._steps: dict[int, OpenStep] = {}
        self._changed = threading.Condition()
        self.error, self._ranks, self._prefix = "", ranks, prefix
        self.undecodable = 0  # completions whose text is not one that the tokens of the run give
        self._pool: ServerPool[RolloutServer, RolloutRequest] = ServerPool(
            servers, self._deliver, patience=patience, give_up=self._give_up, watch=self._watch
        )
        self._down: set[int] = set()  # places of servers of which the log says that they do not write
        self._thread = threading.Thread(target=self._run, name="rollouts", daemon=True)
        self._thread.start()

    def _watch(self, numbers: Mapping[str, Any]) -> None:
        """Log which servers have failed since the last call, and which are back. `numbers`: see `ServerPool.numbers`."""
        for place, node in enumerate(numbers["nodes"]):
            name, why = node["name"], node["down"]
            if bool(why) != (place in self._down):
                self._log(f"rollouts: {name} {f'does not write: {why}' if why else 'writes again'}")
            (self._down.add if why else self._down.discard)(place)

    def _run(self) -> None:
        if not self._servers:
            self._fail("no server is ready")
            return
        try:
            self._pool.run(self)
        except Exception as error:
            self._fail(str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}")
            self._log(f"rollouts: no server writes any more: {printable(self.error, 400)}")

    # The source of the pool -----------------------------------------------------------------------------------------------

    def take(self) -> RolloutRequest | None:
        """Return the next prompt that no rank and no server has claimed; None if there is none."""
        with self._changed:
            for number, step in sorted(self._steps.items()):
                if (place := self._next(number, step)) is not None:
                    step.asked[place] = time.monotonic()
                    tokens = step.prompts[place]
                    seed = self._seed_of(number, place, step.tries.get(place, 0))
                    return RolloutRequest(number, place, tokens, self._text_of(tokens), seed)
        return None

    def left(self) -> int:
        """Return how many prompts nobody has claimed."""
        with self._changed:
            return sum(self._left(number, step) for number, step in self._steps.items())

    def ended(self) -> bool:
        """Return whether there will be no more prompts: a run opens steps until `close` stops the pool."""
        return False

    def _left(self, number: int, step: OpenStep) -> int:
        return max(0, len(step.places) - self._claim(number, 0)) + (0 if self._ranks else len(step.returned))

    def _next(self, number: int, step: OpenStep) -> int | None:
        if step.returned and not self._ranks:
            return step.returned.pop(0)
        if not self._left(number, step):
            return None
        index = self._claim(number, 1) - 1
        return step.places[index] if index < len(step.places) else None

    # Completions ----------------------------------------------------------------------------------------------------------

    def _deliver(self, new: list[tuple[RolloutRequest, RolloutServer, Answer]]) -> None:
        arrived = []
        for request, server, answer in new:
            ids = self._tokens_of(request, answer)
            if ids is None:
                self.undecodable += 1
                if str(self.undecodable).rstrip("0") == "1":  # 1, 10, 100 ...
                    self._log(
                        f"rollouts: {counted(self.undecodable, 'text')} of servers so far for which the run has no tokens, the last one of {server.name}"
                    )
                tries = self._return(request)
                if tries >= _TRIES and not self._ranks:
                    self._fail(
                        f"{server.name} has written {tries} texts for a prompt, but no tokens of the run give them"
                    )
                self._pool.wake()
            else:
                arrived.append(Completion(request.step, request.place, request.version, server.name, ids))
        self.add(arrived)

    def add(self, completions: Iterable[Completion]) -> None:
        """Keep completions of servers or ranks; the first one of a place counts. Raises OSError."""
        with self._changed:
            new = []
            for each in completions:
                step = self._steps.get(each.step)
                if step is None:
                    continue  # the ranks have written it meanwhile
                step.asked.pop(each.place, None)
                if each.place in step.returned:
                    step.returned.remove(each.place)
                if each.place not in step.written:
                    step.written[each.place] = each
                    new.append(each)
            self._journal.add(new)
            self._changed.notify_all()

    def _give_up(self, request: RolloutRequest, why: str) -> None:
        self._log(f"rollouts: a completion of step {request.step + 1} was not written: {printable(why, 200)}")
        self._return(request)
        if not self._ranks:
            self._fail(f"a completion of step {request.step + 1} was not written: {why}")

    def _return(self, request: RolloutRequest) -> int:
        """Give back what a server has not written; return how often that was."""
        tries = 0
        with self._changed:
            if step := self._steps.get(request.step):
                step.asked.pop(request.place, None)
                if request.place not in step.written:
                    step.returned.append(request.place)
                    tries = step.tries[request.place] = step.tries.get(request.place, 0) + 1
            self._changed.notify_all()
        return tries

    def _fail(self, why: str) -> None:
        """Give back what servers have: the ranks write it, or the run fails with this reason."""
        with self._changed:
            self.error = self.error or why
            for step in self._steps.values():
                step.returned += step.asked
                step.asked.clear()
            self._changed.notify_all()

    # The ranks -----------------------------------------------------------------------------------------------------------

    def open(self, number: int, prompts: Sequence[Sequence[int]]) -> Sequence[int]:
        """Let servers write the completions of a step (from 0); return the places that are claimed from its counter, in order."""
        with self._changed:
            if number not in self._steps:
                known = {each.place: each for each in self._journal.found if each.step == number}
                places = [place for place in range(len(prompts)) if place not in known]
                self._steps[number] = OpenStep(prompts, places, known)
            places = list(self._steps[number].places)
        self._pool.wake()
        return places

    def wait(self, number: int, limit: float) -> list[int]:
        """Wait up to `limit` seconds for the servers; return the places of a step that they owe, or have given back.

        The latter alone, if there are any; else those of requests, the oldest one first.
        """
        end = time.monotonic() + limit
        with self._changed:
            step = self._steps[number]
            while (
                (step.asked or (not self._ranks and self._left(number, step)))
                and not (self.error or (self._ranks and step.returned))
                and (left := end - time.monotonic()) > 0
            ):
                self._changed.wait(left)
            if self._ranks:
                return list(step.returned) or sorted(step.asked, key=lambda place: step.asked[place])
            return [place for place in step.places if place not in step.written]

    def written(self, number: int) -> list[Completion]:
        """Return the completions of a step, in any order."""
        with self._changed:
            return list(self._steps[number].written.values())

    def close_step(self, number: int) -> None:
        """End a step. What servers still write for it is dropped."""
        with self._changed:
            self._steps.pop(number)

    def forget(self, version: int) -> None:
        """Let the completions of adapters from `version` on be written again: they are those of an earlier start that went another way."""
        with self._changed:
            self._journal.found = [each for each in self._journal.found if each.version < version]
            for step in self._steps.values():
                lost = [place for place, each in step.written.items() if each.version >= version]
                step.places = [*step.places, *lost]
                for place in lost:
                    del step.written[place]

    def leave_out(self, name: str, why: str) -> None:
        """Send no more prompts to a server."""
        self._pool.leave_out(name, why)
        self._down |= {place for place, server in enumerate(self._servers) if server.name == name}
        self._log(f"rollouts: {name} is left out: {why}")

    def prune(self, oldest: int) -> None:
        """Forget what no resume needs: completions of the steps before `oldest`."""
        with self._changed:
            self._journal.prune(oldest)

    def close(self) -> None:
        """End the requests, and remove from the servers what they got."""
        self._pool.stop()
        self._thread.join(_CLOSING)
        for server in self._servers:
            try:
                server.close()
            except OllamaError as error:
                self._log(f"rollouts: {server.name}: cannot remove the models of this run, {self._prefix}*: {error}")
