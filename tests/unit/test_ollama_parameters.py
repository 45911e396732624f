"""Variables of the role ollama: a value that would leave its folder or its line is refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from tables import table

RULES = yaml.safe_load((Path(__file__).parents[2] / "roles/ollama/vars/main.yml").read_text())["_ollama_rules"]


@pytest.mark.parametrize(("name", "valid", "wrong"), table("ollama_parameters")["a_value_is_one_path_or_one_word"])
def test_a_value_is_one_path_or_one_word(name: str, valid: list[str], wrong: list[str]) -> None:
    pattern = RULES[f"ollama_{name}"]["pattern"]
    assert all(re.search(rf"^({pattern})\Z", text) for text in valid)
    assert not any(re.search(rf"^({pattern})\Z", text) for text in wrong)
