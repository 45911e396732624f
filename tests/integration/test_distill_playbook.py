"""distill.yml and merge.yml as users run them, on this machine as two hosts with a teacher each."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trainer_fixtures
from fake_teacher import Teacher, serve
from lab_hosts import Played, run_playbook
from run_hosts import TOP, free_port, local_inventory
from tables import table

from trainyard.ollama.answers import answers_path

FIELDS = table("distill_playbook")["fields"]
model_folder = trainer_fixtures.model_folder
tokenizer = trainer_fixtures.tokenizer
MODEL = f"test{os.getpid()}"


@pytest.fixture(scope="module")
def bed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with an inventory, prompts; one of two teachers answers at a time."""
    folder = tmp_path_factory.mktemp("distill")
    teachers = [
        Teacher(f"127.0.0.{n + 2}", free_port(), log=str(folder / f"asked{n}"), model=f"{MODEL}:latest")
        for n in range(2)
    ]
    local_inventory(folder, **{f"node{n}": {"ollama_url": one.url} for n, one in enumerate(teachers, 1)})
    prompts = [{"prompt": f"What follows {n}?"} for n in range(120)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    with serve(*teachers):
        yield folder
    remove_answers(MODEL)


def remove_answers(teacher: str) -> None:
    answers = answers_path(TOP / ".trainyard", teacher)
    for file in (answers, *(TOP / ".trainyard/distill").glob(f"{answers.stem}-*.jsonl")):
        file.unlink(missing_ok=True)


def play(bed: Path, playbook: str, **variables: Any) -> Played:
    return run_playbook(f"playbooks/{playbook}.yml", bed / "inventory.yml", variables)


def answered(bed: Path) -> int:
    return sum(len((bed / f"asked{n}").read_text().splitlines()) for n in range(2))


@pytest.mark.slow
@pytest.mark.long
def test_the_circle_of_students(bed: Path, model_folder: Path) -> None:
    """Two students of one model train at once on two hosts, each on its half of the answers, are merged, and vote; a
    second call sends no prompts and trains nothing."""
    given = {"teacher": MODEL, "prompts": str(bed / "prompts.jsonl"), "model": str(model_folder)}
    given |= {"students": "2", "student_data": "shard"}
    first = play(bed, "distill", **given, **FIELDS)
    assert first.rc == 0, first.stdout
    assert answered(bed) == 120
    assert "120 answers to train on" in first.stdout
    rows = [line.split() for line in first.stdout.splitlines() if re.search(r"-\d+ %", line) and "adapter" in line]
    rows = [row for row in rows if row[2].isdecimal()]
    assert [row[2:7] for row in rows] == [
        ["1", "shard:1/2:", "57", "samples", "node1"],
        ["2", "shard:2/2:", "57", "samples", "node2"],
    ], first.stdout
    losses = {row[6]: (float(row[7]), float(row[8])) for row in rows}
    runs = [row[1] for row in rows]
    for untrained, trained in losses.values():
        assert trained < 0.6 * untrained

    second = play(bed, "distill", **given, **FIELDS)
    assert second.rc == 0, second.stdout
    assert answered(bed) == 120
    assert "120 of 120 answers are already in" in second.stdout
    assert second.stdout.count("is finished: nothing to do") == 2

    merged = play(bed, "merge", runs=",".join(runs), run="both")
    assert merged.rc == 0, merged.stdout
    result = json.loads((bed / "node1/runs/both/result.json").read_text())
    # Different students, and the same held-out answers.
    evaluated = [part["eval_loss"] for part in result["parts"]]
    assert evaluated == pytest.approx([losses["node1"][1], losses["node2"][1]], rel=1e-2)
    assert evaluated[0] != evaluated[1] and result["base_loss"] == pytest.approx(losses["node1"][0], rel=1e-2)
    assert result["eval_loss"] < 0.7 * result["base_loss"] and "WARNING" not in merged.stdout, result
    assert "merged 2 runs by cat" in merged.stdout and "adapter of rank 32" in merged.stdout

    # The students, their base, the merged run and the servers side by side, on both hosts at once.
    rows = [{"prompt": f"What follows {n}?", "answer": f"number {n}" if n % 2 else "nothing"} for n in range(6)]
    (bed / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    subjects = ["base", *runs, "both", f"ollama:{MODEL}"]
    asked = {"subjects": ",".join(subjects), "questions": str(bed / "questions.jsonl")}
    scored = play(bed, "evaluate", **asked, save=str(bed / "scores.json"))
    assert scored.rc == 0, scored.stdout
    scores = {row["subject"]: row for row in json.loads((bed / "scores.json").read_text())["scores"]["questions"]}
    assert list(scores) == subjects and all(f"\n  {name} " in scored.stdout for name in subjects)
    assert len({scores[name]["loss"] for name in ("base", *runs, "both")}) == 4
    assert scores[subjects[-1]]["loss"] is None and scores[subjects[-1]]["questions"] == 6
    assert play(bed, "evaluate", subjects="base,none").rc != 0

    (bed / "few.jsonl").write_text('{"prompt": "What follows 5?"}\n')
    voted = play(bed, "merge", runs=",".join(runs), run="jury", method="vote", prompts=str(bed / "few.jsonl"))
    assert voted.rc == 0, voted.stdout
    assert re.search(r"1 prompts answered by 2 runs, [01] unanimously", voted.stdout)


@pytest.mark.slow
def test_mistakes_before_a_host_is_contacted(bed: Path) -> None:
    prompts = str(bed / "prompts.jsonl")
    for playbook, given, message in (
        ("distill", {"teacher": MODEL, "prompts": prompts, "model": "/nowhere/x"}, "model: no such folder: /nowhere/x"),
        ("merge", {"runs": "a,b"}, "no host has a run a"),
    ):
        played = play(bed, playbook, **given)
        errors = [line for line in played.stdout.splitlines() if "error: " in line]
        assert played.rc and len(errors) == 1 and message in errors[0], played.stdout
