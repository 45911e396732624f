"""One host's part of a run with real processes: its end is reported correctly, and no process remains."""

from __future__ import annotations

import fcntl
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
from run_hosts import FAKE_RANK, TOP, Bed, bed, free_port, until
from tables import table

from trainer.supervise.logs import LOG_SIZE
from trainer.supervise.processes import environ, is_running, process_stat, send_signal
from trainer.supervise.ranks import EXIT_LIMIT
from trainer.supervise.run_files import LOG_LIMIT
from trainer.supervise.start import STOPPED
from trainer.supervise.status import list_runs
from trainer.supervise.status import status as status_here
from trainyard.wire.remote_archive import remote_command, remote_input

pytestmark = pytest.mark.slow

__all__ = ["bed"]


def ask(verb: str, environment: dict[str, str] | None = None, **request: Any) -> dict[str, Any]:
    command = [sys.executable, "-P", "-m", "trainer.supervise", verb]
    variables = os.environ | {"PYTHONPATH": str(TOP)} | (environment or {})
    given = json.dumps(request)
    done = subprocess.run(command, env=variables, input=given, capture_output=True, text=True, timeout=60, check=False)
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
    until(lambda: not bed.live_processes(), 5, what="the end of all processes")
    return status(bed)


def plain_rank(steps: int = 1000, pause: float = 0.05) -> list[str]:
    """Rank 0 without torchrun, which is faster, for tests that do not depend on torchrun."""
    return ["/usr/bin/env", "RANK=0", sys.executable, str(FAKE_RANK), str(steps), str(pause)]


def torchrun(steps: int = 1000, local_ranks: int = 1) -> list[str]:
    launcher = ["-m", "torch.distributed.run", "--nnodes=1", f"--nproc-per-node={local_ranks}"]
    where = ["--master-addr=127.0.0.1", f"--master-port={free_port()}"]
    return [sys.executable, *launcher, *where, str(FAKE_RANK), str(steps), "0.05"]


def test_a_second_start_is_rejected_and_names_the_run(bed: Bed) -> None:
    bed.make_run(1)
    bed.make_run(1, run="other")
    start(bed, plain_rank())
    assert start(bed, plain_rank())["error"] == "run r is already running here"
    assert start(bed, plain_rank(), run="other")["error"] == "busy: run r is running here"
    stop(bed, now=True)
    assert "pid" in start(bed, plain_rank(), run="other")


def test_one_of_several_simultaneous_starts_succeeds(bed: Bed) -> None:
    runs = [f"r{i}" for i in range(4)]
    for run in runs:
        bed.make_run(1, run=run)
    with ThreadPoolExecutor(len(runs)) as pool:
        answers = list(pool.map(lambda run: start(bed, plain_rank(), run=run), runs))
    assert sum("pid" in answer for answer in answers) == 1, answers
    assert sum(answer.get("error", "").startswith("busy: run r") for answer in answers) == 3, answers


def test_a_start_that_fails_reports_why(bed: Bed) -> None:
    bed.make_run(1)
    assert stop(bed) == {"status": "none", "killed": 0} and status(bed)["status"] == "none"
    (bed.run_dir(0) / "env").chmod(0o644)
    assert "chmod 600" in start(bed, plain_rank())["error"]
    bed.write_env(0, "no equals sign\n")
    assert "env:1 is not KEY=VALUE" in start(bed, plain_rank())["error"]
    bed.write_env(0, "")
    assert "No such file" in start(bed, ["/nonexistent/python", "-m", "x"])["error"]
    assert "there is no run folder" in ask("start", run_dir=str(bed.folder / "nothing"), command=["true"])["error"]


def test_a_run_has_no_way_to_new_privileges(bed: Bed) -> None:
    bed.make_run(1)
    start(bed, ["/bin/grep", "NoNewPrivs", "/proc/self/status"])
    ended(bed)
    assert "NoNewPrivs:\t1" in (bed.run_dir(0) / "logs/torchrun.0.log").read_text()


def test_sigkill_of_a_worker(bed: Bed) -> None:
    bed.make_run(1, environment="FAKE=0:3:child\n")
    start(bed, torchrun())
    until(lambda: bed.node(0).get("failures"), what="the failure")
    final = ended(bed)  # including the child that the rank started in another session
    assert final["status"] == "failed"
    assert [(f["rank"], f["exit_code"], f["signal"]) for f in final["node"]["failures"]] == [(0, -9, "SIGKILL")]


