"""Locales without UTF-8: names and texts beyond ASCII work, or one line says what to set."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from trainer.supervise.environment import clean_environment

TOP = Path(__file__).resolve().parents[2]
C = {"LC_ALL": "C"}
NO_UTF8 = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
REMEDY = "names of files are ascii, not UTF-8: set PYTHONUTF8=1, or LC_ALL=C.UTF-8\n"
# What `json_records` reads from a file whose name and text are not ASCII, printed as ASCII.
_READ = """
import sys
from pathlib import Path
from trainer.common.utf8 import require_utf8
from trainer.data.json_files import json_records
require_utf8()
print([record for _, record in json_records(Path(sys.argv[1]))])
"""


def run(words: list[str | Path], environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    cleared = {name: value for name, value in os.environ.items() if not name.startswith(("LC_", "LANG", "PYTHONUTF8"))}
    return subprocess.run(
        [sys.executable, *words],
        env={**cleared, **environment},
        cwd=TOP,
        capture_output=True,
        encoding="utf-8",
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("environment", [C, {"LC_ALL": "POSIX"}, {"LC_ALL": "C", "PYTHONIOENCODING": "ascii"}])
def test_names_and_texts_beyond_ascii_are_read(tmp_path: Path, environment: dict[str, str]) -> None:
    path = tmp_path / "dätä 😀.jsonl"
    path.write_text('{"text": "Grüße 😀"}\n', encoding="utf-8")
    done = run(["-c", _READ, path], environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout in ("[{'text': 'Grüße 😀'}]\n", "[{'text': 'Gr\\xfc\\xdfe \\U0001f600'}]\n")


@pytest.mark.parametrize("module", ["trainer", "trainyard.cli"])
def test_without_utf8_one_line_says_what_to_set(module: str) -> None:
    done = run(["-m", module, "plan", "--dataset", "dätä.jsonl"], NO_UTF8)
    assert (done.returncode, done.stderr) == (2, f"error: locale: {REMEDY}")


def test_the_command_line_sets_the_locale_that_ansible_needs() -> None:
    program = "import os; from trainyard.cli.__main__ import main; main(['completion', 'none']); import ansible.cli; print(os.environ['LC_ALL'])"
    assert run(["-c", program], C).stdout.endswith("C.UTF-8\n")


def test_ranks_use_utf8_in_every_locale() -> None:
    assert clean_environment()["PYTHONUTF8"] == "1"
