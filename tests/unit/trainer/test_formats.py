"""Formats of numbers and tables."""

from collections.abc import Callable

import pytest
from hostile import HOSTILE_STRINGS, LINE_BREAKS, UNENCODABLE_STRINGS

from trainer.common.formats import clock, printable, quoted, table, thousands


def test_columns_are_as_wide_as_their_widest_cell() -> None:
    rows = [["host", "ranks"], ["a", "0,1"], ["gpu-box", "2"]]
    assert table(rows) == ["host     ranks", "a        0,1", "gpu-box  2"]
    assert table(rows, right=True) == ["   host  ranks", "      a    0,1", "gpu-box      2"]
    assert table([["host", "note"], ["a", ""]]) == ["host  note", "a"], "no trailing spaces"
    assert table([]) == []


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-3, "0:00"), (42.9, "0:42"), (60, "1:00"), (3599, "59:59"), (3723, "1:02:03"), (360000, "100:00:00")],
)
def test_clock(seconds: float, text: str) -> None:
    assert clock(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (999.4, "999"), (1000, "1.0k"), (12_340, "12.3k"), (3_400_000, "3.4M"), (5.6e9, "5.6G")],
)
def test_thousands(value: float, text: str) -> None:
    assert thousands(value) == text


@pytest.mark.parametrize("text", HOSTILE_STRINGS + UNENCODABLE_STRINGS, ids=lambda text: ascii(text)[:30])
@pytest.mark.parametrize("shown", [printable, quoted])
def test_untrusted_text_becomes_one_short_line_of_printable_text(shown: Callable[..., str], text: str) -> None:
    for limit in (10, 80, 200):
        line = shown(text, limit)
        assert len(line) <= limit
        assert line.isprintable()
        assert len(line.splitlines()) <= 1
        line.encode()


def test_controls_are_escaped_and_other_text_is_unchanged() -> None:
    assert printable("\x1b[31m a\r\nb \u2028 \u202e \u2066 \0") == r"\x1b[31m a\r\nb \u2028 \u202e \u2066 \x00"
    assert printable("größe 日本 C:\\x 'y'") == "größe 日本 C:\\x 'y'"
    assert quoted("größe\n") == r"'größe\n'"
    assert all(char not in printable(f"a{char}b") for char in LINE_BREAKS)


def test_long_text_is_cut_between_escapes() -> None:
    assert printable("a" * 11, 10) == "a" * 7 + "..."
    assert printable("a" * 10, 10) == "a" * 10
    assert printable("\x1b" * 11, 10) == r"\x1b..."
    assert quoted("a" * 100, 10) == "'aaaaaa..."


def test_any_object_can_be_shown() -> None:
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    assert (printable(7), quoted({"a": 1})) == ("7", "{'a': 1}")
    assert printable(10**5000) == quoted(10**5000) == "<int>"  # Python refuses to print it
    assert printable(deep) == quoted(deep) == "<list>"
