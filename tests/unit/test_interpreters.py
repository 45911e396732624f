"""Interpreters for tests: what a user cannot read does not end the collection of the tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from interpreters import interpreter, of_pyenv


def test_a_folder_of_interpreters_that_cannot_be_read_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    assert of_pyenv("3.10") == []
    folder = tmp_path / "versions/3.10.1/bin"
    folder.mkdir(parents=True)
    (folder / "python3").write_text("not a program")
    assert of_pyenv("3.10") == [str(folder / "python3")]
    monkeypatch.setenv("PATH", "")
    assert interpreter("3.10") == ""

    def refuse(*arguments: object, **options: object) -> None:
        raise PermissionError(13, "Permission denied", str(tmp_path))

    monkeypatch.setattr(os, "stat", refuse)
    monkeypatch.setattr(os, "scandir", refuse)
    assert of_pyenv("3.10") == []
