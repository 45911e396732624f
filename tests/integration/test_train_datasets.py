"""train.yml with datasets of several formats on two hosts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from dataset_folder import write_cases
from lab_hosts import run_playbook
from run_hosts import local_inventory
from trainer_runs import records, write_jsonl

pytest.importorskip("datasets")


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.mark.long
def test_a_run_on_a_folder_a_table_and_a_weighted_file(tmp_path: Path) -> None:
    inventory = local_inventory(tmp_path)
    paths = write_cases(tmp_path / "cases")
    weighted = write_jsonl(tmp_path / "weighted.jsonl", records(40))
    listed = [
        {"path": str(weighted), "weight": 0.5},
        str(paths["parts"]),
        {"path": str(paths["qa.csv"]), "columns": {"prompt": "question", "completion": "answer"}},
        str(paths["chat.parquet"]),
        str(paths["card"]),
        str(paths["text.jsonl.gz"]),
    ]
    fields = {"dataset": listed, "seq_length": 64, "total_batch_size": 4, "eval_split": 0, "run": "mixed"}
    played = run_playbook("train.yml", inventory, fields | {"train_on": "all"})
    assert played.rc == 0, played.stdout
    head = tmp_path / "node1/runs/mixed"
    result = json.loads((head / "result.json").read_text())
    assert result["status"] == "finished" and result["world_size"] == 2
    assert result["samples"] == 20 + 3 + 1 + 2 + 2 + 2
    log = (head / "logs/rank0.log").read_text()
    assert "40 samples x 0.5, 67% of an epoch" in log
    assert f"dataset {paths['card']}: " in log, "as the user names it"
    again = run_playbook("train.yml", inventory, fields | {"train_on": "all"})
    assert again.rc == 0 and again.count("changed") == 0, again.stdout
