"""Runs that learn from preferences: every strategy, resume, evaluation and metrics."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from trainer_runs import WORDS, Here, lines, write_jsonl

FEW = {"max_steps": 4, "method": "dpo", "packing": "auto"}


def pairs(count: int, seed: int = 1) -> list[dict[str, str]]:
    draw = random.Random(seed)

    def words(most: int) -> str:
        return " ".join(draw.choices(WORDS, k=draw.randint(1, most)))

    return [{"prompt": words(6) + " ", "chosen": words(9) + " yes", "rejected": words(12)} for _ in range(count)]


@pytest.fixture(scope="module")
def pair_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_jsonl(tmp_path_factory.mktemp("pairs") / "pairs.jsonl", pairs(40))


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields", [{}, {"lora_r": 0}, {"preference_precompute": True}], ids=["lora", "full", "precompute"]
)
def test_dpo_learns_to_prefer(here: Here, pair_file: Path, fields: dict[str, Any]) -> None:
    assert here(dataset=pair_file, method="dpo", epochs=3, eval_split=0.2, eval_interval=5, **fields) == 0, here.err
    metrics = [record["metrics"] for record in lines(here.run_dir() / "metrics.jsonl")]
    print(metrics[0], metrics[-1], here.result()["eval_loss"])