def test_a_dead_worker_is_noticed_while_torchrun_waits_for_other_workers(bed: Bed) -> None:
    bed.make_run(1, environment="FAKE=0:1:deaf\n")  # torchrun gives rank 0 30 s to react to SIGTERM
    start(bed, torchrun(local_ranks=2), ranks=(0, 1))
    victim = bed.at_step(1, host=0)["pid"]
    bed.at_step(0)
    os.kill(victim, signal.SIGKILL)
    failures = until(lambda: bed.node(0)["failures"], 3, what="the failure")
    assert [(f["rank"], f["pid"]) for f in failures] == [(1, victim)]
    began = time.monotonic()
    assert stop(bed, now=True)["status"] == "failed"
    assert time.monotonic() - began < 3
    assert not bed.live_processes()


def test_sigkill_of_the_supervisor_ends_all_processes(bed: Bed) -> None:
    bed.make_run(1)
    pid = start(bed, plain_rank())["pid"]
    bed.at_step(0)
    os.kill(pid, signal.SIGKILL)
    until(lambda: not bed.live_processes(), 5, what="the end of all processes")
    assert status(bed)["status"] == "lost"
    assert stop(bed, now=True) == {"status": "failed", "killed": 0}
    start(bed, plain_rank(steps=1))
    assert ended(bed)["node"]["attempt"] == 2


def test_stop_kills_processes_that_outlived_their_supervisor(bed: Bed) -> None:
    bed.make_run(1)
    # A shell that does not end with its parent, as a data loader may not.
    pid = start(bed, ["/bin/sh", "-c", "setsid sleep 3600 & sleep 3600"])["pid"]
    until(lambda: len(bed.live_processes()) >= 4)
    os.kill(pid, signal.SIGKILL)
    until(lambda: status(bed)["status"] == "lost")
    assert "still running" in start(bed, plain_rank())["error"]
    assert stop(bed, now=True)["killed"] >= 1
    assert not bed.live_processes()


@pytest.mark.parametrize("verb", ["start", "stop"])
def test_a_verb_that_is_killed_leaves_a_run_that_can_be_stopped_and_started(bed: Bed, verb: str) -> None:
    """At moments of its work: the run trains afterwards or has ended, and a stop leaves no process."""
    bed.make_run(1)
    request = {"run_dir": str(bed.run_dir(0)), "ranks": [0], "backend": "process", "grace": 2.0}
    request["command"] = plain_rank()
    for delay in (0.0, 0.1, 0.2, 0.4):
        if verb == "stop":
            start(bed, plain_rank())
            bed.at_step(0, 1)
        client = subprocess.Popen(
            [sys.executable, "-P", "-m", "trainer.supervise", verb],
            env=os.environ | {"PYTHONPATH": str(TOP)}, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True,
        )  # fmt: skip
        assert client.stdin
        client.stdin.write(json.dumps(request))
        client.stdin.close()
        time.sleep(delay)
        client.kill()
        client.wait()
        until(lambda: (now := status(bed))["alive"] == (now["status"] == "running"), 20, "a run, or its end")
        assert stop(bed, now=True)["status"] not in ("starting", "running")
        until(lambda: not bed.live_processes(), 10, what="the end of all processes")


def test_a_clean_stop_lets_the_rank_end_by_itself(bed: Bed) -> None:
    bed.make_run(1)
    start(bed, plain_rank())
    bed.at_step(0)
    assert stop(bed, grace=20) == {"status": "stopped", "killed": 0}
    assert bed.state(0)["status"] == "stopped"
    assert stop(bed)["status"] == "stopped", "a second stop changes nothing"
    pid = start(bed, plain_rank(steps=3))["pid"]  # the earlier `stop` file does not stop the new run
    final = ended(bed)
    assert (final["status"], final["alive"], final["ranks"]["0"]["status"]) == ("finished", False, "finished")
    assert (final["node"]["exit_code"], final["node"]["pid"], final["node"]["backend"]) == (0, pid, "process")


def test_a_rank_that_ignores_stop_gets_sigterm(bed: Bed) -> None:
    bed.make_run(1, environment="FAKE=0:2:hang\n")
    start(bed, plain_rank())
    bed.at_step(0, 1)
    assert stop(bed, grace=0.3)["status"] == "stopped"
    assert bed.node(0)["exit_code"] == -signal.SIGTERM and not bed.live_processes()


def test_stop_now_kills_at_once(bed: Bed) -> None:
    bed.make_run(1, environment="FAKE=0:2:deaf\n")
    start(bed, plain_rank())
    bed.at_step(0)
    began = time.monotonic()
    assert stop(bed, now=True)["status"] == "stopped"
    assert time.monotonic() - began < 3
    assert not status(bed)["stop_wanted"], "the controller stops a run that it restarts"
    stop(bed, wanted=True)
    assert status(bed)["stop_wanted"]
    assert not bed.live_processes()


