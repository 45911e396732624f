"""What has wheels for aarch64, from the metadata of the package index: a nightly test, because it needs a network."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu.wheels import PYTHONS, SOURCE
from trainyard.python_env import resolve

TOP = Path(__file__).resolve().parents[2]
UV = Path(sys.executable).with_name("uv")
ENVIRONMENT = os.environ | {"UV_DEFAULT_INDEX": os.environ.get("PIP_INDEX_URL", "https://pypi.org/simple")}
pytestmark = [pytest.mark.slow, pytest.mark.long]


def uv(machine: str, python: str, command: str, *words: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a command of uv pip for another machine; no wheel is downloaded."""
    argv = [UV, "pip", command, "--no-config", f"--python-version={python}", "--only-binary=:all:"]
    argv += [f"--python-platform={machine}-manylinux_2_28", *words]
    return subprocess.run(argv, capture_output=True, text=True, check=False, env=ENVIRONMENT)


def compiled(folder: Path, machine: str, python: str, extras: list[str]) -> subprocess.CompletedProcess[str]:
    wanted = folder / "requirements.in"
    wanted.write_text("\n".join(resolve.requirements(TOP / "pyproject.toml", extras, torch=True)))
    return uv(machine, python, "compile", f"--no-binary={SOURCE}", "--constraints", TOP / "constraints.txt", wanted)


@pytest.mark.parametrize("python", PYTHONS)
def test_the_pins_of_a_node_have_wheels_for_aarch64(tmp_path: Path, python: str) -> None:
    done = compiled(tmp_path, "aarch64", python, ["nvml", "gpu", "deepspeed", "wandb"])
    assert done.returncode == 0 and "bitsandbytes==" in done.stdout and "torch==" in done.stdout, done.stderr
