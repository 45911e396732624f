"""Tables of inputs and expected results for parametrized tests: YAML files in tests/data."""

import copy
import functools
from pathlib import Path
from typing import Any

import yaml

_DATA = Path(__file__).resolve().parents[1] / "data"


@functools.cache
def _read(name: str) -> Any:
    return yaml.safe_load((_DATA / f"{name}.yml").read_text(encoding="utf-8"))


def table(name: str) -> Any:
    """Return a copy of the table of the file NAME.yml."""
    return copy.deepcopy(_read(name))
