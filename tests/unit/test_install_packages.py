"""The output of `make setup` while pip works."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

TOP = Path(__file__).parents[2]


@pytest.fixture
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("install_packages", TOP / "tools/install_packages.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_lines_of_pip_become_progress(tool: ModuleType) -> None:
    progress = tool.Progress()
    assert progress.now == "resolving versions"
    shown = []
    for line in (
        "Collecting torch==2.13.0 (from trainyard==0.2.0)\n",
        "  Downloading torch-2.13.0%2Bcpu-cp311-cp311-manylinux_2_28_x86_64.whl (190.1 MB)\n",
        "Requirement already satisfied: wheel in ./.venv/lib (0.45.1)\n",
        "Processing /opt/wheels/peft-0.21.0-py3-none-any.whl\n",
        "Installing collected packages: numpy, torch, peft\n",
    ):
        progress.read(line)
        shown.append(progress.now)
    assert shown[1] == "downloading torch (190.1 MB), package 1"
    assert shown[3:] == ["reading peft, package 2", "installing 3 packages"]


def test_an_error_of_pip_is_shown_and_ends_the_setup(tmp_path: Path) -> None:
    command = [sys.executable, "tools/install_packages.py", "--no-index", "--target", str(tmp_path), "./missing"]
    done = subprocess.run(
        command, cwd=TOP, env={"PATH": "/usr/bin:/bin", "PYTHONPATH": "."}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1 and "missing" in done.stderr, done.stderr
