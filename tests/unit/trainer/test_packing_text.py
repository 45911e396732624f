"""The plan's statement about packing without torch, from the architecture of the model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tables import table

from trainer.config import RunSpec
from trainer.costs.packing_forecast import packing_text, step_lines, steps_about
from trainer.data.data_report import DataReport
from trainer.spec import make_spec


@pytest.mark.parametrize(("kind", "packing", "text"), table("packing_text")["text_of_an_architecture"])
def test_text_of_an_architecture(kind: str, packing: str, text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    assert packing_text(make_spec({"model": str(tmp_path), "packing": packing}, "")) == text


def test_models_without_a_config() -> None:
    assert packing_text(make_spec({}, "")) == "packed (several samples share a row of 256 tokens)"  # tiny
    unknown = packing_text(make_spec({"model": "/no/such/folder"}, ""))
    assert unknown == "packed if the model keeps the samples of a row apart, which the ranks test"


def test_the_plan_says_how_many_steps_there_are() -> None:
    """57 short samples in 9 packed rows: 20 epochs are 6 steps. A number that was asked for has no warning."""

    def spec(**fields: object) -> RunSpec:
        return make_spec({"model": "/no/such/folder", **fields}, "")

    few = step_lines(spec(epochs=20), 57, 9)
    assert few[0] == "steps: 6 of 32 rows (190 samples a step); epochs: 20 of 57 samples" and "WARNING: 6 opt" in few[1]
    [line, note] = step_lines(spec(epochs=3, max_steps=100, total_batch_size=5), 10, 10)
    assert line == "steps: 100 of 5 rows (5 samples a step); epochs: 50 of 10 samples"
    assert note == "note: max_steps=100 decides, and repeats the data: epochs=3 has no effect"
    assert len(step_lines(spec(epochs=99), 57, 9)) == 1
    data = DataReport(100, kept_tokens=64_000, dropped={"empty": 20})
    [about] = steps_about(spec(packing=False, eval_split=0.5, total_batch_size=2), data)
    assert about == "steps: about 20 of 2 rows (2 samples a step); epochs: 1 of 40 samples"
