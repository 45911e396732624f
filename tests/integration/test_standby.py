"""A run that fails is restarted from its standby process; without a restart, no process remains."""

from __future__ import annotations

import os
import pwd
import re
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest
from run_hosts import FAKE_RANK, Bed, bed, parent_of, until
from standby_bed import WAIT, ask, fail, log, prepare, stage_trainer, start, train_command, waiting

from trainer.supervise.link_free import link_free
from trainer.supervise.processes import RUN_VARIABLE, descendants, environ, held_gpus, is_running
from trainer.supervise.run_files import SupervisorError, is_alive
from trainer.supervise.start_request import StartRequest
from trainer.supervise.stop import stop
from trainer.supervise.waiting import REQUEST, STATE, take_request
from trainyard.run.follow.manage_runs import manage_runs
from trainyard.run.launch_options import LaunchOptions
from trainyard.wire.connection import Host, HostConnection
from trainyard.wire.openssh import LocalTransport

__all__ = ["bed"]


def test_a_restart_forks_from_the_standby_process(bed: Bed) -> None:
    prepare(bed)
    first = start(bed)
    supervisor, standby = fail(bed)
    status = ask(bed, "status")
    assert (status["status"], status["alive"], status["node"]["attempt"]) == ("failed", False, 1)
    assert status["waits"] and ask(bed, "list", data_dir=str(bed.run_dir(0).parents[1]))["runs"][0]["waits"]
    assert status["node"]["failures"][0]["signal"] == "SIGKILL"
    assert bed.live_processes() and set(bed.live_processes()) == {supervisor, standby}
    second = start(bed)
    assert (first["pid"], second["pid"]) == (supervisor, supervisor)
    rank = bed.at_step(0, 1)["pid"]
    assert parent_of(parent_of(rank)) == supervisor and bed.node(0)["attempt"] == 2
    assert standby in descendants(supervisor) and log(bed).count("imported") == 1
    assert is_alive(link_free(bed.run_dir(0))) and not (bed.run_dir(0) / STATE).exists()
    assert ask(bed, "stop", only_standby=True)["status"] == "running", "it leaves a run alone"
    bed.at_step(0, bed.state(0)["step"] + 1)
    assert ask(bed, "stop", now=True)["status"] == "stopped"
    assert not bed.live_processes(), "a stop ends the standby process, too"


def test_a_wait_ends_by_itself_or_by_a_stop(bed: Bed) -> None:
    prepare(bed)
    start(bed, standby=0.5)
    os.kill(bed.at_step(0, 1)["pid"], signal.SIGKILL)
    until(lambda: not bed.live_processes(), 10, what="the end of the wait")
    assert bed.node(0)["status"] == "failed"
    start(bed)
    fail(bed)
    assert ask(bed, "stop", only_standby=True)["status"] == "failed"
    assert not bed.live_processes()
    start(bed)
    fail(bed)
    assert ask(bed, "stop") == {"status": "failed", "killed": 0}
    assert not bed.live_processes() and not (bed.run_dir(0) / STATE).exists()


@pytest.mark.parametrize("how", [{"now": True, "keep": True}, {"keep": True, "grace": 5}])
def test_a_stop_before_a_restart_keeps_the_standby_process(bed: Bed, how: dict[str, Any]) -> None:
    prepare(bed)
    pid = start(bed)["pid"]
    bed.at_step(0, 1)
    assert ask(bed, "stop", **how)["status"] == "stopped"
    assert waiting(bed)[0] == pid and len(bed.live_processes()) == 2
    assert bed.state(0)["status"] == ("training" if how.get("now") else "stopped")
    assert start(bed)["pid"] == pid
    bed.at_step(0, 1)


def test_stopping_all_runs_ends_what_waits(bed: Bed) -> None:
    prepare(bed)
    start(bed, hosts=["node1"])
    fail(bed)
    host = Host("node1", "127.0.0.1", str(bed.run_dir(0).parents[1]), sys.executable, backend="process")
    lines: list[str] = []
    stopped = manage_runs(
        "stopped",
        "",
        [host],
        lambda host: HostConnection(host, LocalTransport()),
        LaunchOptions(),
        lines.append,
        every=True,
    )
    assert stopped["changed"] and lines == ["run r: node1 failed"] and not bed.live_processes()
    assert bed.node(0)["status"] == "failed"


def test_after_a_user_stopped_the_run_or_made_a_mistake_nothing_waits(bed: Bed) -> None:
    prepare(bed, "FAKE=0:2:plain\n")
    start(bed)
    until(lambda: not bed.live_processes() and bed.node(0).get("ended"), 10, what="the end")
    assert bed.node(0)["status"] == "failed"


