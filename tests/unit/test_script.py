"""A script in place of the trainer: errors that the controller reports, staged files, progress and result."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tables import table

import trainer
from trainer.common.errors import ScriptError, UserError
from trainer.loop.script import RESULT, ScriptSteps, check_script, environment, result
from trainer.spec import make_spec
from trainyard.queue.new_runs import NewRun
from trainyard.queue.request import QueueOptions
from trainyard.queue.requests import time_limit
from trainyard.run.launch_options import LaunchOptions
from trainyard.run.plan.isolation import outside_need
from trainyard.run.prepare.spec_files import PreparedRun, prepare


def script(folder: Path, text: str = "print('works')\n", name: str = "my worker.py") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def prepared(folder: Path, **fields: Any) -> PreparedRun:
    return prepare(make_spec(fields, "the test"), folder / "work", lambda line: None)


@pytest.mark.parametrize(("fields", "why"), table("script")["fields_that_only_the_trainer_knows_are_refused"])
def test_fields_that_only_the_trainer_knows_are_refused(fields: dict[str, Any], why: str) -> None:
    with pytest.raises(UserError, match=re.escape(why)):
        make_spec({"script": "worker.py", **fields}, "-e")


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda path: None, "cannot read {path}: No such file or directory: give a Python file of at most 1 MiB"),
        (lambda path: path.mkdir(), "cannot read {path}: Is a directory"),
        (os.mkfifo, "cannot read {path}: it is not a regular file"),
        (lambda path: path.write_text("#" * (1 << 20) + "\n"), "cannot read {path}: it is larger than 1024 KiB"),
        (lambda path: path.write_text("a = 1\nb = (\n"), "{path}:2: '(' was never closed: give a Python file"),
        (lambda path: path.write_bytes(b"a\0b"), "null bytes"),
    ],
)
def test_a_file_that_is_no_script_is_refused(make: Any, why: str, tmp_path: Path) -> None:
    path = tmp_path / "worker.py"
    make(path)
    with pytest.raises(UserError, match=re.escape(why.format(path=path))):
        check_script(str(path))


def test_the_script_is_staged_alone_unless_model_and_dataset_are_set(tmp_path: Path) -> None:
    run = prepared(tmp_path, script=str(script(tmp_path)))
    assert [file.kind for file in run.files] == ["script", "trainer"]
    assert run.run.startswith("my-worker-") and run.has_dataset
    assert outside_need(run.spec, run.has_dataset, {}) == ""
    file = run.files[0]
    assert file.dest == f"store/scripts/my-worker-{file.digest[:12]}.py"
    there = run.spec_on("/srv/trainyard")
    assert there.script == f"/srv/trainyard/{file.dest}" and there.model == "tiny"
    assert environment(there, Path("/srv/r")).keys().isdisjoint({"TRAINYARD_MODEL", "TRAINYARD_DATASET"})

    # Its dataset has any format, and is staged with the same names as that of the trainer.
    data = script(tmp_path, "1,2\n", "numbers.csv")
    more = prepared(tmp_path, script=str(script(tmp_path)), dataset=str(data))
    assert [file.kind for file in more.files] == ["dataset", "script", "trainer"] and more.has_dataset
    there = more.spec_on("/srv")
    assert environment(there, Path("/srv/r"))["TRAINYARD_DATASET"] == f"/srv/{more.files[0].dest}"


def test_the_name_of_a_run_depends_on_the_content_of_its_script(tmp_path: Path) -> None:
    path = script(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    first, same = prepared(tmp_path, script=str(path)).run, script(tmp_path / "elsewhere", name=path.name)
    assert prepared(tmp_path, script=str(same)).run == first
    path.write_text("print('changed')\n")
    assert prepared(tmp_path, script=str(path)).run != first


def test_a_queued_script_has_no_estimate(tmp_path: Path) -> None:
    spec = make_spec({"script": str(script(tmp_path)), "run": "s"}, "the test")
    no_queue: Any = None
    run = NewRun(QueueOptions(), spec, LaunchOptions())
    assert time_limit(run, prepare(spec, tmp_path / "work", lambda line: None), no_queue) == (
        0,
        "no time limit, because the plan cannot estimate a script: set time_limit=MINUTES",
    )


def test_progress_is_what_this_start_reports(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 7, "loss": 9.0}\n')
    progress = ScriptSteps(path, steps=0)
    assert not progress.read() and progress.latest == {}
    with path.open("a") as file:
        file.write('{"step": 8, "steps": 20, "loss": 5.0}\nno JSON\n[1]\n{"step": "9"}\n{"step": -1}\n{"loss": NaN}\n')
        file.write('{"step": 9, "loss": NaN, "eta": true}\n')
        file.write(f'{{"step": 9, "steps": -1, "loss": {"9" * 4000}}}\n{{"step": {2**53}}}\n{{"step": 10')
    assert progress.read() and progress.latest == {"step": 9, "steps": 20, "loss": 5.0}
    assert (progress.step, progress.steps, progress.first_loss) == (9, 20, 5.0)
    with path.open("a") as file:
        file.write(', "loss": 4.0}\n')
    assert progress.read() and progress.latest["step"] == 10 and progress.latest["loss"] == 4.0


def test_the_script_cannot_change_what_the_run_is_in_its_result(tmp_path: Path) -> None:
    spec = make_spec({"script": "worker.py", "run": "r"}, "the test")
    progress = ScriptSteps(tmp_path / "metrics.jsonl", steps=0)
    (tmp_path / RESULT).write_text(json.dumps({"status": "failed", "run": "other", "accuracy": 0.5, "step": 3}))
    made = result(spec, tmp_path, progress)
    assert made["status"] == "finished" and made["run"] == "r" and made["accuracy"] == 0.5 and made["step"] == 3
    for wrong in ("[1]", "no JSON", " " * (1 << 20) + "{}"):
        (tmp_path / RESULT).write_text(wrong)
        with pytest.raises(ScriptError, match="of the script is"):
            result(spec, tmp_path, progress)


@pytest.mark.parametrize(("text", "code", "status"), table("script")["how_a_script_ends"])
def test_how_a_script_ends(text: str, code: int, status: str, tmp_path: Path) -> None:
    path = script(tmp_path, text, "worker.py")
    words = [sys.executable, "-m", "trainer", f"--script={path}", "--run-name=r"]
    done = subprocess.run(
        words,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(Path(trainer.__file__).parents[1])},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    heartbeat = json.loads((tmp_path / "runs/r/state/rank0.json").read_text())
    assert (done.returncode, heartbeat["status"]) == (code, status), done.stderr
    assert not (tmp_path / "runs/r/result.json").exists()
    if code:
        assert done.stderr == "error: 'worker.py' ended with exit code 3\n"
        assert heartbeat["error"]["type"] == "ScriptError" and not heartbeat["error"]["plain"]