def test_the_state_of_the_rank_decides_how_a_run_ended(bed: Bed) -> None:
    """The launcher can fail after the worker has finished."""
    bed.make_run(1)
    start(bed, ["/bin/sh", "-c", f"{' '.join(plain_rank(steps=2))}; echo DistNetworkError; exit 1"])
    final = ended(bed)
    assert (final["status"], final["node"]["exit_code"]) == ("finished", 1)


def test_a_launcher_that_waits_for_missing_peers_is_killed(bed: Bed) -> None:
    """torchrun's exit barrier waits minutes for a peer that has exited, long after its own ranks have finished."""
    bed.make_run(1)
    start(bed, ["/bin/sh", "-c", f"{' '.join(plain_rank(steps=2))} & wait; sleep 300; :"])
    until(lambda: bed.state(0).get("status") == "finished", what="the rank's end")
    began = time.monotonic()
    final = ended(bed)
    assert final["status"] == "finished"
    assert EXIT_LIMIT - 1 < time.monotonic() - began < EXIT_LIMIT + 5


def test_ranks_that_torchrun_restarts_may_be_renumbered(bed: Bed) -> None:
    bed.make_run(1, environment="FAKE=1:1:kill\n")
    second, first = (" ".join(plain_rank(steps=20)).replace("RANK=0", f"RANK={rank}") for rank in (1, 0))
    start(bed, ["/bin/sh", "-c", f"{second}; {first}; exit 1", "--max-restarts=3"], ranks=(1,))
    bed.at_step(0)
    state = status(bed)
    assert (state["status"], state["node"]["ranks"], list(state["ranks"])) == ("running", [0], ["0"])
    assert not state["node"]["failures"]
    assert ended(bed)["status"] == "finished"


def test_all_ranks_of_a_torchrun_that_restarts_them_are_watched(bed: Bed) -> None:
    """They start one after the other."""
    bed.make_run(1, environment="FAKE=0:40:plain\n")
    ranks = [" ".join(plain_rank()).replace("RANK=0", f"RANK={rank}") for rank in (1, 0)]
    begun = bed.run_dir(0) / "state/rank1.json"
    script = f"{ranks[0]} & while ! [ -e {begun} ]; do sleep 0.05; done; sleep 0.5; {ranks[1]} & wait; sleep 300"
    start(bed, ["/bin/sh", "-c", script, "--max-restarts=3"], ranks=(2, 3))
    until(lambda: bed.node(0)["ranks"] == [0, 1], 20, "both ranks in the record")
    final = ended(bed)  # the mistake of the one that appeared last ends the run
    assert final["status"] == "failed" and final["ranks"]["0"]["error"]["plain"]


