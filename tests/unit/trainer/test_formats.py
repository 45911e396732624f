"""Formats of numbers and tables."""

import pytest

from trainer.formats import clock, mib, table, thousands


def test_columns_are_as_wide_as_their_widest_cell() -> None:
    rows = [["host", "ranks"], ["a", "0,1"], ["gpu-box", "2"]]
    assert table(rows) == ["host     ranks", "a        0,1", "gpu-box  2"]
    assert table(rows, right=True) == ["   host  ranks", "      a    0,1", "gpu-box      2"]


def test_lines_have_no_trailing_spaces() -> None:
    assert table([["host", "note"], ["a", ""]]) == ["host  note", "a"]


def test_a_table_without_rows_has_no_lines() -> None:
    assert table([]) == []


def test_rows_of_different_lengths_are_an_error() -> None:
    with pytest.raises(ValueError):
        table([["host", "rank"], ["a"]])


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-3, "0:00"),
        (0, "0:00"),
        (42.9, "0:42"),
        (60, "1:00"),
        (3599, "59:59"),
        (3723, "1:02:03"),
        (360000, "100:00:00"),
    ],
)
def test_clock(seconds: float, text: str) -> None:
    assert clock(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (999.4, "999"), (1000, "1.0k"), (12_340, "12.3k"), (3_400_000, "3.4M"), (5.6e9, "5.6G")],
)
def test_thousands(value: float, text: str) -> None:
    assert thousands(value) == text


def test_mib() -> None:
    assert [mib(0), mib(2**20), mib(1.6 * 2**20), mib(1234 * 2**20)] == ["0", "1", "2", "1,234"]
