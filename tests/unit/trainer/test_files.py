"""Atomic writes and digests of files."""

import json
import math
import os
from pathlib import Path

import pytest
from trainer_runs import names

from trainer.common.files import sha256_file, sha256_tree, to_json, write_atomic


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
    assert json.loads(text, parse_constant=pytest.fail) == {
        "loss": None,
        "parts": [{"eval": None}, [None, 1.5]],
        "step": 3,
        "name": "NaN",
        "none": None,
    }
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
