"""A lack of memory is one line that says where and what to do, in every program."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from trainer import __main__ as trainer_program
from trainer.supervise import __main__ as supervisor_program
from trainer.supervise.run_files import set_umask
from trainyard.ansible_adapter import ClusterAction
from trainyard.cli import __main__ as trainyard_program

TOP = Path(__file__).parents[2]


def lack(*args: Any, **more: Any) -> Any:
    raise MemoryError("malloc of size 9 failed")


def test_of_the_trainer(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    monkeypatch.setitem(trainer_program.COMMANDS, "check", lack)
    assert trainer_program.main(["check"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: not enough memory on this machine") and "malloc of size 9 failed" in line
    monkeypatch.setattr(trainer_program, "run_rank", lack)
    assert trainer_program.main(["train", "--fake-data", f"--run-dir={tmp_path}/runs/r"]) == 1
    assert capsys.readouterr().err.startswith("error: not enough memory on this machine")


def test_of_a_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(trainyard_program, "_dispatch", lack)
    assert trainyard_program.main(["plan"]) == 1
    assert "error: not enough memory on this machine" in capsys.readouterr().err


def test_of_an_action() -> None:
    class Action(ClusterAction):
        def run(self, tmp: Any = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
            return lack()

    result = object.__new__(Action).run()
    assert result["failed"] and result["plain"] and result["msg"].startswith("not enough memory on this machine")


def test_of_the_supervisor(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(supervisor_program, "carry_out", lack)
    monkeypatch.setattr(supervisor_program, "set_umask", lambda: None)
    monkeypatch.setattr(sys, "argv", ["supervise", "status"])
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"{}")))
    assert supervisor_program.main() == 1
    assert json.loads(capsys.readouterr().out) == {"error": "not enough memory: end other programs on this host"}


@pytest.mark.parametrize(
    ("before", "after"), [(0, 0o022), (0o002, 0o022), (0o022, 0o022), (0o077, 0o077), (0o777, 0o077)]
)
def test_the_umask_of_programs_on_a_host(before: int, after: int) -> None:
    """Others write to no file of a run, its owner can, and a login's stricter umask holds."""
    own = os.umask(before)
    try:
        set_umask()
        assert os.umask(0o022) == after
    finally:
        os.umask(own)


@pytest.mark.parametrize("module", ["trainer.supervise", "trainyard.remote"])
def test_programs_on_a_host_set_the_umask(module: str) -> None:
    script = (
        "import os, sys; os.umask(0)\n"
        f"sys.argv = ['x', 'nothing']; m = __import__('{module}.__main__', fromlist=['main'])\n"
        "os._exit = sys.exit\n"
        "try: m.main()\n"
        "except SystemExit: pass\n"
        "print(oct(os.umask(0)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], input="{}\n", capture_output=True, text=True, cwd=TOP, check=True
    )
    assert done.stdout.splitlines()[-1] == "0o22"
