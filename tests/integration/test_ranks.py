"""The steps launch and follow, by playbooks over hosts on this machine, with faults of every kind."""

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
from run_hosts import Bed, bed, parent_of, until

from trainer.supervise.processes import descendants, is_running

__all__ = ["bed"]

LIMIT = 5.0  # s from a fault to the end of the playbook


def end_of(playbook, since: float, limit: float = LIMIT) -> int:
    code = playbook.wait(60)
    assert time.monotonic() - since < limit
    return code


def errors(said: str) -> list[str]:
    return [line for line in said.splitlines() if line.startswith("error: ")]


@pytest.mark.slow
def test_a_run_is_followed_to_its_end(bed: Bed) -> None:
    bed.make_run(3)
    playbook = bed.ranks(bed.plan(3, steps=12, pause=0.1, torchrun=True), "-f", "1")
    assert playbook.wait(120) == 0, bed.output_text()
    said = bed.output_text()
    assert "following r: 3 ranks on node1, node2, node3" in said
    assert "step 12/12  loss 5.31  1.9k tok/s  (3 ranks)" in said
    assert "ETA 0:42" in said
    assert not bed.live_processes()


@pytest.mark.slow
def test_hosts_do_not_wait_for_each_other_to_start(bed: Bed) -> None:
    skews = []
    for attempt in range(4):  # the best of some: other work on the machine can only make it worse
        run = f"r{attempt}"
        bed.make_run(3, run)
        playbook = bed.ranks(bed.plan(3, steps=2, pause=0.1, run=run), "-f", "1")
        assert playbook.wait(120) == 0, bed.output_text()
        starts = [bed.node(host, run)["started"] for host in range(3)]
        skews.append(max(starts) - min(starts))
        if skews[-1] < 0.5:
            return
    raise AssertionError(f"with forks=1 three hosts started {skews} s apart")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("victim", "says"),
    [
        ("worker", "error: rank 1 on node2 was killed by SIGKILL"),
        ("torchrun", "error: torchrun on node2 was killed by SIGKILL"),
        ("supervisor", "error: the supervisor on node2 has exited"),
    ],
)
def test_kill_9_ends_the_playbook(bed: Bed, victim: str, says: str) -> None:
    bed.make_run(2)
    playbook = bed.ranks(bed.plan(2, torchrun=True))
    bed.at_step(0)
    worker = bed.at_step(1)["pid"]
    pid = {"worker": worker, "torchrun": parent_of(worker), "supervisor": bed.node(1)["pid"]}[victim]
    began = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    assert end_of(playbook, began) == 2, bed.output_text()
    assert errors(bed.output_text()) == [says]
    assert f"torchrun.1.log on node2: {bed.run_dir(1)}/logs/torchrun.1.log" in bed.output_text()
    if victim == "worker":
        assert "  rank 1 step 2" in bed.output_text(), "the end of its own log"
    assert not bed.live_processes()


@pytest.mark.slow
def test_the_rank_that_raised_is_named_not_those_that_lost_it(bed: Bed) -> None:
    bed.make_run(3, environment=f"FAKE=1:3:raise\nPEERS={bed.folder}/broken\n")
    assert bed.ranks(bed.plan(3)).wait(60) == 2
    said = bed.output_text()
    assert errors(said) == ["error: rank 1 on node2: ZeroDivisionError: the loss is not a number"]
    assert 'raise ZeroDivisionError("the loss is not a number")' in said, "its own traceback"
    assert "  just before the end" in said, "the last lines of its log"
    assert f"rank1.log on node2: {bed.run_dir(1)}/logs/rank1.log" in said
    assert "Connection closed" not in said
    assert not bed.live_processes()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("environment", "steps", "says"),
    [
        ("FAKE=1:3:hang\n", 6, "error: no progress for 2 s: rank 1 on node2 is the slowest rank, at step 2"),
        ("", 20, "rank 0 on node1 is halted (SIGSTOP or a debugger)"),
    ],
    ids=["hung", "halted"],
)
def test_a_rank_without_progress_is_named(bed: Bed, environment: str, steps: int, says: str) -> None:
    bed.make_run(2, environment=environment)
    playbook = bed.ranks(bed.plan(2, steps=steps, pause=0.05), stall_limit=2)
    if not environment:
        os.kill(bed.at_step(0)["pid"], signal.SIGSTOP)
    assert playbook.wait(60) == 2
    (error,) = errors(bed.output_text())
    assert says in error and not bed.live_processes()


