"""Which hosts receive copies of the checkpoint of a pipeline."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from trainer.distributed import COPY_STAGES
from trainer.distributed.world import World
from trainer.strategy import pipeline_copies
from trainer.strategy.pipeline_copies import StageCopies, stage_file, transfers

LARGE = 10**9


def test_every_host_sends_its_files_to_the_next_one() -> None:
    """Every second host sends first; with an odd number of hosts, the last one sends to the first among these."""
    assert transfers([0, 1], [True] * 2, [5, 5], [LARGE] * 2) == [(0, 1), (1, 0)]
    assert transfers([0, 1, 2], [True] * 3, [5] * 3, [LARGE] * 3) == [(0, 1), (2, 0), (1, 2)]
    assert transfers([0, 2, 4, 5], [True] * 4, [5] * 4, [LARGE] * 4) == [(0, 1), (2, 3), (1, 2), (3, 0)]


def test_the_first_rank_of_a_host_receives_the_files_of_all_ranks_of_another() -> None:
    leaders = [True, False, True, False]
    assert transfers([0, 0, 1, 1], leaders, [5] * 4, [LARGE] * 4) == [(0, 2), (1, 2), (2, 0), (3, 0)]


def test_a_host_receives_nothing_that_fills_half_of_its_free_space() -> None:
    assert transfers([0, 1], [True] * 2, [60, 60], [120, 119]) == [(1, 0)]
    assert transfers([0, 0, 1], [True, False, True], [60, 60, 60], [LARGE, LARGE, 200]) == [(2, 0)]


def test_a_file_that_could_not_be_written_is_not_sent() -> None:
    assert transfers([0, 1], [True] * 2, [0, 60], [LARGE] * 2) == [(1, 0)]
    assert transfers([0, 0], [True, False], [5, 5], [LARGE] * 2) == []


# Two ranks as processes -------------------------------------------------------------------------------------------------


def rank(number: int, folder: Path, case: str) -> None:
    """Write a file, copy it as one of two hosts, and finish."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=number, world_size=2)
    world = World(number, 2, 0, number, torch.device("cpu"))
    os.environ[COPY_STAGES] = "1" if case != "off" else "0"
    pipeline_copies._CHUNK, pipeline_copies._PATIENCE = 1000, 0.2 if case == "slow" else 60.0
    send = dist.send
    if case == "slow":
        dist.send = lambda *args, **options: (time.sleep(0.05), send(*args, **options))
    here = folder / f"host{number}"
    here.mkdir()
    copies = StageCopies(world)
    for step in ("first", "second"):
        (here / step).mkdir()
        (here / step / stage_file(number)).write_bytes(bytes([number]) * 50_500)
        if case == "full" and number == 1:
            (here / step / stage_file(0)).with_suffix(".part").mkdir()  # no file can be written
        copies.start(here / step, 50_500)
        copies.finish()
        assert copies.done()
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "copied"),
    [("plain", [True, True]), ("off", [False, False]), ("slow", [False, False]), ("full", [True, False])],
)
def test_copies_are_complete_or_absent(case: str, copied: list[bool], tmp_path: Path) -> None:
    """`copied`: whether a host has the file of the other one."""
    torch.multiprocessing.spawn(rank, (tmp_path, case), nprocs=2)
    for number in (0, 1):
        for step in ("first", "second"):
            folder = tmp_path / f"host{number}" / step
            found = {path.name for path in folder.iterdir() if path.is_file()}
            assert found == {stage_file(number), *([stage_file(1 - number)] if copied[number] else [])}
            for name in found:
                assert (folder / name).read_bytes() == bytes([int(name[6:11])]) * 50_500
