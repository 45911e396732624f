"""Several runs at once: stop all of them, and watch them until they end."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from dataclasses import replace
from typing import Any

import pytest
from run_hosts import Bed, bed, until
from test_run_session import hosts

from trainer.supervise.processes import descendants, is_running
from trainyard.run.follow.manage_runs import manage_runs
from trainyard.run.launch.start_ranks import start_ranks
from trainyard.run.launch_options import LaunchOptions
from trainyard.wire.connection import Host, HostConnection
from trainyard.wire.openssh import LocalTransport
from trainyard.wire.run_errors import RunError

__all__ = ["bed"]


class HangingTransport(LocalTransport):
    """A host that answers the first request only."""

    def __init__(self) -> None:
        self.asked = 0

    def execute(self, command: str, stdin: bytes | None = None) -> tuple[int, bytes, bytes]:
        self.asked += 1
        if self.asked > 1:
            time.sleep(3)
        return super().execute(command, stdin)


def start(bed: Bed, run: str, host: int, steps: int = 1000, pause: float = 0.1) -> None:
    """Start a run on one of the hosts."""
    bed.make_run(host + 1, run)
    entry = replace(bed.plan(host + 1, steps, pause, run)[host], node_rank=0, ranks=[0])
    entry.command = bed.command(0, 1, steps, pause, False, 0)
    names = {one.name: one for one in hosts(bed.folder)}
    start_ranks([entry], lambda name: HostConnection(names[name], LocalTransport()), print)
    bed.at_step(0, 1, run, host)


def manage(bed: Bed, state: str, lines: list[str], run: str = "", **how: Any) -> dict[str, Any]:
    transports = {"node1": LocalTransport(), "node2": how.pop("transport", LocalTransport())}

    def connect(host: Host) -> HostConnection:
        return HostConnection(host, transports[host.name])

    options = LaunchOptions(lost_limit=how.pop("lost_limit", 10.0))
    return manage_runs(state, run, hosts(bed.folder), connect, options, lines.append, **how)


@pytest.mark.slow
def test_all_runs_are_stopped_and_reported(bed: Bed) -> None:
    start(bed, "one", 0)
    start(bed, "two", 1)
    lines: list[str] = []
    with pytest.raises(RunError, match=r"^name a run or all=true, not both$"):
        manage(bed, "stopped", lines, "one", every=True)
    assert manage(bed, "stopped", lines, every=True, check=True)["msg"] == "would stop one, two"
    stopped = manage(bed, "stopped", lines, every=True, grace=30)
    assert stopped["runs"] == {"one": {"node1": "stopped"}, "two": {"node2": "stopped"}} and stopped["changed"]
    said = [line.partition(" after step ") for line in lines]
    assert [line for line, _, _ in said] == ["run one: node1 stopped", "run two: node2 stopped"]
    assert all(step.isdecimal() for _, _, step in said), lines
    assert stopped["lines"] == ["stopped 2 runs on 2 hosts"]
    assert not bed.live_processes()
    again = manage(bed, "stopped", lines, every=True)
    assert again["lines"] == ["no run is alive on 2 hosts"] and not again["changed"]
    followed: list[str] = []
    attached = manage(bed, "followed", followed, "one")
    assert attached["status"] == "stopped" and not attached["changed"]
    assert not any("Ctrl-C" in line for line in followed), "the run has ended"


@pytest.mark.slow
def test_all_other_runs_are_stopped_when_a_host_does_not_answer(bed: Bed) -> None:
    start(bed, "one", 0)
    away = HangingTransport()
    away.asked = 1
    with pytest.raises(RunError, match=r"^node2: no answer within 1 s$") as raised:
        manage(bed, "stopped", [], every=True, lost_limit=1.0, transport=away)
    assert raised.value.details["runs"] == {"one": {"node1": "stopped"}}
    assert raised.value.details["lines"] == ["stopped 1 run on 1 host"]
    assert not bed.live_processes()


@pytest.mark.slow
def test_the_status_is_watched_until_the_runs_end(bed: Bed) -> None:
    start(bed, "one", 0, steps=30)
    lines: list[str] = []
    away = HangingTransport()
    before = threading.active_count()
    most = []
    watching = threading.Thread(
        target=lambda: lines.append(
            manage(bed, "listed", lines, watch=0.5, lost_limit=0.5, transport=away)["lines"][1].split()[3]
        ),
        daemon=True,
    )
    watching.start()
    while watching.is_alive():
        most.append(threading.active_count())
        time.sleep(0.05)
    assert lines[-1] == "finished"
    tables = [place for place, line in enumerate(lines) if re.fullmatch(r"\d\d:\d\d:\d\d", line)]
    assert len(tables) >= 2 and all(lines[place + 1].startswith("run  ") for place in tables)
    # The host that hangs has one request at a time: this thread, one per host, and those of the test.
    assert max(most) <= before + 3
    assert away.asked >= 2


@pytest.mark.slow
def test_ctrl_c_ends_the_watch_and_leaves_the_runs(bed: Bed) -> None:
    start(bed, "one", 0)
    watching = bed.playbook("playbooks/status.yml", 2, "-e", "watch=true", "-e", "interval=0.5")
    until(lambda: len(re.findall(r"^\d\d:\d\d:\d\d$", bed.output_text(), re.MULTILINE)) >= 2, 60, "two tables")
    workers = descendants(watching.pid)
    os.killpg(watching.pid, signal.SIGINT)
    watching.wait(30)
    until(lambda: not any(map(is_running, workers)), 10, "the worker's end")
    assert workers and bed.node(0, "one")["status"] == "running"
    stopped = bed.playbook("playbooks/stop.yml", 2, "-e", "all=true", "-e", "force=true")
    assert stopped.wait(60) == 0, bed.output_text()
    assert "run one: node1 stopped" in bed.output_text() and "stopped 1 run on 2 hosts" in bed.output_text()
    assert not bed.live_processes()