@pytest.mark.slow
def test_the_controller_goes_away_and_comes_back(bed: Bed) -> None:
    bed.make_run(2)
    playbook = bed.ranks(bed.plan(2))
    bed.at_step(1)
    until(lambda: "Ctrl-C leaves it running" in bed.output_text(), 30)
    os.killpg(playbook.pid, signal.SIGINT)
    playbook.wait(30)
    step = bed.state(1)["step"]
    bed.at_step(1, step + 3)

    status = bed.playbook("playbooks/status.yml", 2)
    assert status.wait(60) == 0
    assert [line.split()[:4] for line in bed.output_text().splitlines() if line.startswith("r ")] == [
        ["r", "node1", "0", "training"],
        ["r", "node2", "1", "training"],
    ]

    attached = bed.playbook("playbooks/attach.yml", 2, "-e", "run=r")
    following = bed.output
    until(lambda: "step " in following.read_text(), 30)

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


@pytest.mark.slow
def test_who_follows_ends_with_the_playbook_and_the_run_does_not(bed: Bed) -> None:
    """Ansible's workers are in sessions of their own: the terminal's SIGHUP does not reach them."""
    bed.make_run(1)
    playbook = bed.ranks(bed.plan(1))
    until(lambda: "Ctrl-C leaves it running" in bed.output_text(), 60)
    step = bed.at_step(0)["step"]
    workers = descendants(playbook.pid)
    assert workers
    os.killpg(playbook.pid, signal.SIGHUP)
    playbook.wait(30)
    until(lambda: not any(map(is_running, workers)), 10, "the workers' end")
    bed.at_step(0, step + 3)


@pytest.mark.slow
def test_stop_now_and_wrong_names(bed: Bed) -> None:
    bed.make_run(2, environment="FAKE=0:2:deaf\n")
    bed.ranks(bed.plan(2))
    bed.at_step(1)
    assert bed.playbook("playbooks/stop.yml", 2, "-e", "run=nosuch").wait(60) == 2
    assert errors(bed.output_text()) == [
        "error: no host has a run nosuch; ansible-playbook playbooks/status.yml lists the runs"
    ]
    assert bed.playbook("playbooks/stop.yml", 2).wait(60) == 2
    assert errors(bed.output_text()) == [
        "error: stop: name one run, as in ansible-playbook playbooks/stop.yml -e run=RUN, or set -e all=true for every run"
    ]
    assert bed.playbook("playbooks/stop.yml", 2, "-e", "run=r", "-e", "force=true", "--check").wait(60) == 0
    assert bed.live_processes(), "check mode stops nothing"
    assert bed.playbook("playbooks/stop.yml", 2, "-e", "run=r", "-e", "now=true").wait(60) == 0
    assert not bed.live_processes()


@pytest.mark.slow
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


@pytest.mark.slow
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
    stopped = bed.playbook("playbooks/stop.yml", 2, "-e", "run=r")
    assert stopped.wait(60) == 0, bed.output_text()
    assert "run r: node1 stopped, node2 stopped" in bed.output_text()
    assert not bed.live_processes()


@pytest.mark.slow
def test_logs_are_gathered(bed: Bed) -> None:
    bed.make_run(2)
    assert bed.ranks(bed.plan(2, steps=2)).wait(60) == 0
    gathered = bed.folder / "gathered"
    assert bed.playbook("playbooks/logs.yml", 2, "-e", "run=r", "-e", f"logs_to={gathered}").wait(60) == 0, (
        bed.output_text()
    )
    found = {str(path.relative_to(gathered)) for path in gathered.rglob("*") if path.is_file()}
    assert found >= {"node1/rank0.log", "node1/torchrun.0.log", "node2/rank1.log", "node2/node.json"}
    assert "env" not in {Path(name).name for name in found}, "secrets stay where they are"
    log = bed.run_dir(1) / "logs" / "rank1.log"
    with log.open("a") as file:
        file.write("x" * (3 << 20) + "the end\n")
    elsewhere = bed.folder / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "kept.json").write_text("a secret")
    (bed.run_dir(0) / "state").rename(bed.folder / "former")
    (bed.run_dir(0) / "state").symlink_to(elsewhere)
    more = ("-e", f"logs_to={gathered}", "-e", "logs_max_mib=2")
    assert bed.playbook("playbooks/logs.yml", 2, "-e", "run=r", *more).wait(60) == 0, bed.output_text()
    tail = (gathered / "node2" / "rank1.log").read_bytes()
    assert tail == log.read_bytes()[-(2 << 20) :] and tail.endswith(b"the end\n")
    assert not list(gathered.rglob("kept.json")), "no link is followed"
    assert "rank1.log has 3 MiB: only its last 2 MiB are copied" in " ".join(bed.output_text().split())
    assert bed.playbook("playbooks/logs.yml", 2, "-e", "run=nosuch").wait(60) == 2
    assert errors(bed.output_text()) == [
        "error: no host has a run nosuch; ansible-playbook playbooks/status.yml lists the runs"
    ]
