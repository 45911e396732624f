"""The plan's statement about packing without torch, from the architecture of the model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tables import table

from trainer.costs.packing_forecast import packing_text
from trainer.spec import make_spec


@pytest.mark.parametrize(("kind", "packing", "text"), table("packing_text")["text_of_an_architecture"])
def test_text_of_an_architecture(kind: str, packing: str, text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    assert packing_text(make_spec({"model": str(tmp_path), "packing": packing}, "")) == text


def test_models_without_a_config() -> None:
    assert packing_text(make_spec({}, "")) == "packed (several samples share a row of 256 tokens)"  # tiny
    unknown = packing_text(make_spec({"model": "/no/such/folder"}, ""))
    assert unknown == "packed if the model keeps the samples of a row apart, which the ranks test"
