"""The plan's statement about packing without torch, from the architecture of the model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trainer.costs.packing_forecast import packing_text
from trainer.spec import make_spec


@pytest.mark.parametrize(
    ("kind", "packing", "text"),
    [
        ("llama", "auto", "packed (several samples share a row of 1024 tokens)"),
        ("falcon", "auto", "not packed: falcon mixes the samples of a packed row"),
        ("new\x1b[31m", "auto", "packed if new\\x1b[31m keeps the samples of a row apart, which the ranks test"),
        ("", "auto", "packed if this model keeps the samples of a row apart, which the ranks test"),
        ("falcon", "true", "packed (several samples share a row of 1024 tokens)"),
        ("llama", "false", "not packed: packing=false"),
    ],
)
def test_text_of_an_architecture(kind: str, packing: str, text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    assert packing_text(make_spec({"model": str(tmp_path), "packing": packing}, "")) == text


def test_models_without_a_config() -> None:
    assert packing_text(make_spec({}, "")) == "packed (several samples share a row of 256 tokens)"  # tiny
    unknown = packing_text(make_spec({"model": "/no/such/folder"}, ""))
    assert unknown == "packed if the model keeps the samples of a row apart, which the ranks test"