@pytest.mark.parametrize("victim", ["waiting", "supervisor", "running"])
def test_without_its_standby_process_a_run_starts_again_with_imports(bed: Bed, victim: str) -> None:
    prepare(bed)
    first = start(bed)["pid"]
    if victim == "running":
        bed.at_step(0, 1)
        (standby,) = [pid for pid in descendants(first) if parent_of(pid) == first and not descendants(pid)]
        os.kill(standby, signal.SIGKILL)
        bed.at_step(0, bed.state(0)["step"] + 2)
        os.kill(bed.state(0)["pid"], signal.SIGKILL)
    else:
        supervisor, standby = fail(bed)
        os.kill(standby if victim == "waiting" else supervisor, signal.SIGKILL)
    until(lambda: not bed.live_processes(), 5, what="the end of both processes")
    second = start(bed)["pid"]
    bed.at_step(0, 1)
    assert second != first and log(bed).count("imported") == 2


def test_another_environment_is_not_served(bed: Bed) -> None:
    prepare(bed, "OMP_NUM_THREADS=1\nTRAINYARD_RESTARTS=1\n")
    pid = start(bed)["pid"]
    fail(bed)
    bed.write_env(0, f"FAKE_RANK={FAKE_RANK}\nOMP_NUM_THREADS=1\nTRAINYARD_RESTARTS=2\n")
    assert start(bed)["pid"] == pid
    rank = bed.at_step(0, 1)["pid"]
    assert environ(rank)["TRAINYARD_RESTARTS"] == "2" and "not used" not in log(bed)
    fail(bed)
    bed.write_env(0, f"FAKE_RANK={FAKE_RANK}\nOMP_NUM_THREADS=2\nSECRET=abc\n")
    start(bed)
    bed.at_step(0, 1)
    assert environ(bed.state(0)["pid"])["OMP_NUM_THREADS"] == "2"
    assert re.findall("supervise: the standby process is not used: (.*)", log(bed)) == [
        "the variable OMP_NUM_THREADS changed"
    ]
    assert log(bed).count("imported") == 2


def test_another_trainer_or_unit_is_not_served(bed: Bed) -> None:
    prepare(bed)
    pid = start(bed)["pid"]
    fail(bed)
    with zipfile.ZipFile(bed.run_dir(0) / "trainer.zip", "a") as archive:
        archive.writestr("trainer/new.py", "")
    second = start(bed)["pid"]
    assert second != pid and not is_running(pid)
    fail(bed)
    third = start(bed, standby=0)["pid"]
    bed.at_step(0, 1)
    assert third != second and not is_running(second) and log(bed).count("imported") == 2


@pytest.mark.parametrize(
    ("environment", "says"),
    [("", ""), ("REFUSE=1\n", "a test"), ("FAKE_STANDBY=none\n", "it ended during the imports")],
    ids=["serves", "refuses", "cannot import"],
)
def test_a_run_ends_with_and_without_its_standby_process(bed: Bed, environment: str, says: str) -> None:
    prepare(bed, environment)
    start(bed, steps=3)
    until(lambda: bed.node(0).get("ended"), 10, what="the end")
    until(lambda: not bed.live_processes(), 5, what="the end of the supervisor")
    assert bed.node(0)["status"] == "finished"
    assert re.findall("the standby process is not used: (.*)", log(bed)) == ([says] if says else [])


def test_stop_during_the_imports_ends_them(bed: Bed) -> None:
    prepare(bed, "FAKE_STANDBY=60\n")
    start(bed)
    assert ask(bed, "stop", now=True)["status"] == "stopped"
    assert not bed.live_processes()


def test_the_imports_begin_while_other_hosts_get_ready(bed: Bed) -> None:
    prepare(bed)
    start(bed, hold=True)
    until(lambda: "imported" in log(bed), 10, what="the imports")
    assert bed.node(0)["status"] == "starting" and not bed.state(0)
    assert ask(bed, "stop", now=True)["status"] == "stopped" and not bed.live_processes()
    start(bed, hold=True)
    (bed.run_dir(0) / "state/go").touch()
    bed.at_step(0, 1)


def test_another_run_may_use_the_host_and_its_gpus_meanwhile(bed: Bed) -> None:
    gpu = f"GPU-{os.getpid()}"
    prepare(bed, f"CUDA_VISIBLE_DEVICES={gpu}\n")
    bed.make_run(1, run="other")
    start(bed)
    bed.at_step(0, 1)
    assert held_gpus("other").get(gpu) == "r"
    fail(bed)
    assert gpu not in held_gpus("other")
    command = ["/usr/bin/env", "RANK=0", sys.executable, str(FAKE_RANK), "1000", "0.05"]
    assert "pid" in ask(bed, "start", run_dir=str(bed.run_dir(0, "other")), command=command, backend="process")
    assert "busy: run other" in start(bed)["error"]


