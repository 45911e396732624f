"""What the version before 0.3 planned, rendered and kept is planned, rendered and resumed in the same way.

`tests/golden` has the plans and rendered files of that version for twelve specs, and a run of two hosts that it stopped. A field of a
golden spec that no longer exists must be in the table of removed fields, or be recorded state.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from run_hosts import TOP
from tables import table

from trainer.__main__ import main
from trainer.config import FIELDS
from trainer.config.removed_fields import REMOVED_FIELDS

GOLDEN = TOP / "tests/golden"
PLANS = json.loads((GOLDEN / "plans.json").read_text())
STATE = {"automatic", "template_date"}  # recorded beside the spec, and no fields of it
DECIDED = {"precision", "torch_compile", "balance", "kernels"}  # by hosts, whose rules have changed
SCRIPTS = table("goldens")["scripts"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with the golden specs and data, whose inventory is that of a new project."""
    project = tmp_path / "project"
    trainyard("init", str(project), cwd=tmp_path)
    for name in ("specs", "data"):
        shutil.copytree(GOLDEN / name, project / name)
    monkeypatch.chdir(project)
    return project


def trainyard(*arguments: str, cwd: Path) -> str:
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    environment.pop("ANSIBLE_CONFIG", None)
    done = subprocess.run(
        ["trainyard", *arguments], cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANS)
def test_plans_of_before(name: str, folder: Path) -> None:
    golden = PLANS[name]
    made = json.loads(trainyard("plan", "--spec", f"specs/{name}.yml", "--json", cwd=folder))
    assert made["run"] == golden["run"]
    hosts = {part["host"]: (part["node_rank"], part["ranks"]) for part in made["plan"]}
    assert hosts == {host: (part["node_rank"], part["ranks"]) for host, part in golden["hosts"].items()}
    spec: dict[str, Any] = made["plan"][0]["spec"]
    gone = golden["spec"].keys() - FIELDS.keys()
    assert gone <= {*REMOVED_FIELDS, *STATE}, "a field that is gone has no line that says what replaces it"
    assert spec.keys() == FIELDS.keys()
    same = golden["spec"].keys() & spec.keys() - DECIDED - {"model", "dataset", "script"}
    assert {key: spec[key] for key in same} == {key: golden["spec"][key] for key in same}


@pytest.mark.slow
@pytest.mark.parametrize("file", SCRIPTS)
def test_rendered_files_of_before(file: str, folder: Path) -> None:
    kind, *flags = SCRIPTS[file].split()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        assert not main(["config", kind, "specs/lora.yml", *flags, "--output", file])
    assert Path(file).read_text() == (GOLDEN / "scripts" / file).read_text()


@pytest.mark.long
def test_a_run_of_before_is_shown_and_resumed(folder: Path) -> None:
    homes = {"node1": folder, "node2": folder / ".trainyard/node2"}
    trainyard("plan", "--spec", str(GOLDEN / "run/before.yml"), cwd=folder)  # makes the model
    for host, home in homes.items():
        target = home / "runs/before"
        shutil.copytree(GOLDEN / "run" / host, target)
        for path in target.rglob("*"):
            if path.suffix in {".yml", ".json", ""} and path.is_file() and "checkpoints" not in path.parts:
                text = path.read_text().replace("{TOP}/.trainyard/node2", str(homes["node2"]))
                path.write_text(text.replace("{TOP}", str(folder)))
    assert "121/200" in trainyard("status", "before", cwd=folder)
    shown = trainyard("train", "--spec", str(GOLDEN / "run/before.yml"), cwd=folder)
    assert "from the checkpoint of step 121" in shown and "step 200/200" in shown, shown
    result = json.loads((folder / "runs/before/result.json").read_text())
    assert result["steps"] == 200 and result["loss_first"] == pytest.approx(9.2414, abs=1e-3)
