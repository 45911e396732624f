"""The code of docs/your-code.md, and the programs of examples/distributed, on this machine as two hosts with a teacher."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_teacher import Teacher, serve
from run_hosts import TOP, free_port, local_inventory
from tables import table

from trainyard import Cluster
from trainyard.ollama.answers import answers_path

TEACHER = f"api{os.getpid()}"
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def bed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with an inventory and prompts; a teacher answers."""
    folder = tmp_path_factory.mktemp("api")
    teacher = Teacher("127.0.0.2", free_port(), model=f"{TEACHER}:latest")
    local_inventory(folder, node1={"ollama_url": teacher.url}, node2={"ollama_url": teacher.url})
    prompts = [{"prompt": f"What follows {n}?"} for n in range(40)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    questions = [{"prompt": f"What follows {n}?", "answer": f"number {n + 1}"} for n in range(3)]
    (folder / "questions.jsonl").write_text("".join(json.dumps(question) + "\n" for question in questions))
    (folder / "teacher").write_text(teacher.url.removeprefix("http://"))
    with serve(teacher):
        yield folder
    answers = answers_path(TOP / ".trainyard", TEACHER)
    for file in (answers, *(TOP / ".trainyard/distill").glob(f"{answers.stem}-*.jsonl")):
        file.unlink(missing_ok=True)


@pytest.mark.long
def test_the_code_of_the_page(bed: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """All blocks are one program. Only the inventory, the teacher's name and the prompts are those of the test."""
    page = (TOP / "docs/your-code.md").read_text().partition("\n## Python interface\n")[2]
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    program = "\n".join(blocks).replace("llama3:8b", TEACHER)
    assert len(blocks) == 8 and TEACHER in program
    monkeypatch.setattr(Cluster, "local", lambda: Cluster(bed / "inventory.yml"))
    monkeypatch.chdir(bed)
    names: dict[str, object] = {}
    exec(compile(program, "docs/your-code.md", "exec"), names)
    shown = capsys.readouterr().out
    assert "node1 ('node1', 'node2') ('127.0.0.1',)" in shown and "False 1 machine in 2 entries" in shown
    assert "step 10/10" in shown and "finished" in shown
    assert "student-1 19 " in shown and "student-2 19 " in shown, shown
    assert re.search(r"^base \d 3 .*\nstudent-1 \d 3 .*\nboth \d 3 .*\n\[\('student-1', ", shown, re.MULTILINE), shown
    assert "[('node1', [0]), ('node2', [1])]" in shown
    assert shown.splitlines()[-1].startswith("queue host node1: Slurm is not installed")


EXAMPLES = table("api_examples")


@pytest.mark.parametrize(
    "program", [pytest.param(name, marks=[pytest.mark.long] * row.get("long", 0)) for name, row in EXAMPLES.items()]
)
def test_examples(bed: Path, program: str) -> None:
    options, shown = EXAMPLES[program]["options"], EXAMPLES[program]["shown"]
    given = {"bed": str(bed), "teacher": (bed / "teacher").read_text(), "name": TEACHER}
    words = [sys.executable, str(TOP / f"examples/distributed/{program}.py"), *options.format(**given).split()]
    environment = {**os.environ, "PYTHONPATH": str(TOP)}
    ended = subprocess.run(words, env=environment, capture_output=True, text=True, cwd=bed)
    assert ended.returncode == 0, ended.stderr
    assert re.search(shown.replace("{name}", TEACHER), ended.stdout), ended.stdout + ended.stderr
