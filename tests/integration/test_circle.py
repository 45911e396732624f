"""`make circle`: train, deploy, distill, merge, deploy and ask, with a real Ollama where it is on PATH."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from trainer.common.errors import UserError
from trainyard.deploy import converter

TOP = Path(__file__).resolve().parents[2]
OLLAMA = shutil.which("ollama")


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
@pytest.mark.skipif(OLLAMA is None, reason="needs `ollama` on PATH")
def test_the_circle(tmp_path: Path) -> None:
    try:
        converter.converter_folder()
    except UserError as error:
        pytest.skip(str(error))
    before = set((TOP / ".trainyard").glob("circle-*"))
    done = circle()
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr
    for run in ("student-a", "student-b", "merged"):
        (change,) = re.findall(rf"^  {run} +[\d.]+ +[\d.]+ +-(\d+)%$", done.stdout, re.MULTILINE)
        assert int(change) >= 40
    graph = done.stdout.split("--graph\n")[1]
    assert re.search(r"@ollama_model_merged_latest:\n.*node1", graph)
    asked = done.stdout.split("$ ollama run merged ")[1].splitlines()
    # ollama run samples with its default temperature, so that a name may differ; the proof of deploy.yml is greedy.
    assert re.fullmatch(r"The frog of \w+ is green\.", asked[1].strip())
    assert set((TOP / ".trainyard").glob("circle-*")) == before, "its folder is removed"
