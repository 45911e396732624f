"""What a stop reports about a run that was not running."""

from __future__ import annotations

import pytest

from trainyard.run.launch import stop_lines
from trainyard.run.monitor import Part


@pytest.mark.parametrize(
    ("status", "lease", "alive", "hints"),
    [
        ("stopped", "/srv/t/leases/4", False, 1),  # its job may wait
        ("finished", "/srv/t/leases/4", False, 0),
        ("stopped", "/srv/t/leases/4", True, 0),  # the driver ends its job
        ("stopped", None, False, 0),
    ],
)
def test_a_run_that_may_wait_in_the_queue_is_not_said_to_be_over(
    status: str, lease: str | None, alive: bool, hints: int
) -> None:
    part = Part("node1", "/srv/t/runs/r", answer={"status": status, "node": {"lease": lease}, "ranks": {}})
    lines = stop_lines("r", [part], alive, {"grace": 60.0})
    assert [line.partition(":")[0] for line in lines[1:]] == ["if it waits in the queue, it starts again"] * hints
