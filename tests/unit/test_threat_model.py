"""SECURITY.md: every statement that is enforced names a test that exists."""

from __future__ import annotations

import re
from pathlib import Path

TOP = Path(__file__).parents[2]


def test_every_statement_names_a_test() -> None:
    enforced = (TOP / "SECURITY.md").read_text().partition("### What trainyard enforces")[2].partition("\n### ")[0]
    rows = [
        line
        for line in enforced.splitlines()
        if line.startswith("| ") and not line.startswith(("| ---", "| statement"))
    ]
    assert len(rows) >= 20
    for row in rows:
        found = re.findall(r"`(tests/[^`:]+\.py)(?:::(\w+))?`", row)
        assert found, row
        for file, name in found:
            assert (TOP / file).is_file(), row
            assert not name or f"def {name}(" in (TOP / file).read_text(), row
