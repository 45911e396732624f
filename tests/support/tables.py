"""Tables of inputs and expected results for parametrized tests: YAML files in tests/data."""

import copy
import functools
from pathlib import Path
from typing import Any

import yaml

_DATA = Path(__file__).resolve().parents[1] / "data"


@functools.cache
def _read(name: str) -> Any:
    text = (_DATA / f"{name}.yml").read_text(encoding="utf-8")
    try:
        return yaml.load(text, yaml.CSafeLoader)  # a tenth of the time
    except yaml.YAMLError:  # libyaml refuses halves of surrogate pairs
        return yaml.safe_load(text)


def table(name: str) -> Any:
    """Return a copy of the table of the file NAME.yml."""
    return copy.deepcopy(_read(name))
