"""Locales without UTF-8: names and texts beyond ASCII work, or one line says what to set."""

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tables import table

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


def test_a_home_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    done = run(["-m", "trainyard.cli", "init", tmp_path / "new"], {"HOME": "/proc", "ANSIBLE_HOME": "/proc/none"})
    said = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    assert said.startswith("error: Ansible does not start: ") and said.endswith(
        ": set HOME to a folder that you can write"
    )


def test_the_command_line_sets_the_locale_that_ansible_needs() -> None:
    program = "import os; from trainyard.cli.__main__ import main; main(['completion', 'none']); import ansible.cli; print(os.environ['LC_ALL'])"
    assert run(["-c", program], C).stdout.endswith("C.UTF-8\n")


def test_ranks_use_utf8_in_every_locale() -> None:
    assert clean_environment()["PYTHONUTF8"] == "1"


# Text files are UTF-8 ------------------------------------------------------------------------------------------------

# Methods and functions that open a text file, with the place of the mode; None: always text.
OPENERS = {"open": 0, "fdopen": 1, "NamedTemporaryFile": 0, "TemporaryFile": 0, "read_text": None, "write_text": None}


def text_calls(tree: ast.AST) -> Iterator[ast.Call]:
    """Yield the calls that open a text file without an encoding."""
    for call in ast.walk(tree):
        if not isinstance(call, ast.Call):
            continue
        function = call.func
        name = getattr(function, "attr", getattr(function, "id", ""))
        owner = getattr(getattr(function, "value", None), "id", "")
        given = {keyword.arg: keyword.value for keyword in call.keywords}
        if name not in OPENERS or (owner == "os" and name == "open") or owner == "tarfile" or "encoding" in given:
            continue
        place = OPENERS[name]
        if isinstance(function, ast.Name) and name == "open":
            place = 1
        mode = given.get("mode") or (call.args[place] if place is not None and len(call.args) > place else None)
        if mode is None and name in ("NamedTemporaryFile", "TemporaryFile"):
            continue  # binary
        # A mode that is no constant is the argument of another function with this name.
        if mode is None or (isinstance(mode, ast.Constant) and "b" not in str(mode.value)):
            yield call


def test_every_text_file_has_an_encoding() -> None:
    found = [
        f"{path.relative_to(TOP)}:{call.lineno}: {ast.unparse(call)}"
        for folder in ("trainer", "trainyard", "plugins", "tools")
        for path in sorted((TOP / folder).rglob("*.py"))
        for call in text_calls(ast.parse(path.read_bytes()))
    ]
    assert not found, 'add encoding="utf-8"'


def test_the_search_finds_what_it_looks_for() -> None:
    bad = table("text_files")["bad"]
    good = ["open(p, 'rb')", "p.open('rb')", "os.open(p, 0)", "p.read_text(encoding='utf-8')", "NamedTemporaryFile()"]
    assert all(list(text_calls(ast.parse(text))) for text in bad)
    assert not any(list(text_calls(ast.parse(text))) for text in good)
