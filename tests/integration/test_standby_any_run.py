"""With standby=always, the standby process of a run that has ended serves the next run of the host."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from run_hosts import FAKE_RANK, Bed, bed, parent_of, until
from standby_bed import WAIT, ask, fail, log, prepare, stage_trainer, start, train_command, waiting

from trainer.supervise.files import is_locked
from trainer.supervise.options import StartRequest
from trainer.supervise.processes import RUN_VARIABLE, environ, held_gpus, is_running, run_processes
from trainer.supervise.start import suits
from trainer.supervise.waiting import STATE

__all__ = ["bed"]


def finish(bed: Bed, run: str = "r") -> tuple[int, int]:
    """Run two steps; return the pids of the supervisor and of the standby process that then wait for any run."""
    answer = start(bed, steps=2, run=run, any_run=True)
    assert "pid" in answer, answer
    supervisor, standby = until(lambda: waiting(bed, run), 10, what="the wait for the next run")
    assert bed.node(0, run)["status"] == "finished"
    return supervisor, standby


def check_places(run_dir: Path, *pids: int) -> None:
    """Check that processes name a run in their environment and work in its folder."""
    for pid in pids:
        assert environ(pid)[RUN_VARIABLE] == str(run_dir) and Path(f"/proc/{pid}/cwd").resolve() == run_dir


def test_the_next_run_imports_nothing(bed: Bed) -> None:
    prepare(bed)
    prepare(bed, run="other")
    supervisor, standby = finish(bed)
    assert start(bed, run="other", any_run=True)["pid"] == supervisor
    rank = bed.at_step(0, 1, run="other")["pid"]
    other = bed.run_dir(0, "other")
    assert not run_processes(bed.run_dir(0)), "no process counts as one of the first run"
    assert {supervisor, standby, rank} <= set(run_processes(other))
    check_places(other, supervisor, standby, rank)
    assert log(bed).count("imported") == 1 and "imported" not in log(bed, "other")
    assert not (bed.run_dir(0) / "state/standby.json").exists()
    # The first run is started again beside it, as on other GPUs, and stopped: the second one is not affected.
    assert ask(bed, "stop", now=True)["killed"] == 0
    bed.at_step(0, bed.state(0, "other")["step"] + 2, run="other")
    assert ask(bed, "stop", "other", now=True)["status"] == "stopped"
    assert not bed.live_processes(), "a stop ends the standby process, too"


def test_a_run_that_fails_serves_the_next_one_too(bed: Bed) -> None:
    prepare(bed, "FAKE=0:2:plain\n")
    prepare(bed, "FAKE=0:2:plain\n", run="other")
    pid = start(bed, any_run=True)["pid"]
    until(lambda: waiting(bed), 10, what="the wait")
    assert bed.node(0)["status"] == "failed"
    assert start(bed, run="other", any_run=True)["pid"] == pid
    until(lambda: waiting(bed, "other"), 10, what="the second wait")


def test_the_first_run_folder_may_be_removed(bed: Bed) -> None:
    prepare(bed)
    prepare(bed, run="other")
    supervisor, _ = finish(bed)
    assert start(bed, run="other", any_run=True)["pid"] == supervisor
    shutil.rmtree(bed.run_dir(0))
    bed.at_step(0, 1, run="other")
    assert fail(bed, "other")[0] == supervisor
    assert start(bed, run="other", any_run=True)["pid"] == supervisor
    bed.at_step(0, 1, run="other")


def test_without_the_folder_of_the_last_run_nothing_waits(bed: Bed) -> None:
    prepare(bed)
    finish(bed)
    shutil.rmtree(bed.run_dir(0))
    until(lambda: not bed.live_processes(), 5, what="the end of the wait")


@pytest.mark.parametrize(
    "how", [{"any_run": False}, {"any_run": True, "standby": 0.0}, {"any_run": True, "trainer": 1}]
)
def test_a_run_that_does_not_suit_ends_the_wait(bed: Bed, how: dict[str, float]) -> None:
    prepare(bed)
    prepare(bed, run="other")
    supervisor, standby = finish(bed)
    if how.pop("trainer", 0):
        with (bed.run_dir(0, "other") / "trainer.zip").open("ab") as archive:
            archive.write(b"a comment")
    assert start(bed, run="other", **how)["pid"] != supervisor
    bed.at_step(0, 1, run="other")
    assert not is_running(supervisor) and not is_running(standby)


def test_a_command_that_cannot_be_forked_is_started_without_it(bed: Bed) -> None:
    """Such as a teacher, or a torchrun of another interpreter."""
    prepare(bed)
    prepare(bed, run="other")
    supervisor, standby = finish(bed)
    command = ["/usr/bin/env", "RANK=0", sys.executable, str(FAKE_RANK), "1000", "0.02"]
    how = {"command": command, "backend": "process", "standby": WAIT, "any_run": True}
    assert ask(bed, "start", "other", **how)["pid"] == supervisor
    bed.at_step(0, 1, run="other")
    assert "this start needs other imports" in log(bed, "other") and not is_running(standby)


def test_a_false_record_of_a_wait_stops_nothing(bed: Bed) -> None:
    """Ranks can write the records of all runs. No field of a record becomes the name of a unit, and a damaged one is ignored."""
    prepare(bed)
    prepare(bed, run="other")
    supervisor, _ = finish(bed)
    path = bed.run_dir(0) / STATE
    record = json.loads(path.read_text())
    for change in ({"unit": None}, {"reachable": "x"}, {"trainer": 1, "unit": "ssh.service"}):
        path.write_text(json.dumps(record | change))
        assert not suits(json.loads(path.read_text()), wanted(bed, "other"), bed.run_dir(0, "other"))
    path.write_text(
        json.dumps({"any_run": True, **{name: record[name] for name in record if "pid" in name or "standby" in name}})
    )
    assert start(bed, run="other", any_run=True)["pid"] != supervisor
    bed.at_step(0, 1, run="other")


def wanted(bed: Bed, run: str) -> StartRequest:
    return StartRequest(run_dir=str(bed.run_dir(0, run)), command=[], standby=WAIT, any_run=True)


def test_a_waiting_supervisor_with_the_same_gpus_is_taken(bed: Bed) -> None:
    for number, run in enumerate(("r", "s", "t")):
        prepare(bed, f"CUDA_VISIBLE_DEVICES=GPU-{number % 2}\n", run=run)
    how = {"any_run": True, "steps": 2}
    start(bed, run="r", devices=["GPU-0"], **how)
    first = until(lambda: waiting(bed), 10, what="the first wait")[0]
    second = start(bed, run="s", devices=["GPU-1"], **(how | {"steps": 1000}))["pid"]
    bed.at_step(0, 1, run="s")
    assert second != first
    third = start(bed, run="t", devices=["GPU-0"], **how)["pid"]
    until(lambda: waiting(bed, "t"), 10, what="the second wait")
    assert third not in (first, second) and not is_running(first), "it ended with the start that could not take it"


def test_another_environment_imports_again(bed: Bed) -> None:
    prepare(bed, "OMP_NUM_THREADS=1\n")
    prepare(bed, "OMP_NUM_THREADS=2\n", run="other")
    supervisor, standby = finish(bed)
    assert start(bed, run="other", any_run=True)["pid"] == supervisor
    assert environ(bed.at_step(0, 1, run="other")["pid"])["OMP_NUM_THREADS"] == "2"
    assert "the variable OMP_NUM_THREADS changed" in log(bed, "other") and not is_running(standby)


def test_a_restart_of_another_run_is_left_alone(bed: Bed) -> None:
    prepare(bed)
    prepare(bed, run="other")
    start(bed)
    supervisor, _ = fail(bed)
    assert start(bed, run="other", any_run=True)["pid"] != supervisor
    bed.at_step(0, 1, run="other")
    assert waiting(bed)[0] == supervisor


def test_a_stop_of_the_last_run_or_a_signal_ends_the_wait(bed: Bed) -> None:
    prepare(bed)
    finish(bed)
    assert ask(bed, "status")["waits"]
    assert ask(bed, "stop") == {"status": "finished", "killed": 0}
    assert not bed.live_processes()
    prepare(bed, run="other")
    supervisor, _ = finish(bed, "other")
    os.kill(supervisor, signal.SIGTERM)
    until(lambda: not bed.live_processes(), 5, what="the end of the wait")


def test_the_gpus_of_the_waiting_processes_are_free(bed: Bed) -> None:
    gpu = f"GPU-{os.getpid()}"
    prepare(bed, f"CUDA_VISIBLE_DEVICES={gpu}\n")
    prepare(bed, f"CUDA_VISIBLE_DEVICES={gpu}\n", run="other")
    finish(bed)
    assert gpu not in held_gpus("third")
    start(bed, run="other", any_run=True)
    bed.at_step(0, 1, run="other")
    assert held_gpus("third").get(gpu) == "other"


def test_a_lease_has_no_standby_process_after_its_end(bed: Bed, tmp_path: Path) -> None:
    prepare(bed)
    lease = tmp_path / "lease"
    lease.touch()
    holder = subprocess.Popen(["flock", "--no-fork", str(lease), "sleep", "60"])
    try:
        until(lambda: is_locked(lease), 5, what="the lease")
        answer = start(bed, steps=2, any_run=True, lease=str(lease))
        assert "pid" in answer, answer
        until(lambda: bed.node(0).get("ended") and not bed.live_processes(), 10, what="the end of all processes")
    finally:
        holder.terminate()
        holder.wait()


@pytest.mark.slow
def test_the_trainer_serves_a_run_with_another_strategy(bed: Bed) -> None:
    """With the real trainer. The folder of the first run is gone before the second one begins to train."""
    stage_trainer(bed, max_steps=2)
    stage_trainer(bed, "other", max_steps=3, strategy="fsdp", lora_r=4)
    how = {"backend": "process", "standby": WAIT, "any_run": True}
    assert "pid" in ask(bed, "start", command=train_command(bed), **how)
    supervisor, standby = until(lambda: waiting(bed), 120, what="the wait for the next run")
    second = ask(bed, "start", "other", command=train_command(bed, "other"), hold=True, **how)
    assert second["pid"] == supervisor
    shutil.rmtree(bed.run_dir(0))
    (bed.run_dir(0, "other") / "state/go").touch()
    rank = bed.at_step(0, 1, run="other")["pid"]
    assert parent_of(parent_of(rank)) == supervisor and rank in run_processes(bed.run_dir(0, "other"))
    check_places(bed.run_dir(0, "other"), supervisor, standby, rank)
    until(lambda: waiting(bed, "other"), 60, what="the end of the second run")
    assert bed.node(0, "other")["status"] == "finished" and waiting(bed, "other") == [supervisor, standby]
