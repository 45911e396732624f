"""One host's part of a run, with real processes: how it ends is told rightly, and nothing is left of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from run_hosts import FAKE_RANK, TOP, Bed, bed, free_port, parent_of, until

from trainer.supervise.files import LOG_LIMIT
from trainer.supervise.processes import environ, is_running, process_stat, send_signal
from trainer.supervise.ranks import EXIT_LIMIT
from trainyard.remote_archive import remote_command, remote_input

__all__ = ["bed"]


def ask(verb: str, environment: dict[str, str] | None = None, **request: Any) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-P", "-m", "trainer.supervise", verb],
        env={**os.environ, "PYTHONPATH": str(TOP), **(environment or {})},
        input=json.dumps(request),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    lines = done.stdout.splitlines()
    assert len(lines) == 1, done.stdout + done.stderr
    return json.loads(lines[0])


def start(bed: Bed, command: list[str], run: str = "r", ranks: tuple[int, ...] = (0,), **more: Any) -> dict[str, Any]:
    run_dir = str(bed.run_dir(0, run))
    return ask("start", run_dir=run_dir, ranks=ranks, backend="process", command=command, **more)


def status(bed: Bed, logs: dict[str, int] | None = None) -> dict[str, Any]:
    return ask("status", run_dir=str(bed.run_dir(0)), logs_from=logs or {})


def stop(bed: Bed, **how: Any) -> dict[str, Any]:
    return ask("stop", run_dir=str(bed.run_dir(0)), **how)


def ended(bed: Bed) -> dict[str, Any]:
    until(lambda: bed.node(0).get("ended"), what="the end")
    until(lambda: not bed.left(), 5, what="nothing left")
    return status(bed)


def plain_rank(steps: int = 1000, pause: float = 0.05) -> list[str]:
    """Rank 0 without torchrun: quick, for what torchrun has no part in."""
    return ["/usr/bin/env", "RANK=0", sys.executable, str(FAKE_RANK), str(steps), str(pause)]


def torchrun(steps: int = 1000, local_ranks: int = 1) -> list[str]:
    launcher = ["-m", "torch.distributed.run", "--nnodes=1", f"--nproc-per-node={local_ranks}"]
    where = ["--master-addr=127.0.0.1", f"--master-port={free_port()}"]
    return [sys.executable, *launcher, *where, str(FAKE_RANK), str(steps), "0.05"]


def test_a_run_ends_well(bed: Bed) -> None:
    bed.make_run(1)
    answer = start(bed, torchrun(steps=3))
    assert answer["backend"] == "process"
    told = ended(bed)
    assert (told["status"], told["alive"], told["node"]["exit_code"]) == ("finished", False, 0)
    assert told["node"]["pid"] == answer["pid"]
    assert told["ranks"]["0"]["status"] == "finished"


def test_start_comes_back_at_once_and_status_is_cheap(bed: Bed) -> None:
    bed.make_run(1)
    began = time.monotonic()
    start(bed, plain_rank())
    assert time.monotonic() - began < 3
    bed.at_step(0)
    cost = resources(lambda: status(bed))
    assert cost < 0.5, f"{cost} s of processor time"


def resources(work: Any) -> float:
    before = os.times()
    work()
    after = os.times()
    return after.children_user - before.children_user + after.children_system - before.children_system


def test_a_second_start_is_refused_by_name(bed: Bed) -> None:
    bed.make_run(1)
    bed.make_run(1, run="other")
    start(bed, plain_rank())
    assert start(bed, plain_rank())["error"] == "run r is already running here"
    assert start(bed, plain_rank(), run="other")["error"] == "busy: run r is running here"
    stop(bed, now=True)
    assert "pid" in start(bed, plain_rank(), run="other")


def test_of_two_starts_at_once_one_wins(bed: Bed) -> None:
    runs = [f"r{i}" for i in range(4)]
    for run in runs:
        bed.make_run(1, run=run)
    with ThreadPoolExecutor(len(runs)) as pool:
        answers = list(pool.map(lambda run: start(bed, plain_rank(), run=run), runs))
    assert sum("pid" in answer for answer in answers) == 1, answers
    assert sum(answer.get("error", "").startswith("busy: run r") for answer in answers) == 3, answers


def test_what_cannot_start_says_so(bed: Bed) -> None:
    bed.make_run(1)
    assert "No such file" in start(bed, ["/nonexistent/python", "-m", "x"])["error"]
    assert "there is no run folder" in ask("start", run_dir=str(bed.folder / "nothing"), command=["true"])["error"]


@pytest.mark.slow
def test_kill_9_of_a_worker(bed: Bed) -> None:
    bed.make_run(1, environment="FAKE=0:3:child\n")
    start(bed, torchrun())
    until(lambda: bed.node(0).get("failures"), what="the failure")
    told = ended(bed)  # with the process that it left in a session of its own
    assert told["status"] == "failed"
    assert [(f["rank"], f["exit_code"], f["signal"]) for f in told["node"]["failures"]] == [(0, -9, "SIGKILL")]


@pytest.mark.slow
def test_a_dead_worker_is_noticed_while_torchrun_waits_for_the_others(bed: Bed) -> None:
    bed.make_run(1, environment="FAKE=0:1:deaf\n")  # torchrun gives rank 0 30 s to heed SIGTERM
    start(bed, torchrun(local_ranks=2), ranks=(0, 1))
    victim = bed.at_step(1, host=0)["pid"]
    bed.at_step(0)
    os.kill(victim, signal.SIGKILL)
    noticed = until(lambda: bed.node(0)["failures"], 3, what="the failure")
    assert [(f["rank"], f["pid"]) for f in noticed] == [(1, victim)]
    began = time.monotonic()
    assert stop(bed, now=True)["status"] == "failed"
    assert time.monotonic() - began < 3
    assert not bed.left()


@pytest.mark.slow
def test_a_worker_that_raises(bed: Bed) -> None:
    bed.make_run(1, environment="FAKE=0:2:raise\n")
    start(bed, torchrun())
    told = ended(bed)
    assert told["status"] == "failed"
    assert told["node"]["failures"][0]["exit_code"] == 1
    assert told["ranks"]["0"]["error"]["message"] == "the loss is not a number"


@pytest.mark.slow
def test_kill_9_of_torchrun_leaves_no_orphan(bed: Bed) -> None:
    bed.make_run(1)
    start(bed, torchrun())
    os.kill(parent_of(bed.at_step(0)["pid"]), signal.SIGKILL)
    told = ended(bed)
    assert (told["status"], told["node"]["exit_code"]) == ("failed", -9)


@pytest.mark.slow
def test_kill_9_of_the_supervisor_takes_all_with_it(bed: Bed) -> None:
    bed.make_run(1)
    pid = start(bed, torchrun())["pid"]
    bed.at_step(0)
    os.kill(pid, signal.SIGKILL)
    until(lambda: not bed.left(), 5, what="nothing left")
    assert status(bed)["status"] == "lost"
    assert stop(bed, now=True) == {"status": "failed", "killed": 0}
    start(bed, plain_rank(steps=1))
    assert ended(bed)["node"]["attempt"] == 2


def test_stop_finds_what_a_lost_supervisor_left_behind(bed: Bed) -> None:
    bed.make_run(1)
    # A shell that does not die with its parent, as a data loader would not.
    pid = start(bed, ["/bin/sh", "-c", "setsid sleep 3600 & sleep 3600"])["pid"]
    until(lambda: len(bed.left()) >= 4)
    os.kill(pid, signal.SIGKILL)
    until(lambda: status(bed)["status"] == "lost")
    assert "still running" in start(bed, plain_rank())["error"]
    assert stop(bed, now=True)["killed"] >= 1
    assert not bed.left()


def test_a_clean_stop_lets_the_rank_leave_by_itself(bed: Bed) -> None:
    bed.make_run(1)
    start(bed, plain_rank())
    bed.at_step(0)
    assert stop(bed, grace=20) == {"status": "stopped", "killed": 0}
    assert bed.state(0)["status"] == "stopped"
    assert stop(bed)["status"] == "stopped", "again is no harm"
    start(bed, plain_rank(steps=3))  # the old `stop` does not stop the new one
    assert ended(bed)["status"] == "finished"


def test_a_rank_that_does_not_heed_stop_gets_sigterm(bed: Bed) -> None:
    bed.make_run(1, environment="FAKE=0:2:hang\n")
    start(bed, plain_rank())
    bed.at_step(0, 1)
    assert stop(bed, grace=0.3)["status"] == "stopped"
    assert not bed.left()


def test_stop_now_does_not_ask(bed: Bed) -> None:
    bed.make_run(1, environment="FAKE=0:2:deaf\n")
    start(bed, plain_rank())
    bed.at_step(0)
    began = time.monotonic()
    assert stop(bed, now=True)["status"] == "stopped"
    assert time.monotonic() - began < 3
    assert not bed.left()


def test_stop_of_what_never_ran(bed: Bed) -> None:
    bed.make_run(1)
    assert stop(bed) == {"status": "none", "killed": 0}
    assert status(bed)["status"] == "none"


def test_a_rank_is_judged_by_its_own_word(bed: Bed) -> None:
    """The launcher's exit can fail after the worker has ended well."""
    bed.make_run(1)
    start(bed, ["/bin/sh", "-c", f"{' '.join(plain_rank(steps=2))}; echo DistNetworkError; exit 1"])
    told = ended(bed)
    assert (told["status"], told["node"]["exit_code"]) == ("finished", 1)


