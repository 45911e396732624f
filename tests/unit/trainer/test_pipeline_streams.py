"""The exchange of a pipeline on NCCL, where all operations of a process group run one after the other.

Ranks that join with a device id have one communicator and one CUDA stream for each group, also for sends and receives. Such a stream
waits in its first operation until the other rank reaches the same one, and a wait of the program makes the compute stream wait. NCCL
needs a GPU for every rank, so this test records what every rank would put into its streams, and follows them to the end.
"""

import types
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from trainer.strategy import pipeline_schedule
from trainer.strategy.pipeline_schedule import Neighbours

HIDDEN = (1, 2, 3)  # shape of the hidden states


@dataclass
class Transfer:
    """One send or receive of a rank. `after`: operations of the compute stream that precede it."""

    peer: int
    sends: bool
    after: int
    done: bool = False


@dataclass
class Recorder:
    """What one rank puts into its streams. `compute`: None for a computation, or the transfer for which the stream waits."""

    compute: list[Transfer | None] = field(default_factory=list)
    groups: dict[int, deque[Transfer]] = field(default_factory=dict)

    def transfer(self, group: int, peer: int, *, sends: bool) -> Any:
        made = Transfer(peer, sends, len(self.compute) if sends else 0)
        self.groups.setdefault(group, deque()).append(made)
        return types.SimpleNamespace(wait=lambda: self.compute.append(made))


def record(rank: int, ranks: int, micro: int, monkeypatch: pytest.MonkeyPatch, directions: int = 2) -> Recorder:
    """Return the streams of a rank in a step. `directions`: process groups of the pipeline."""
    found = Recorder()
    monkeypatch.setattr(pipeline_schedule.dist, "get_backend", lambda group: "nccl")
    monkeypatch.setattr(
        pipeline_schedule.dist, "isend", lambda value, group, group_dst: found.transfer(group, group_dst, sends=True)
    )
    monkeypatch.setattr(
        pipeline_schedule.dist, "irecv", lambda value, group, group_src: found.transfer(group, group_src, sends=False)
    )
    made = iter(range(directions))
    last = directions - 1
    pipelines: Any = types.SimpleNamespace(
        stages=types.SimpleNamespace(rank=rank, size=ranks, device=torch.device("cpu")),
        own=lambda timeout: types.SimpleNamespace(group=next(made, last)),
    )

    def computed(*_: Any) -> torch.Tensor:
        found.compute.append(None)
        return torch.zeros(HIDDEN)

    Neighbours(pipelines, torch.float32, torch.float32, 1.0).run([HIDDEN] * micro, computed, computed)
    return found


def completes(ranks: list[Recorder]) -> bool:
    """Return whether all streams reach their ends."""
    places = [0] * len(ranks)
    moved = True
    while moved:
        moved = False
        for rank, own in enumerate(ranks):
            while places[rank] < len(own.compute) and ((wait := own.compute[places[rank]]) is None or wait.done):
                places[rank] += 1
                moved = True
            for group, stream in own.groups.items():
                if not stream or not stream[0].sends or stream[0].after > places[rank]:
                    continue
                other = ranks[stream[0].peer].groups.get(group)
                if other and not other[0].sends and other[0].peer == rank:
                    stream.popleft().done = other.popleft().done = True
                    moved = True
    return all(place == len(own.compute) for place, own in zip(places, ranks, strict=True))


@pytest.mark.parametrize("ranks", [2, 3, 4, 6])
@pytest.mark.parametrize("micro", [1, 2, 3, 5, 8, 16])
def test_no_rank_waits_for_ever(ranks: int, micro: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert completes([record(rank, ranks, micro, monkeypatch) for rank in range(ranks)])


def test_one_group_for_both_directions_would_block(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not completes([record(rank, 3, 8, monkeypatch, directions=1) for rank in range(3)])
