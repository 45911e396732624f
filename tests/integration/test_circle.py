"""`make circle`: teach, train, merge, deploy, ask and evaluate, with real servers of every version that is here."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import real_ollama

from trainer.common.errors import UserError
from trainyard.run.prepare.smollm2 import smollm2_folder

TOP = Path(__file__).resolve().parents[2]


def circle(**environment: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, str(TOP / "tools/circle.py")]
    known = os.environ | {"PYTHONPATH": str(TOP), "HF_HUB_OFFLINE": "1"}
    return subprocess.run(words, env=known | environment, capture_output=True, text=True, cwd=TOP)


def test_without_ollama_one_line_says_so(tmp_path: Path) -> None:
    done = circle(PATH=str(tmp_path))
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr == "circle: needs `ollama` on PATH: install it from https://ollama.com/download\n"


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("program", [real_ollama.PROGRAM, *real_ollama.OTHERS])
def test_the_circle(program: str | None) -> None:
    """The script itself checks the scores of all models."""
    if program is None:
        pytest.skip("needs `ollama` on PATH")
    try:
        smollm2_folder(TOP / ".trainyard", print)
    except UserError as error:
        pytest.skip(str(error))
    before = set((TOP / ".trainyard").glob("circle-*"))
    done = circle(PATH=f"{Path(program).parent}:{os.environ['PATH']}")
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr
    deployed = re.findall(r"^node1: deployed (mine\S*) \(.*\): \d+ of 20 answers as trained", done.stdout, re.MULTILINE)
    assert deployed, done.stdout[-5000:]
    tables = done.stdout.split("tone: 10 questions\n")[1]
    for subject in ("base", "student-1", "student-2", "merged", *(f"ollama:{name}" for name in deployed)):
        assert len(re.findall(rf"^  {subject} +\d+ \(", tables, re.MULTILINE)) == 2, (
            "of the tone and of general knowledge"
        )
    assert set((TOP / ".trainyard").glob("circle-*")) == before, "its folder is removed"
