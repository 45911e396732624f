"""The loggers wandb, trackio and MLflow, each with its package from PyPI, in a run and after its restart."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from run_hosts import TOP
from trainer_runs import lines, records, write_jsonl

pytestmark = [pytest.mark.slow, pytest.mark.long]
# What a restarted rank does: it opens the loggers again, and records a later step.
RESTART = """
import sys
from pathlib import Path
from trainer.records.loggers import open_loggers
from trainer.spec import read_spec
folder = Path(sys.argv[1])
opened = open_loggers(read_spec(folder / "spec.yml", {}, "the test"), folder, True, None)
for logger in opened:
    logger.log({"loss": 0.5}, 100)
    logger.close()
print("opened", len(opened))
"""


def test_every_logger_has_the_steps_and_continues_after_a_restart(tmp_path: Path) -> None:
    packages = tmp_path / "packages"
    install = [Path(sys.executable).with_name("uv"), "pip", "install", "-q", "--python", sys.executable]
    subprocess.run([*install, "--target", packages, "mlflow-skinny", "trackio", "wandb"], check=True)
    known = os.environ | {"PYTHONPATH": f"{TOP}:{packages}", "WANDB_MODE": "offline", "HF_HUB_OFFLINE": "1"}
    environment = {name: value for name, value in known.items() if name != "MLFLOW_TRACKING_URI"}
    run = tmp_path / "mine"
    words = [
        "--run-dir",
        run,
        "--run",
        "mine",
        "--model",
        "tiny",
        "--dataset",
        write_jsonl(tmp_path / "d.jsonl", records(60)),
    ]
    words += ["--max-steps", "3", "--epochs", "20", "--loggers", "wandb,trackio,mlflow", "--wandb-project", "yard"]
    subprocess.run(
        [sys.executable, "-m", "trainer", "train", *words], env=environment, check=True, stdout=subprocess.PIPE
    )
    again = subprocess.run(
        [sys.executable, "-c", RESTART, run], env=environment, check=True, stdout=subprocess.PIPE, text=True
    )
    assert "opened 3" in again.stdout.splitlines()

    expected = {record["step"]: record["loss"] for record in lines(run / "metrics.jsonl")} | {100: 0.5}
    assert set(expected) == {1, 2, 3, 100}
    (losses,) = (run / "mlflow").glob("*/*/metrics/loss")  # of one run
    found = [line.split() for line in losses.read_text().splitlines()]
    assert {int(step): float(loss) for _, loss, step in found} == expected
    (database,) = (run / "trackio").glob("yard*.db")
    with sqlite3.connect(database) as connection:
        rows = connection.execute("select run_name, step, metrics from metrics").fetchall()
    values = {step: json.loads(text)["loss"] for _, step, text in rows if "loss" in json.loads(text)}
    assert values == pytest.approx(expected) and {name for name, _, _ in rows} == {"mine"}
    assert len(list((run / "wandb").glob("offline-run-*-mine"))) == 2, "both parts have the id of the run"
