"""The lock of unsloth, from the real package index: gigabytes, so it is a nightly test."""

from __future__ import annotations

import os
import subprocess
import venv
from pathlib import Path

import pytest

TOP = Path(__file__).resolve().parents[2]
LOCK = TOP / "constraints-unsloth.txt"
PIP = ("-m", "pip", "install", "--quiet", "--no-deps", "--only-binary=:all:")


@pytest.mark.slow
@pytest.mark.long
def test_the_lock_is_installed_and_imported_as_far_as_a_cpu_allows(tmp_path: Path) -> None:
    """unsloth itself refuses a machine without an accelerator when it is imported: that is all that is missing."""
    venv.create(tmp_path / "env", with_pip=True)
    python = tmp_path / "env/bin/python"
    subprocess.run([python, *PIP, "--require-hashes", "-r", LOCK], check=True)
    checked = subprocess.run([python, "-m", "pip", "check"], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    others = "import torch, transformers, peft, trl, bitsandbytes, triton, unsloth_zoo.version"
    for code, raises in (
        (others.rpartition(",")[0], ""),
        ("import unsloth", "NotImplementedError: Unsloth cannot find any torch"),
    ):
        done = subprocess.run([python, "-c", code], env=environment, capture_output=True, text=True, check=False)
        assert (raises in done.stderr) if raises else done.returncode == 0, done.stderr[-2000:]
