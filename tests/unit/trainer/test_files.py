"""Atomic writes and digests of files."""

import json
import math
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hostile import HOSTILE_STRINGS, LINE_BREAKS, UNENCODABLE_STRINGS
from tables import table
from trainer_runs import names

from trainer.common import formats
from trainer.common.files import sha256_file, sha256_tree, to_json, write_atomic
from trainer.common.formats import clock, printable, quoted, thousands


def test_text_and_bytes_and_mode(tmp_path: Path) -> None:
    write_atomic(tmp_path / "a", "ä")
    write_atomic(tmp_path / "b", b"\0", mode=0o600)
    assert (tmp_path / "a").read_bytes() == "ä".encode()
    assert [(tmp_path / name).stat().st_mode & 0o777 for name in "ab"] == [0o644, 0o600]
    write_atomic(tmp_path / "a", "new")
    assert (tmp_path / "a").read_text() == "new"
    assert names(tmp_path) == ["a", "b"]


def test_the_old_file_remains_if_the_new_one_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_atomic(tmp_path / "a", "old")

    def refuse(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(OSError, match="No space left"):
        write_atomic(tmp_path / "a", "new")
    assert (tmp_path / "a").read_text() == "old"
    assert names(tmp_path) == ["a"]


def test_json_has_null_for_numbers_that_are_not_finite() -> None:
    value = {"loss": math.nan, "parts": [{"eval": math.inf}, (-math.inf, 1.5)], "step": 3, "name": "NaN", "none": None}
    text = to_json(value)
    assert json.loads(text, parse_constant=pytest.fail) == table("files")["json_has_null"]
    assert to_json({"a": [1, 2.5]}, indent=1) == json.dumps({"a": [1, 2.5]}, indent=1)


def test_digests(tmp_path: Path) -> None:
    (tmp_path / "x" / "y").mkdir(parents=True)
    (tmp_path / "x" / "a").write_bytes(b"abc")
    (tmp_path / "x" / "y" / "b").write_bytes(b"")
    assert sha256_file(tmp_path / "x" / "a").startswith("ba7816bf8f01cfea")
    assert sha256_tree(tmp_path / "x" / "a") == sha256_file(tmp_path / "x" / "a")
    before = sha256_tree(tmp_path / "x")
    assert before == sha256_tree(tmp_path / "x")
    (tmp_path / "x" / "y" / "b").rename(tmp_path / "x" / "y" / "c")
    assert sha256_tree(tmp_path / "x") != before, "file names are part of the digest"


# Formats of numbers and tables ---------------------------------------------------------------------------------------


def test_columns_are_as_wide_as_their_widest_cell() -> None:
    rows = [["host", "ranks"], ["a", "0,1"], ["gpu-box", "2"]]
    assert formats.table(rows) == ["host     ranks", "a        0,1", "gpu-box  2"]
    assert formats.table(rows, right=True) == ["   host  ranks", "      a    0,1", "gpu-box      2"]
    assert formats.table([["host", "note"], ["a", ""]]) == ["host  note", "a"], "no trailing spaces"
    assert formats.table([]) == []


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
