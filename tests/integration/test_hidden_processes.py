"""Processes of a rank that clear every mark of the run and leave their parents end with the run, in process mode."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from run_hosts import FAKE_RANK, Bed, bed, parent_of, until
from test_supervise import ask, start

from trainer.supervise.processes import RUN_VARIABLE, environ, is_own, is_running

__all__ = ["bed"]


@pytest.fixture
def hidden(bed: Bed) -> Iterator[Callable[[], list[int]]]:
    """Start a rank that hides processes; return a function for the pids of those that live."""
    bed.make_run(1)
    with (bed.run_dir(0) / "env").open("a", encoding="utf-8") as file:
        file.write(f"PYTHONPATH={bed.run_dir(0)}/trainer.zip\n")
    rank = FAKE_RANK.with_name("hiding_rank.py")
    supervisor = start(bed, ["/usr/bin/env", "RANK=0", sys.executable, str(rank), "1000", "0.05"])["pid"]
    bed.at_step(0)
    found = json.loads((bed.run_dir(0) / "hidden").read_text(encoding="utf-8"))
    assert len(found) == 3
    until(lambda: not any(RUN_VARIABLE in environ(pid) for pid in found[:2]), 5)
    assert all(map(is_own, found)) and {*map(parent_of, found)} == {supervisor}, "the supervisor gets orphans"
    yield lambda: [pid for pid in found if is_running(pid)]
    for pid in filter(is_running, found):
        os.kill(pid, signal.SIGKILL)


def forget(run_dir: Path) -> None:
    """Remove what the run has written for the supervisor, as code of a rank can do."""
    (run_dir / "state/node.json").unlink()
    (run_dir / "lock").unlink()


@pytest.mark.parametrize("replaced", [False, True])
def test_a_stop_ends_hidden_processes(bed: Bed, hidden: Callable[[], list[int]], replaced: bool) -> None:
    if replaced:
        forget(bed.run_dir(0))
    assert len(hidden()) == 3
    ask("stop", run_dir=str(bed.run_dir(0)), wanted=True)
    assert not hidden() and not bed.live_processes()


def test_the_end_of_the_ranks_ends_hidden_processes(bed: Bed, hidden: Callable[[], list[int]]) -> None:
    os.kill(bed.state(0)["pid"], signal.SIGKILL)
    until(lambda: not hidden() and not bed.live_processes(), 10, what="the end of all processes")


def test_a_zombie_does_not_run() -> None:
    with subprocess.Popen(["/bin/true"]) as process:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert not is_running(process.pid)
