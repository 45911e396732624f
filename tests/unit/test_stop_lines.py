"""What a stop reports about a run."""

from __future__ import annotations

import pytest
from tables import table

from trainyard.run.host_run import HostRun
from trainyard.run.launch.start_ranks import stop_lines


@pytest.mark.parametrize(("status", "lease", "alive", "hints"), table("stop_lines")["a_run_that_may_wait_in_the_queue"])
def test_a_run_that_may_wait_in_the_queue_is_not_said_to_be_over(
    status: str, lease: str | None, alive: bool, hints: int
) -> None:
    part = HostRun("node1", "/srv/t/runs/r", answer={"status": status, "node": {"lease": lease}, "ranks": {}})
    lines = stop_lines("r", [part], alive, {"grace": 60.0})
    assert [line.partition(":")[0] for line in lines[1:]] == ["if it waits in the queue, it starts again"] * hints


@pytest.mark.parametrize(
    ("statuses", "step"),
    [(("stopped", "stopped"), " after step 12"), (("stopped", "training"), "")],  # rank 1 was killed
)
def test_the_step_is_named_if_all_ranks_stopped_by_themselves(statuses: tuple[str, str], step: str) -> None:
    parts = [
        HostRun(
            f"node{n + 1}",
            "/srv/t/runs/r",
            ranks=[n],
            answer={"status": "stopped", "ranks": {str(n): {"status": status, "step": 12}}},
        )
        for n, status in enumerate(statuses)
    ]
    assert stop_lines("r", parts, True, {"grace": 60.0})[0] == f"run r: node1 stopped, node2 stopped{step}"
