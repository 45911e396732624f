"""Runs whose teacher is another process, as on a host of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from teacher_process import teacher_process
from test_distillation_runs import teacher
from trainer_runs import Here

__all__ = ["teacher"]

FEW = {"max_steps": 6, "eval_split": 0.1}


def fields_of(here: Here, teacher: Path, **more: Any) -> dict[str, Any]:
    common = {"model": here.model, "teacher": teacher, "teacher_host": "node3", "seq_length": 64, "batch_size": 2}
    return common | {"distill_alpha": 0.6, "checkpoint_interval": 2, **FEW} | more


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> Any:
    def use(values: dict[str, str]) -> None:
        for name, value in values.items():
            monkeypatch.setenv(name, value)

    return use


@pytest.mark.slow
def test_the_losses_equal_those_of_a_local_teacher(here: Here, teacher: Path, tmp_path: Path, environment: Any) -> None:
    for run, more in (("text", {}), ("written", {"gkd_lambda": 0.6, "distill_alpha": 1, "packing": False})):
        fields = {name: str(value) for name, value in fields_of(here, teacher, **more).items()}
        local = fields | {"teacher_host": "", "teacher_top_k": "20"}
        assert here(f"{run}-local", **local) == 0, here.err
        with teacher_process(tmp_path / run, fields) as process:
            environment(process.environment)
            assert here(f"{run}-remote", **fields) == 0, here.err
            assert process.process.wait(30) == 0, process.log
            assert process.state["status"] == "finished"
        assert here.losses(f"{run}-remote") == pytest.approx(here.losses(f"{run}-local"), abs=1e-5)
        assert here.result(f"{run}-remote")["eval_loss"] == pytest.approx(
            here.result(f"{run}-local")["eval_loss"], abs=1e-5
        )
