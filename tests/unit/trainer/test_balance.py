"""Division of the rows of a step over ranks: each row once, the shortest step time, and no change for noise."""

import copy
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.data.shares import share
from trainer.distributed.balance import Balance, divide

COSTS = st.lists(st.floats(0.01, 10), min_size=1, max_size=5)


@given(rows=st.integers(1, 200), costs=COSTS)
def test_every_row_is_assigned_once_and_no_rank_is_idle(rows: int, costs: list[float]) -> None:
    counts = divide(rows, costs)
    assert sum(counts) == rows
    assert rows < len(costs) or min(counts) >= 1
    assigned = [list(range(rows)[share(rows, counts, rank)]) for rank in range(len(costs))]
    assert [len(part) for part in assigned] == counts
    assert list(itertools.chain(*assigned)) == list(range(rows))


@given(rows=st.integers(3, 12), costs=st.lists(st.floats(0.1, 5), min_size=2, max_size=3))
def test_no_other_division_is_faster(rows: int, costs: list[float]) -> None:
    def time(counts: tuple[int, ...] | list[int]) -> float:
        return max(count * cost for count, cost in zip(counts, costs, strict=True))

    every = (c for c in itertools.product(range(1, rows + 1), repeat=len(costs)) if sum(c) == rows)
    assert time(divide(rows, costs)) <= min(map(time, every)) * (1 + 1e-9)


def test_a_rank_at_half_the_speed_has_half_the_rows() -> None:
    balance = Balance(2)
    assert balance.shares(24) == [12, 12]
    balance.update([1.0, 2.0], [12, 12])
    assert balance.shares(24) == [16, 8]
    # The counts changed, but the cost per row did not.
    balance.update([16 / 12, 16 / 12], [16, 8])
    assert balance.shares(24) == [16, 8]


def test_shares_ignore_noise_and_follow_a_slower_machine() -> None:
    balance = Balance(2)
    for seconds in ([1.0, 1.0], [1.03, 0.98], [0.97, 1.02]):
        balance.update(seconds, [8, 8])
        assert balance.shares(16) == [8, 8]
    counts = balance.shares(16)
    for _ in range(12):
        balance.update([counts[0] / 8, counts[1] / 4], counts)
        counts = balance.shares(16)
    assert counts in ([11, 5], [10, 6])


def test_a_division_that_saves_little_is_not_used() -> None:
    """With many rows, a small difference would move rows at every step."""
    balance = Balance(2)
    assert balance.shares(256) == [128, 128]
    balance.update([1.0, 1.05], [128, 128])
    assert divide(256, balance.costs) != [128, 128]
    assert balance.shares(256) == [128, 128]
    assert Balance(2, {"costs": [1.0, 1.2]}).shares(256) == divide(256, [1.0, 1.2])


@pytest.mark.parametrize("costs", [[1.0], [1.0, 2.0, 3.0]])
def test_costs_of_another_world_size_are_discarded(costs: list[float]) -> None:
    assert Balance(2, {"costs": costs, "used": {8: [8]}}).shares(8) == [4, 4]


def test_a_restart_uses_the_previous_costs() -> None:
    assert Balance(2, {"costs": [1.0, 3.0]}).shares(8) == [6, 2]


def test_a_resumed_run_distributes_rows_as_without_the_interruption() -> None:
    balance = Balance(2)
    balance.shares(256)
    balance.update([1.0, 1.05], [128, 128])
    assert divide(256, balance.costs) != balance.shares(256) == [128, 128], "a new start would move rows"
    resumed = Balance(2, copy.deepcopy(balance.state()))
    assert resumed.shares(256) == [128, 128]
    resumed.update([9.0, 1.0], [128, 128])  # the first step of a process: one host has imported more slowly
    assert resumed.shares(256) == [128, 128] and resumed.state() == balance.state()
    resumed.update([2.0, 1.0], [128, 128])
    assert resumed.shares(256) != [128, 128], "a host that has become slower is noticed"
