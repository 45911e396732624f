"""A process replaces the environment that /proc shows of it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import json, os, subprocess, sys
from trainer.supervise.process_environment import replace_environment
values = json.loads(sys.argv[1])
try:
    replace_environment(values, "MARK")
    error = ""
except OSError as problem:
    error = str(problem)
shown = dict(e.split("=", 1) for e in open("/proc/self/environ").read().split(chr(0)) if e)
if (child := os.fork()) == 0:
    shown = dict(e.split("=", 1) for e in open("/proc/self/environ").read().split(chr(0)) if e)
    os._exit(shown.get("MARK") != values["MARK"])
forked = os.waitpid(child, 0)[1] == 0
run = subprocess.run([sys.executable, "-c", "import os, json; print(json.dumps(dict(os.environ)))"], capture_output=True)
print(json.dumps({"error": error, "shown": shown, "here": dict(os.environ), "program": json.loads(run.stdout), "forked": forked}))
"""


def replaced(values: dict[str, str], **before: str) -> dict[str, dict[str, str]]:
    """Return what a process has and shows after it has replaced the environment `before`."""
    command = [sys.executable, "-c", PROGRAM, json.dumps(values)]
    top = Path(__file__).resolve().parents[3]
    done = subprocess.run(command, env={"PYTHONPATH": str(top), **before}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_proc_shows_the_new_environment() -> None:
    values = {"MARK": "second é", "OTHER": "x=1", "LC_CTYPE": "C.UTF-8", "HOME": "/new"}
    found = replaced(values, MARK="first", PADDING="x" * 200, HOME="/old")
    assert found["here"] == found["shown"] == values and not found["error"] and found["forked"]
    assert found["program"] == values


def test_what_does_not_fit_is_not_shown_but_set() -> None:
    values = {"LONG": "y" * 500, "SHORT": "z", "MARK": "second", "LC_CTYPE": "C.UTF-8"}
    found = replaced(values, MARK="first", PADDING="x" * 100)
    assert found["here"] == values and found["program"] == values and found["forked"]
    assert found["shown"] == {name: values[name] for name in values if name != "LONG"}


def test_without_room_for_the_mark_nothing_changes() -> None:
    found = replaced({"MARK": "y" * 5000}, MARK="first")
    assert "has no room for MARK" in found["error"]
    assert found["here"]["MARK"] == found["shown"]["MARK"] == "first"
