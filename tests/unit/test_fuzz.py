"""Hostile inputs of eight kinds: none causes a traceback, a hang, or a message of more than one printable line."""

from __future__ import annotations

import pytest
from fuzz import SLOW, TARGETS, run_target


@pytest.mark.parametrize("count", [200, pytest.param(5000, marks=pytest.mark.long)])
@pytest.mark.parametrize("target", TARGETS)
def test_hostile_inputs_are_accepted_or_refused_with_one_line(target: str, count: int) -> None:
    count //= SLOW.get(target, 1)
    outcome = run_target(target, count)
    print(outcome.line())
    assert not outcome.hangs, "\n".join(outcome.hangs[:3])
    assert not outcome.tracebacks, f"{len(outcome.tracebacks)} tracebacks, such as\n" + "\n".join(
        outcome.tracebacks[:3]
    )
    assert outcome.inputs == count
    assert outcome.accepted > count // 50, "the inputs reach past the first check"
    assert outcome.refused >= count // 5 or target == "runs", "a record that cannot be read counts as none"