def test_a_launcher_that_waits_for_peers_that_are_gone_is_ended(bed: Bed) -> None:
    """torchrun's exit barrier holds it for minutes when a peer is gone: its ranks have ended well long before."""
    bed.make_run(1)
    start(bed, ["/bin/sh", "-c", f"{' '.join(plain_rank(steps=2))} & wait; sleep 300; :"])
    until(lambda: bed.state(0).get("status") == "finished", what="the rank's end")
    began = time.monotonic()
    told = ended(bed)
    assert told["status"] == "finished"
    assert EXIT_LIMIT - 1 < time.monotonic() - began < EXIT_LIMIT + 5


def test_ranks_that_torchrun_starts_again_may_have_other_numbers(bed: Bed) -> None:
    bed.make_run(1, environment="FAKE=1:1:kill\n")
    second, first = (" ".join(plain_rank(steps=20)).replace("RANK=0", f"RANK={rank}") for rank in (1, 0))
    start(bed, ["/bin/sh", "-c", f"{second}; {first}; exit 1", "--max-restarts=3"], ranks=(1,))
    bed.at_step(0)
    told = status(bed)
    assert (told["status"], told["node"]["ranks"], list(told["ranks"])) == ("running", [0], ["0"])
    assert not told["node"]["failures"]
    assert ended(bed)["status"] == "finished"


