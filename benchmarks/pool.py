"""Answers per second of a teacher pool, relative to the summed rates of its nodes and to a static split.

    make bench NAME=pool [ARGS='--prompts 240 --speeds 1 0.2 --seconds 0.05 --rounds 3']

The nodes are HTTP servers on this machine that follow Ollama's API with simulated service times: one answer at a time, `seconds` long at
speed 1. So the figure is that of the pool, not of the machine. The rate of a node is measured alone, with its queue always full.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from fake_teacher import Teacher, serve
from run_hosts import free_port

from trainer.generation.ollama_client import Cancel, OllamaClient
from trainer.generation.ollama_models import ModelFacts
from trainer.generation.pool import Listed, ServerPool
from trainyard.ollama.teacher_nodes import OllamaNode, Prompt

TOKENS = 100  # of a real answer
OPTIONS = {"temperature": 1.0, "num_predict": TOKENS, "num_thread": 1, "seed": 1}


def prompts(count: int, first: int = 0) -> list[Prompt]:
    """Return prompts that differ."""
    numbers = range(first, first + count)
    return [Prompt([{"role": "user", "content": f"What follows {n}?"}], OPTIONS, n) for n in numbers]


def seconds_of(nodes: list[OllamaNode], work: list[Prompt]) -> float:
    """Return the seconds in which a pool of these nodes answers."""
    start = time.perf_counter()
    ServerPool(nodes, lambda new: None).run(Listed(work))
    return time.perf_counter() - start


def rate_of(node: OllamaNode, count: int, flight: int = 4) -> float:
    """Return the answers per second of a node whose queue is never empty."""
    start = time.perf_counter()
    with ThreadPoolExecutor(flight) as executor:
        list(executor.map(lambda prompt: node.ask(prompt, Cancel()), prompts(count)))
    return count / (time.perf_counter() - start)


@contextlib.contextmanager
def simulated(speeds: Sequence[float], seconds: float) -> Iterator[list[OllamaNode]]:
    """Yield nodes with simulated service times."""
    teachers = [Teacher("127.0.0.1", free_port(), seconds=seconds / speed) for speed in speeds]
    with serve(*teachers):
        yield [
            OllamaNode(f"node{n}", OllamaClient(t.url), t.model, ModelFacts(t.digest))
            for n, t in enumerate(teachers, 1)
        ]


def main() -> int:
    """Print one row per round."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=240)
    parser.add_argument("--speeds", type=float, nargs="+", default=[1.0, 0.2])
    parser.add_argument("--seconds", type=float, default=0.05, help="of an answer at speed 1")
    parser.add_argument("--rounds", type=int, default=3)
    a = parser.parse_args()
    print("| speeds | prompts | sum of rates | pool | share of the sum | static split | pool relative to it |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    shares, gains = [], []
    with simulated(a.speeds, a.seconds) as nodes:
        counts = [max(8, int(a.prompts * speed / max(a.speeds) / 4)) for speed in a.speeds]
        part = a.prompts // len(nodes)
        for _ in range(a.rounds):
            rate = sum(map(rate_of, nodes, counts))
            pool = seconds_of(nodes, prompts(a.prompts))
            with ThreadPoolExecutor(len(nodes)) as executor:
                static = max(executor.map(lambda node: seconds_of([node], prompts(part)), nodes))
            shares.append(a.prompts / pool / rate)
            gains.append(static / pool)
            print(
                f"| {' '.join(map(str, a.speeds))} | {a.prompts} | {rate:.1f}/s | {a.prompts / pool:.1f}/s | {shares[-1]:.2f} | "
                f"{part * len(nodes) / static:.1f}/s | {gains[-1]:.2f} x |",
                flush=True,
            )
    print(
        f"\nmedians: {statistics.median(shares):.2f} of the summed rates, {statistics.median(gains):.2f} x a static split"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
