"""The steps launch and follow by playbooks over hosts on this machine; test_run_session.py has the faults of ranks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from run_hosts import Bed, bed, until

from trainer.supervise.processes import descendants, is_running

__all__ = ["bed"]
pytestmark = pytest.mark.slow


def errors(said: str) -> list[str]:
    return [line for line in said.splitlines() if line.startswith("error: ")]


def test_kill_9_ends_the_playbook(bed: Bed) -> None:
    bed.make_run(2)
    playbook = bed.ranks(bed.plan(2, torchrun=True))
    bed.at_step(0)
    worker = bed.at_step(1)["pid"]
    began = time.monotonic()
    os.kill(worker, signal.SIGKILL)
    assert playbook.wait(60) == 2 and time.monotonic() - began < 5
    assert errors(bed.output_text()) == ["error: rank 1 on node2 was killed by SIGKILL"]
    assert f"torchrun.1.log on node2: {bed.run_dir(1)}/logs/torchrun.1.log" in bed.output_text()
    assert "  rank 1 step 2" in bed.output_text(), "the end of its own log"
    assert not bed.live_processes()


def test_the_controller_goes_away_and_comes_back(bed: Bed) -> None:
    """Ansible's workers are in sessions of their own: the terminal's SIGHUP does not reach them."""
    bed.make_run(2)
    playbook = bed.ranks(bed.plan(2), "-f", "1")
    bed.at_step(1)
    until(lambda: "Ctrl-C leaves it running" in bed.output_text(), 60)
    assert "following r: 2 ranks on node1, node2" in bed.output_text()
    starts = [bed.node(host)["started"] for host in (0, 1)]
    assert max(starts) - min(starts) < 2, "hosts do not wait for each other, also with forks=1"
    workers = descendants(playbook.pid)
    assert workers
    os.killpg(playbook.pid, signal.SIGHUP)
    playbook.wait(30)
    until(lambda: not any(map(is_running, workers)), 10, "the workers' end")
    bed.at_step(1, bed.state(1)["step"] + 3)

    status = bed.playbook("playbooks/status.yml", 2)
    assert status.wait(60) == 0
    assert [line.split()[:4] for line in bed.output_text().splitlines() if line.startswith("r ")] == [
        ["r", "node1", "0", "training"],
        ["r", "node2", "1", "training"],
    ]
    attached = bed.playbook("playbooks/attach.yml", 2, "-e", "run=r")
    following = bed.output
    until(lambda: "step " in following.read_text(), 30)
    assert bed.playbook("playbooks/stop.yml", 2, "-e", "run=r", "-e", "force=true", "--check").wait(60) == 0
    assert bed.live_processes(), "check mode stops nothing"
    assert bed.playbook("playbooks/stop.yml", 2).wait(60) == 2
    assert errors(bed.output_text()) == [
        "error: stop: name one run, as in ansible-playbook playbooks/stop.yml -e run=RUN, or set -e all=true for every run"
    ]
    stopped = bed.playbook("playbooks/stop.yml", 2, "-e", "run=r")
    assert stopped.wait(60) == 0, bed.output_text()
    assert "node1 stopped" in bed.output_text()
    assert attached.wait(30) == 0, following.read_text()
    assert "following r: 2 ranks on node1, node2" in following.read_text()
    assert [bed.state(rank)["status"] for rank in (0, 1)] == ["stopped", "stopped"], "with a checkpoint"
    assert not bed.live_processes()
    again = bed.playbook("playbooks/stop.yml", 2, "-e", "run=r")
    assert again.wait(60) == 0
    assert "ok: [node1]" in bed.output_text(), "nothing is left to stop"


@pytest.mark.long
def test_stop_says_who_had_to_be_killed(bed: Bed) -> None:
    bed.make_run(2, environment="FAKE=1:2:deaf\n")
    bed.ranks(bed.plan(2))
    bed.at_step(1)
    assert bed.playbook("playbooks/stop.yml", 2, "-e", "run=r", "-e", "grace=0.5").wait(60) == 0, bed.output_text()
    assert "run r: node1 stopped, node2 stopped" in bed.output_text()
    assert (
        "killed, because their checkpoint took longer than 0.5 s: ranks 1; the run continues from the previous checkpoint"
        in bed.output_text()
    )
    assert not bed.live_processes()


def test_stop_ends_the_older_and_the_newer_start(bed: Bed) -> None:
    """node2 still runs a start that node1 has left. The controller follows the newer start, and a stop ends both."""
    bed.make_run(2)
    first = bed.ranks(bed.plan(2))
    bed.at_step(1)
    os.killpg(first.pid, signal.SIGHUP)
    first.wait(30)
    supervise = [sys.executable, "-P", "-m", "trainer.supervise", "stop"]
    request = json.dumps({"run_dir": str(bed.run_dir(0)), "now": True}).encode()
    subprocess.run(supervise, input=request, check=True, capture_output=True)
    bed.ranks([replace(bed.plan(1)[0], attempt=2)])
    until(lambda: bed.node(0).get("attempt") == 2, 60, "node1's start alone")
    bed.at_step(0)
    stopped = bed.playbook("playbooks/stop.yml", 2, "-e", "run=r", "-e", "now=true")
    assert stopped.wait(60) == 0, bed.output_text()
    assert "run r: node1 stopped, node2 stopped" in bed.output_text()
    assert not bed.live_processes()


def test_logs_are_gathered(bed: Bed) -> None:
    bed.make_run(2)
    assert bed.ranks(bed.plan(2, steps=2)).wait(60) == 0
    gathered, log = bed.folder / "gathered", bed.run_dir(1) / "logs/rank1.log"
    with log.open("a") as file:
        file.write("x" * (3 << 20) + "the end\n")
    elsewhere = bed.folder / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "kept.json").write_text("a secret")
    (bed.run_dir(0) / "state").rename(bed.folder / "former")
    (bed.run_dir(0) / "state").symlink_to(elsewhere)
    more = ("-e", f"logs_to={gathered}", "-e", "logs_max_mib=2")
    assert bed.playbook("playbooks/logs.yml", 2, "-e", "run=r", *more).wait(60) == 0, bed.output_text()
    found = {str(path.relative_to(gathered)) for path in gathered.rglob("*") if path.is_file()}
    assert found >= {"node1/rank0.log", "node1/torchrun.0.log", "node2/rank1.log", "node2/node.json"}
    assert "env" not in {Path(name).name for name in found}, "secrets stay where they are"
    tail = (gathered / "node2" / "rank1.log").read_bytes()
    assert tail == log.read_bytes()[-(2 << 20) :] and tail.endswith(b"the end\n")
    assert not list(gathered.rglob("kept.json")), "no link is followed"
    assert "rank1.log has 3 MiB: only its last 2 MiB are copied" in " ".join(bed.output_text().split())
    assert bed.playbook("playbooks/logs.yml", 2, "-e", "run=nosuch").wait(60) == 2
    assert errors(bed.output_text()) == [
        "error: no host has a run nosuch; ansible-playbook playbooks/status.yml lists the runs"
    ]