def test_a_process_that_calls_itself_waiting_does_not_survive_a_stop(bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as a rank that has killed its supervisor: it writes the record of the wait again whenever that is removed."""
    prepare(bed)
    (bed.run_dir(0) / "state").mkdir(exist_ok=True)
    path = bed.run_dir(0) / STATE
    code = f"""
import json, os, pathlib, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
start = int(open("/proc/self/stat").read().rpartition(")")[2].split()[19])
both = {{"pid": os.getpid(), "pid_start": start, "standby": os.getpid(), "standby_start": start}}
while True:
    pathlib.Path({str(path)!r} + ".new").write_text(json.dumps(both))
    os.rename({str(path)!r} + ".new", {str(path)!r})
    time.sleep(0.001)
"""
    process = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, RUN_VARIABLE: str(bed.run_dir(0))})
    try:
        until(lambda: waiting(bed), 10, what="the record of the wait")
        monkeypatch.setattr("trainer.supervise.waiting.END_LIMIT", 0.1)
        assert stop({"run_dir": str(bed.run_dir(0))})["killed"] == 1 and not is_running(process.pid)
    finally:
        process.kill()
        process.wait()


@pytest.mark.privileged
def test_another_user_cannot_hand_over_a_request(bed: Bed) -> None:
    prepare(bed)
    start(bed)
    supervisor, standby = fail(bed)
    run_dir, nobody = bed.run_dir(0), pwd.getpwnam("nobody")
    for folder in (run_dir, *run_dir.parents):
        if folder == Path("/tmp"):
            break
        folder.chmod(0o755)
    write = ["/bin/sh", "-c", f"ls {run_dir} && echo x > {run_dir / REQUEST}"]
    done = subprocess.run(write, user=nobody.pw_uid, group=nobody.pw_gid, capture_output=True, text=True, check=False)
    assert "state" in done.stdout and "Permission denied" in done.stderr
    links = [str(entry.readlink()) for entry in Path(f"/proc/{standby}/fd").iterdir()]
    assert [link.partition(":")[0] for link in links].count("socket") == 1
    sockets = Path("/proc/net/unix").read_text()
    inode = next(link for link in links if link.startswith("socket")).strip("socket:[]")
    (line,) = [line for line in sockets.splitlines() if f" {inode}" in line]
    assert line.split()[-1] == inode, "the socket has no name to which another process could connect"
    (run_dir / REQUEST).write_text(StartRequest(str(run_dir), ["/bin/true"]).to_json())
    os.chown(run_dir / REQUEST, nobody.pw_uid, nobody.pw_gid)
    until(lambda: not is_running(supervisor), 5, what="the end of the supervisor")
    assert "is not from the user of the run" in log(bed) and not bed.live_processes()
    for mode, owner in ((0o644, nobody.pw_uid), (0o600, nobody.pw_uid), (0o660, os.getuid())):
        (run_dir / REQUEST).chmod(mode)
        os.chown(run_dir / REQUEST, owner, -1)
        with pytest.raises(SupervisorError):
            take_request(link_free(run_dir))
    (run_dir / REQUEST).chmod(0o600)
    assert take_request(link_free(run_dir))
    for damaged in ("{", "[]", '{"flags": []}'):
        (run_dir / REQUEST).write_text(damaged)
        with pytest.raises(SupervisorError, match="damaged"):
            take_request(link_free(run_dir))


@pytest.mark.slow
def test_the_trainer_resumes_from_a_standby_process(bed: Bed) -> None:
    """With the real trainer: the second start imports nothing, and continues from the checkpoint."""
    stage_trainer(bed)
    run_dir = bed.run_dir(0)

    def begin() -> float:
        began = time.monotonic()
        answer = ask(bed, "start", command=train_command(bed), backend="process", standby=WAIT)
        assert "pid" in answer, answer
        return began

    cold = begin()
    bed.at_step(0, 12)
    cold = time.monotonic() - cold
    supervisor, standby = fail(bed)
    shared = Path(f"/proc/{standby}/smaps_rollup").read_text()
    before = (run_dir / "logs/rank0.log").read_text()
    warm = begin()
    bed.at_step(0, 12)
    warm = time.monotonic() - warm
    assert warm < cold / 2, (warm, cold, shared)
    assert parent_of(parent_of(bed.state(0)["pid"])) == supervisor
    after = (run_dir / "logs/rank0.log").read_text().removeprefix(before)
    assert "step" in after and bed.state(0)["step"] >= 12
    ask(bed, "stop", now=True)
    assert not bed.live_processes()
