"""Tables of inputs and expected results for parametrized tests: YAML files in tests/data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

_DATA = Path(__file__).resolve().parents[1] / "data"


def table(name: str) -> Any:
    """Return the table of the file NAME.yml."""
    return yaml.safe_load((_DATA / f"{name}.yml").read_text(encoding="utf-8"))