def test_a_name_that_ends_inside_a_character_is_read() -> None:
    """The kernel keeps 15 bytes of a name: those of a program that has a Cyrillic one end inside a character."""
    code = (
        "import ctypes, time; ctypes.CDLL(None).prctl(15, 'Программа.exe'.encode()); print(flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as other:
        try:
            assert other.stdout and other.stdout.readline() and process_stat(other.pid)
        finally:
            other.kill()


def test_a_stop_after_the_plan_refuses_a_start(bed: Bed) -> None:
    bed.make_run(1)
    start(bed, plain_rank(steps=1))
    ended(bed)
    stop(bed, wanted=True)
    assert [run["alive"] for run in ask("list", data_dir=str(bed.run_dir(0).parents[1]))["runs"]] == [False]
    refused = start(bed, plain_rank(steps=1), stop_seen=False)
    assert refused == {"error": STOPPED} and status(bed)["stop_wanted"]
    start(bed, plain_rank(steps=1), stop_seen=True)
    assert ended(bed)["node"]["attempt"] == 2 and not status(bed)["stop_wanted"]


def test_torchrun_does_not_restart_ranks_that_fail_because_of_the_run(bed: Bed) -> None:
    bed.make_run(1, environment="FAKE=0:2:plain\n")
    rank = " ".join(plain_rank())
    start(bed, ["/bin/sh", "-c", f"{rank}; sleep 3; {rank}; exit 1", "--max-restarts=3"])
    final = ended(bed)
    assert final["status"] == "failed" and final["ranks"]["0"]["error"]["plain"]
    assert bed.run_dir(0).joinpath("logs/rank0.log").read_text().count("rank 0 step 1\n") == 1


def test_the_environment_is_clean_and_argv_has_no_secrets(bed: Bed) -> None:
    bed.make_run(1, environment="# a comment\nSECRET=hunter2=x y\n")
    start(bed, plain_rank(), environment={"LOGIN_ONLY": "1"})
    pid = bed.at_step(0)["pid"]
    values = environ(pid)
    assert values["SECRET"] == "hunter2=x y"
    assert values["HOME"] and values["PATH"].startswith(str(Path(sys.executable).parent))
    assert "LOGIN_ONLY" not in values
    for process in bed.live_processes():
        assert b"hunter2" not in Path(f"/proc/{process}/cmdline").read_bytes()
    assert "hunter2" not in json.dumps(status(bed))
    written = [path for path in bed.run_dir(0).rglob("*") if path.is_file() and b"hunter2" in path.read_bytes()]
    assert written == [bed.run_dir(0) / "env"], "and in no log"


def test_a_log_that_has_become_large_is_limited(bed: Bed) -> None:
    bed.make_run(1)
    (bed.run_dir(0) / "logs").mkdir()
    log = bed.run_dir(0) / "logs/rank0.log"
    with log.open("wb") as file:
        file.truncate(LOG_SIZE + 1)
    start(bed, plain_rank())
    until(lambda: log.stat().st_size < LOG_SIZE, what="the end of the large log")
    bed.at_step(0, 2)
    until(lambda: "rank 0 step" in log.read_text(), what="new lines")
    assert log.with_name("rank0.log.1").stat().st_size == LOG_SIZE
    stop(bed, now=True)


def test_logs_are_returned_in_complete_lines_from_an_offset(bed: Bed) -> None:
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
    assert (
        "'..' is not the name of a file" in ask("status", run_dir=str(bed.run_dir(0)), logs_from={"../env": 0})["error"]
    )


def test_a_reused_pid_is_not_signaled() -> None:
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


def test_the_archive_needs_only_the_standard_library(bed: Bed) -> None:
    """The controller sends it to hosts for `run_status`, `run_stop` and `run_list`."""
    command = remote_command("run_list", sys.executable)
    request = remote_input({"data_dir": str(bed.folder)})
    done = subprocess.run(["/bin/sh", "-c", command], input=request, capture_output=True, check=True)
    assert json.loads(done.stdout)["runs"] == []


VICTIM = "VICTIM"  # stands for the pid of a process that is not of the run


def replace(path: Path, content: str | None) -> None:
    """Do what code of a rank can do to a file of its run: remove it, write another one, or put a FIFO or a folder in its place."""
    path.unlink(missing_ok=True)
    if content == "fifo":
        os.mkfifo(path)
    elif content == "folder":
        path.mkdir()
    elif content is not None:
        path.write_text(content)


def test_the_ranks_end_with_the_lease_of_the_host(bed: Bed) -> None:
    bed.make_run(1)
    path = bed.run_dir(0).parents[1] / "leases/7"
    path.parent.mkdir()
    with path.open("ab") as held:
        fcntl.lockf(held, fcntl.LOCK_EX)
        start(bed, plain_rank(), lease=str(path))
        bed.at_step(0, 1)
    final = ended(bed)
    assert final["status"] == "failed" and "the lease of this host has ended (7)" in final["node"]["error"]


@pytest.mark.parametrize("files", table("replaced_run_files"), ids=str)
def test_a_stop_needs_nothing_that_the_run_wrote(bed: Bed, files: dict[str, str | None]) -> None:
    bed.make_run(1)
    start(bed, plain_rank())
    bed.at_step(0, 1)
    with subprocess.Popen(["sleep", "60"]) as victim:
        born = (process_stat(victim.pid) or ("", 0, 0))[2]
        for name, content in files.items():
            text = content and content.replace(VICTIM, str(victim.pid)).replace("START", str(born))
            replace(bed.run_dir(0) / name, text)
        [state] = list_runs({"data_dir": str(bed.run_dir(0).parents[1])})["runs"]
        assert state["alive"] or state["left"], state
        record = str(files.get("state/node.json", "status"))
        assert (state["node"] is None) == ("status" not in record or "5" in record)
        plain = status_here({"run_dir": str(bed.run_dir(0)), "plain": True})
        assert (plain["status"], plain["alive"], plain["node"]) == ("unreadable", True, None)
        stop(bed, grace=0.2, wanted=True)
        until(lambda: not bed.live_processes(), 5, what="the end of all processes")
        assert victim.poll() is None, "the record names the process of another user"
        victim.kill()
