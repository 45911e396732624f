"""The driver of the GPU checks as a process, on this machine's CPU: the small checks, from the inputs to the files."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TOP = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.long]


def test_small_checks_on_the_cpu(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(TOP), "OUT": str(tmp_path / "out")}
    command = [sys.executable, "-m", "benchmarks.gpu", "--device", "cpu", "--checks", "nccl", "packing", "unsloth"]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "out" / "results.json").read_text())
    assert {check["name"]: check["status"] for check in found["checks"]} == {
        "nccl": "passed",
        "packing": "passed",
        "unsloth": "skipped",
    }
    errors = {name: plan["error"] for name, plan in found["planned"].items() if "error" in plan}
    assert not errors  # every case is a valid run spec, and has a plan
    assert found["planned"]["lora"]["tokens_per_second"] > 0
    (failed,) = [name for name, run in found["runs"].items() if run["status"] != "ok"]
    assert failed == "unsloth"
    assert "NCCL needs CUDA: gloo replaces it" in (tmp_path / "out" / "results.md").read_text()
    assert "==== prepare" in (tmp_path / "out" / "logs.txt").read_text()