def test_the_environment_is_clean_and_secrets_stay_out_of_argv(bed: Bed) -> None:
    bed.make_run(1, environment="# a comment\nSECRET=hunter2=x y\nFAKE=0:1:secret\n")
    start(bed, plain_rank(), environment={"LOGIN_ONLY": "1"})
    pid = bed.at_step(0)["pid"]
    values = environ(pid)
    assert values["SECRET"] == "hunter2=x y"
    assert values["HOME"] and values["PATH"].startswith(str(Path(sys.executable).parent))
    assert "LOGIN_ONLY" not in values
    for process in bed.left():
        assert b"hunter2" not in Path(f"/proc/{process}/cmdline").read_bytes()
    assert "hunter2" not in json.dumps(status(bed))


def test_an_env_file_that_others_can_read_is_refused(bed: Bed) -> None:
    bed.make_run(1)
    (bed.run_dir(0) / "env").chmod(0o644)
    assert "chmod 600" in start(bed, plain_rank())["error"]
    bed.write_env(0, "no equals sign\n")
    assert "env:1 is not KEY=VALUE" in start(bed, plain_rank())["error"]


def test_logs_come_in_whole_lines_from_where_one_was(bed: Bed) -> None:
    bed.make_run(1)
    (bed.run_dir(0) / "logs").mkdir()
    log = bed.run_dir(0) / "logs/rank0.log"
    log.write_bytes(b"one\ntwo\nhal")
    first = status(bed, {"rank0.log": 0})["logs"]["rank0.log"]
    assert first["lines"] == ["one", "two"]
    log.write_bytes(b"one\ntwo\nhalf\n\xff\n")
    assert status(bed, {"rank0.log": first["offset"]})["logs"]["rank0.log"]["lines"] == ["half", "\ufffd"]
    assert status(bed, {"rank0.log": -2})["logs"]["rank0.log"]["lines"] == ["half", "\ufffd"]
    log.write_bytes(b"x" * 200_000 + b"\nend\n")
    long = status(bed, {"rank0.log": 0})["logs"]["rank0.log"]
    assert long["offset"] == LOG_LIMIT
    assert status(bed, {"../env": 0})["logs"]["../env"]["lines"] == []


def test_every_run_of_a_host_is_listed(bed: Bed) -> None:
    bed.make_run(1)
    bed.make_run(1, run="other")
    start(bed, plain_rank(steps=1))
    ended(bed)
    listed = ask("list", data_dir=str(bed.folder / "node1"))["runs"]
    assert [(run["node"]["run"], run["status"]) for run in listed] == [("r", "finished")]


def test_a_pid_that_is_somebody_elses_by_now_is_left_alone() -> None:
    other = subprocess.Popen(["sleep", "3600"])
    try:
        seen = process_stat(other.pid)
        assert seen is not None
        send_signal(other.pid, signal.SIGKILL, start_time=seen[2] - 1)
        assert is_running(other.pid)
        send_signal(other.pid, signal.SIGKILL, start_time=seen[2])
        assert other.wait(5) == -signal.SIGKILL
    finally:
        other.kill()


def test_it_needs_nothing_but_a_bare_python(bed: Bed) -> None:
    """The controller sends it to hosts for `run_status`, `run_stop` and `run_list`."""
    command = remote_command("run_list", sys.executable)
    request = remote_input({"data_dir": str(bed.folder)})
    done = subprocess.run(["/bin/sh", "-c", command], input=request, capture_output=True, check=True)
    assert json.loads(done.stdout)["runs"] == []
