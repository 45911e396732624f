"""Which hosts receive copies of the checkpoint of a pipeline."""

from __future__ import annotations

from trainer.strategy.pipeline_copies import transfers

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
