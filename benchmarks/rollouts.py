"""Completions per second of servers with unlike speeds, relative to the sum of their rates.

    make bench NAME=rollouts [ARGS='--speeds 1 0.5 0.2 --staleness 1 --steps 8']

The servers are objects of this process that sleep for as long as a completion takes, so the figure is that of what hands out prompts,
follows versions, and keeps completions. The ranks train `--train` seconds in each step, in which servers write for the next ones.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
import time
from pathlib import Path

from trainer.generation.journal import Journal
from trainer.generation.ollama_client import Answer, Cancel
from trainer.generation.rollout_servers import Adapter, Base, RolloutRequest, RolloutServer, Sampling
from trainer.generation.rollouts import Rollouts


class Sleeping(RolloutServer):
    """A server that writes one completion at a time, and takes `load_seconds` for an adapter."""

    def __init__(self, name: str, seconds: float, load_seconds: float, version: list[int]) -> None:
        super().__init__(name, Sampling("m-v", 1.0, 8, 64, 60.0), lambda: Adapter(version[0], Path(), Path(), ""))
        self.seconds, self._load_seconds, self._slot = seconds, load_seconds, threading.Lock()

    def prepare(self, base: Base, prompt: RolloutRequest) -> None:
        """Do nothing."""

    def ask(self, prompt: RolloutRequest, cancel: Cancel) -> Answer:
        """Sleep, in the only slot of the server."""
        began = time.monotonic()
        with self._slot:
            queued = time.monotonic() - began
            prompt.version, _ = self.current()
            time.sleep(self.seconds)
        prompt.ids = [1]
        return Answer("x", "", "stop", 1, queued, time.monotonic() - began)

    def probe(self) -> None:
        """Do nothing."""

    def load(self, adapter: Adapter) -> None:
        """Sleep."""
        time.sleep(self._load_seconds)

    def unload(self, version: int) -> None:
        """Do nothing."""


def rate(a: argparse.Namespace, speeds: list[float], folder: Path) -> float:
    """Return the completions per second of servers with these speeds in all steps but the first."""
    counts: dict[int, int] = {}
    lock, version, done = threading.Lock(), [0], 0

    def claim(step: int, count: int) -> int:
        with lock:
            counts[step] = counts.get(step, 0) + count
            return counts[step]

    servers = [Sleeping(f"server{n}", a.seconds / speed, a.load, version) for n, speed in enumerate(speeds)]
    journal = Journal(folder / f"{'-'.join(map(str, speeds))}.jsonl", lambda each: True, 0)
    hub = Rollouts(
        servers,
        journal,
        claim=claim,
        tokens_of=lambda request, answer: [1],
        text_of=str,
        seed_of=lambda *key: 0,
        ranks=False,
        patience=60.0,
    )
    began = 0.0
    for step in range(a.steps):
        version[0] = step
        for ahead in range(step, min(a.steps, step + a.staleness + 1)):
            hub.open(ahead, [[1]] * a.completions)
        while hub.wait(step, 60):
            pass
        hub.close_step(step)
        if step:
            done += a.completions
        else:
            began = time.perf_counter()
        time.sleep(a.train)
    seconds = time.perf_counter() - began - a.train  # nobody waits for the last step's training
    hub.close()
    return done / seconds


def main() -> int:
    """Print one row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--speeds", type=float, nargs="+", default=[1.0, 0.5, 0.2])
    parser.add_argument("--seconds", type=float, default=0.1, help="of a completion at speed 1")
    parser.add_argument("--completions", type=int, default=64, help="of a step")
    parser.add_argument("--train", type=float, default=1.0, help="seconds in which ranks train in each step")
    parser.add_argument("--load", type=float, default=0.1, help="seconds for a server to load an adapter")
    parser.add_argument("--staleness", type=int, default=1)
    parser.add_argument("--steps", type=int, default=8)
    a = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        together = rate(a, a.speeds, Path(folder))
    print("| speeds | staleness | sum of rates | together | share of the sum |")
    print("| --- | --- | --- | --- | --- |")
    total, shown = sum(a.speeds) / a.seconds, " ".join(map(str, a.speeds))
    print(f"| {shown} | {a.staleness} | {total:.1f}/s | {together:.1f}/s | {together / total:.2f} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
