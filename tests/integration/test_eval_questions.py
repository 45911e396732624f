"""`eval_questions`: the run and its base answer questions when the run has finished, on this machine as two hosts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import trainer_fixtures
import yaml
from lab_hosts import run_playbook
from run_hosts import TOP

model_folder = trainer_fixtures.model_folder
tokenizer = trainer_fixtures.tokenizer
RUN = "eval-questions"


@pytest.mark.slow
def test_a_finished_run_answers_questions(tmp_path: Path, model_folder: Path) -> None:
    document = yaml.safe_load((TOP / "inventory/local.yml").read_text())
    for group, name in (("head", "node1"), ("workers", "node2")):
        host = document["all"]["children"]["cluster"]["children"][group]["hosts"][name]
        host["cluster_data_dir"] = str(tmp_path / name)
    (tmp_path / "inventory.yml").write_text(yaml.safe_dump(document))
    rows = [{"prompt": f"What follows {n}?", "answer": f"number {n + 1}"} for n in range(6)]
    for name, lines in (("data", rows), ("questions", rows[:3])):
        renamed = [
            {"prompt": row["prompt"], "completion" if name == "data" else "answer": row["answer"]} for row in lines
        ]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in renamed))
    given = {"run": RUN, "model": str(model_folder), "dataset": str(tmp_path / "data.jsonl"), "seq_length": 32}
    given |= {"max_steps": 2, "epochs": 9, "total_batch_size": 2, "eval_split": 0}
    kept = TOP / f".trainyard/final-evaluations/{RUN}.json"
    try:
        missing = run_playbook("train.yml", tmp_path / "inventory.yml", given | {"eval_questions": "./none.jsonl"})
        assert missing.rc != 0 and "questions: no such file" in missing.stdout
        assert not list(tmp_path.glob("node1/runs/*"))

        given["eval_questions"] = str(tmp_path / "questions.jsonl")
        first = run_playbook("train.yml", tmp_path / "inventory.yml", given)
        assert first.rc == 0, first.stdout
        found = json.loads(kept.read_text())
        base, trained = found["scores"]["questions"]
        assert (base["subject"], trained["subject"], trained["questions"]) == ("base", RUN, 3)
        assert base["loss"] > trained["loss"] > 0
        table = "questions: 3 questions\n"
        assert table in first.stdout and f"base -> {RUN}: " in first.stdout

        # With addresses of two machines, each answers a part.
        document["all"]["children"]["cluster"]["children"]["workers"]["hosts"]["node2"]["cluster_address"] = "127.0.0.2"
        (tmp_path / "two.yml").write_text(yaml.safe_dump(document))
        asked = {"subjects": f"base,{RUN}", "questions": given["eval_questions"], "save": str(tmp_path / "parts.json")}
        both = run_playbook("playbooks/evaluate.yml", tmp_path / "two.yml", asked)
        assert both.rc == 0 and f"asking 3 questions of base, {RUN} on node1, node2" in both.stdout, both.stdout
        parts = json.loads((tmp_path / "parts.json").read_text())
        for one, other in zip(found["questions"], parts["questions"], strict=True):
            for subject in ("base", RUN):
                ours, theirs = one["answers"][subject], other["answers"][subject]
                assert theirs["text"] == ours["text"] and theirs["loss"] == pytest.approx(ours["loss"], abs=1e-5)

        again = run_playbook("train.yml", tmp_path / "inventory.yml", given)
        assert again.rc == 0 and "is finished: nothing to do" in again.stdout and table in again.stdout
        assert "asking" in first.stdout and "asking" not in again.stdout

        (tmp_path / "questions.jsonl").write_text(json.dumps(rows[4]) + "\n")
        other = run_playbook("train.yml", tmp_path / "inventory.yml", given)
        assert other.rc == 0 and "asking 1 question of" in other.stdout
        assert json.loads(kept.read_text())["scores"]["questions"][0]["questions"] == 1
    finally:
        kept.unlink(missing_ok=True)
