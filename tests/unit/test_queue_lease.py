"""Leases of the queue: Slurm's words for a job, and the step that holds a host."""

import fcntl
import io
import json
import math
import os
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tables import table

from trainer.config import RunSpec
from trainer.supervise.link_free import link_free
from trainer.supervise.run_files import SupervisorError, check_lease, is_locked, read_json, write_json
from trainer.supervise.start import check_idle
from trainyard.queue import lease_step
from trainyard.queue import queue_service as service
from trainyard.queue import slurm_lease as lease
from trainyard.queue.run_folder import QueuedStart, program_archive, read_session
from trainyard.remote import lease_state as remote_lease
from trainyard.remote.queue_job import submit
from trainyard.run.launch_options import LaunchOptions
from trainyard.run.types import PreparedRun, StagedFile
from trainyard.wire.connection import Host, Login

REPO = Path(__file__).resolve().parents[2]
# Slurm 22.05 on three lab hosts, with names that a user chose.
RUNNING = (
    "JobId=7 JobName=a=b UserId=tester(1000) GroupId=tester(1000) MCS_label=N/A Priority=1 Partition=low Requeue=1 "
    "Restarts=2 BatchFlag=1 TimeLimit=1-02:30:00 StartTime=2026-11-25T07:10:00 EndTime=2026-11-25T07:10:30 JobState=RUNNING Reason=None Dependency=(null) ExitCode=0:0 ReqNodeList=(null) "
    "ExcNodeList=node9 NodeList=node[1-2] BatchHost=node1 NumNodes=2 NumCPUs=3 CPUs/Task=1 OverSubscribe=OK "
    "Nodes=node1 CPU_IDs=0-1 Mem=100 GRES=gpu:standingpu:1(IDX:0) Nodes=node2 CPU_IDs=1 Mem=100 GRES= Comment=x"
)


def names(text: str) -> list[str]:
    """Expand the only list of hosts of these tests."""
    return ["node1", "node2"] if text == "node[1-2]" else text.split(",")


def host(name: str, **more: object) -> Host:
    """Return a host of the inventory."""
    return Host(name=name, address="10.0.0.1", data_dir="/srv/t", python="/srv/t/venv/bin/python", **more)  # type: ignore[arg-type]


def test_a_job_is_read() -> None:
    job = lease.parse_job(RUNNING, names)
    assert (job.number, job.state, job.restart, job.whole) == (7, "RUNNING", 2, False)
    assert job.name == "a=b" and job.hosts == ("node1", "node2") and job.cpus == {"node1": (0, 1), "node2": (1,)}
    waits = lease.parse_job(
        "JobId=8 JobState=PENDING Reason=Resources NodeList=(null) OverSubscribe=NO Restarts=0", names
    )
    # A preempted job: its EndTime is the end of the grace time.
    assert job.end - time.mktime((2026, 11, 25, 7, 10, 0, 0, 0, -1)) == 26.5 * 3600 and waits.end == math.inf
    assert lease.parse_job(RUNNING.replace("1-02:30:00", "UNLIMITED"), names).end == math.inf
    assert waits.hosts == () and waits.whole and waits.reason == "Resources"


@pytest.mark.parametrize(
    ("told", "why"),
    [
        ({"held": True, "restart": 2, "ending": False}, ""),
        ({"held": True, "restart": 2, "ending": True}, lease.ASKED_FOR),
        ({"held": True, "restart": 2, "ending": True, "time": 904.0}, lease.ASKED_FOR),
        ({"held": True, "restart": 2, "ending": True, "time": 906.0}, lease.TIME_LIMIT),
        # The step of a preempted run often ends before its driver asks.
        ({"held": False, "restart": 2, "ending": True}, lease.ASKED_FOR),
        ({"held": False, "restart": 2, "ending": False}, "the lease has ended"),
        ({"held": False, "restart": 1, "ending": True}, "the lease has ended"),
    ],
)
def test_a_lost_lease_has_a_reason(told: dict[str, object], why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    job = replace(lease.parse_job(RUNNING, names), hosts=("node1",), end=1000.0)
    leases = lease.Leases([host("node1")], "r", job, lambda name: None)  # type: ignore[arg-type,return-value]
    monkeypatch.setattr(leases, "ask", lambda: {"node1": {"time": 0.0, **told}})
    assert leases.lost() == ({"node1": why} if why else {})


@pytest.mark.parametrize("text", ["a", "3-1", "0-99999999"])
def test_a_wrong_list_of_processors_is_refused(text: str) -> None:
    assert lease.number_list("0-2,7") == (0, 1, 2, 7)
    with pytest.raises(ValueError):
        lease.number_list(text)


def test_hosts_keep_to_what_slurm_granted() -> None:
    job = lease.parse_job(RUNNING, names)
    found = lease.leased_hosts(
        [host("node2"), host("node1", gpus=("3",)), host("node3")], job, {"node1": ["1"], "node2": []}
    )
    assert [(one.name, one.gpus, one.cpus) for one in found] == [("node2", (), (1,)), ("node1", ("1",), (0, 1))]
    assert found[0].lease == "/srv/t/leases/7"
    whole = lease.leased_hosts([host("node1", gpus=("3",))], replace(job, whole=True), {"node1": []})
    assert whole[0].gpus == ("3",) and whole[0].cpus == ()


def start_step(tmp_path: Path) -> subprocess.Popen[bytes]:
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(REPO), "SLURM_JOB_ID": "7", "SLURMD_NODENAME": "n"}
    environment |= {"SLURM_RESTART_COUNT": "3", "CUDA_VISIBLE_DEVICES": "1,0"}
    words = [sys.executable, "-S", "-m", "trainyard.queue.lease_step", "r", json.dumps({"n": str(tmp_path)})]
    (tmp_path / "leases/7.json").unlink(missing_ok=True)
    process = subprocess.Popen(words, env=environment)
    wait_for((tmp_path / "leases/7.json").exists)
    return process


@pytest.fixture
def step(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The step of job 7 on a host whose data directory is `tmp_path`, as srun starts it."""
    process = start_step(tmp_path)
    yield process
    process.kill()
    process.wait()


def wait_for(condition: object) -> None:
    """Wait until a condition holds."""
    deadline = time.monotonic() + 20
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.01)


def ask(folder: Path, **more: object) -> dict[str, object]:
    """Ask the host for the lease of job 7."""
    return remote_lease.lease({"path": f"{folder}/leases/7", "run_dir": f"{folder}/runs/r", **more})


def test_the_driver_ends_a_lease_with_its_exit_code(step: subprocess.Popen[bytes], tmp_path: Path) -> None:
    found = {"held": True, "restart": 3, "gpus": ["1", "0"], "ending": False, "alive": False}
    told = ask(tmp_path)
    assert abs(float(str(told.pop("time"))) - time.time()) < 60 and told == found
    check_lease(str(tmp_path / "leases/7"))
    ask(tmp_path, end=lease_step.FINISHED, restart=2)  # an order for an earlier allocation has no effect
    ask(
        tmp_path, end=lease_step.FINISHED, restart=3, run_dir=f"{tmp_path}/runs/other"
    )  # nor for an earlier job of this number
    with pytest.raises(subprocess.TimeoutExpired):
        step.wait(0.4)
    ask(tmp_path, end=lease_step.FINISHED, restart=3)
    assert step.wait(10) == lease_step.FINISHED
    assert ask(tmp_path)["held"] is False
    with pytest.raises(SupervisorError, match="the lease of this host has ended"):
        check_lease(str(tmp_path / "leases/7"))


def test_a_rank_keeps_no_lease(step: subprocess.Popen[bytes], tmp_path: Path) -> None:
    """Its unit shows the file read-only, which the locks of both kinds permit that it takes when the step has ended."""
    code = "import fcntl, sys; one, two = (open(sys.argv[1], 'rb') for _ in '12'); fcntl.flock(one, fcntl.LOCK_EX); "
    code += "fcntl.lockf(two, fcntl.LOCK_SH); print(flush=True); sys.stdin.read()"
    words = [sys.executable, "-c", code, tmp_path / "leases/7"]
    step.kill()
    step.wait()
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as rank:
        assert rank.stdout and rank.stdout.readline() and ask(tmp_path)["held"] is False
        again = start_step(tmp_path)
        assert ask(tmp_path)["held"] is True
        again.kill()
        again.wait()
        rank.kill()


def test_sigterm_asks_for_a_checkpoint_and_waits_for_the_ranks(step: subprocess.Popen[bytes], tmp_path: Path) -> None:
    run_dir = tmp_path / "runs/r"
    run_dir.mkdir(parents=True)
    with (run_dir / "lock").open("ab") as ranks:
        fcntl.flock(ranks, fcntl.LOCK_EX)
        step.terminate()
        wait_for((run_dir / "stop").exists)
        wait_for(lambda: ask(tmp_path)["ending"])
        assert step.poll() is None and ask(tmp_path)["held"]
    assert step.wait(10) == lease_step.AGAIN


def test_a_lease_without_ranks_ends_at_once(step: subprocess.Popen[bytes], tmp_path: Path) -> None:
    step.terminate()
    assert step.wait(10) == lease_step.AGAIN and not (tmp_path / "runs/r/stop").exists()


def test_leased_runs_share_processors_but_no_gpu(tmp_path: Path) -> None:
    beside = tmp_path / "runs/other"
    (beside / "state").mkdir(parents=True)
    with (beside / "lock").open("ab") as running:
        fcntl.flock(running, fcntl.LOCK_EX)
        write_json(beside / "state/node.json", {"devices": ["GPU-1"], "lease": "/x/leases/1"})
        check_idle(link_free(tmp_path / "runs/r"), ["GPU-2"], "/x/leases/2")
        check_idle(link_free(tmp_path / "runs/r"), [], "/x/leases/2")
        with pytest.raises(SupervisorError, match="uses GPU-1"):
            check_idle(link_free(tmp_path / "runs/r"), ["GPU-1"], "/x/leases/2")
        with pytest.raises(SupervisorError, match="busy"):
            check_idle(link_free(tmp_path / "runs/r"), [])


def slurm(folder: Path, monkeypatch: pytest.MonkeyPatch, **programs: str) -> None:
    """Put stand-ins for Slurm's programs on PATH: shell scripts."""
    (folder / "bin").mkdir()
    for name, text in programs.items():
        (folder / "bin" / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}/bin:{os.environ['PATH']}")


def test_a_job_is_released_when_its_state_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "run-1"
    folder.mkdir()
    write_json(folder / "session.json", {"hosts": [{"name": "n'1", "data_dir": "/srv/a b"}]})
    log = f'echo "$@" >>{tmp_path}/log'
    slurm(
        tmp_path,
        monkeypatch,
        sbatch=f"{log}; cat >{tmp_path}/job; echo 12",
        scontrol=f"{log}; cat {folder}/state.json >/dev/null",
    )
    assert submit(folder, ["--nodes=2"]) == 12
    assert json.loads((folder / "state.json").read_text())["job"] == 12
    asked, *then = (tmp_path / "log").read_text().splitlines()
    assert asked.startswith("--parsable --hold --comment=trainyard-new --nodes=2 --requeue")
    assert then == ["release 12", "update JobId=12 Comment=trainyard-released"]
    script = (tmp_path / "job").read_text()
    assert subprocess.run(["sh", "-n"], input=script, text=True).returncode == 0
    words = subprocess.run(["sh", "-c", script.replace("srun", "printf '%s\\n' srun")], capture_output=True, text=True)
    assert '{"n\'1": "/srv/a b"}' in words.stdout.splitlines() and words.returncode == 75


def test_a_refused_job_leaves_slurms_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slurm(tmp_path, monkeypatch, sbatch="echo 'sbatch: error: Invalid partition' >&2; exit 1")
    with pytest.raises(SupervisorError, match=r"^sbatch: Invalid partition$"):
        submit(tmp_path, [])


def test_the_service_starts_drivers_of_jobs_with_hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slurm(tmp_path, monkeypatch, squeue="echo '1|PENDING|c d|a|Resources'; echo '2|RUNNING|(null)|b|None'")
    for name, job, phase in (("a", 1, "waiting"), ("b", 2, "waiting"), ("c", 3, "running"), ("d", 4, "finished")):
        (tmp_path / "queue" / name).mkdir(parents=True)
        write_json(tmp_path / f"queue/{name}/state.json", {"job": job, "phase": phase})
    one = service.Service(tmp_path / "queue", sys.executable, tmp_path / "programs")
    assert one.runs() == {"a": (1, True), "b": (2, True), "c": (3, True), "d": (4, False)}
    assert service.job_states() == {1: ("PENDING", "c d", "a", "Resources"), 2: ("RUNNING", "(null)", "b", "None")}
    write_program(tmp_path, "b", "import sys; print(sys.argv[1]); sys.exit(1)")
    one.start("b")
    one.start("b")
    one.drivers["b"].wait(20)
    one.reap()
    one.start("b")  # a driver that crashed waits
    assert not one.drivers and one.failures == {"b": 1}
    assert (tmp_path / "queue/b/driver.log").read_text() == f"{tmp_path}/queue/b\n"
    one.start("a")  # without a program it waits, too
    assert not one.drivers
    write_program(tmp_path, "a", "")
    one.not_before.clear()
    one.start("a")
    one.drivers["a"].wait(20)
    one.reap()
    assert not one.drivers and one.failures["a"] == 0


def write_program(folder: Path, run: str, driver: str) -> None:
    """Write the program of a run with this driver, as the verb `queue_add` does."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("trainyard/__init__.py", "")
        archive.writestr("trainyard/queue/__init__.py", "")
        archive.writestr("trainyard/queue/driver.py", driver)
    (folder / f"queue/{run}/program.zip").write_bytes(buffer.getvalue())


def test_runs_with_one_program_share_what_is_unpacked_and_a_damaged_one_ends_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    slurm(tmp_path, monkeypatch, scancel=f'echo "cancel $@" >>{tmp_path}/log')
    for number, name in enumerate(("one", "two", "damaged")):
        (tmp_path / "queue" / name).mkdir(parents=True)
        write_json(tmp_path / f"queue/{name}/state.json", {"job": number, "phase": "waiting"})
        write_program(tmp_path, name, "print('as added')")
    content = (tmp_path / "queue/damaged/program.zip").read_bytes()
    (tmp_path / "queue/damaged/program.zip").write_bytes(content[: len(content) // 2])
    one = service.Service(tmp_path / "queue", sys.executable, tmp_path / "programs")
    for name in ("one", "two"):
        one.start(name)
        one.drivers[name].wait(20)
        assert (tmp_path / f"queue/{name}/driver.log").read_text() == "as added\n"
    assert len(list((tmp_path / "programs").iterdir())) == 1
    for _ in range(service.ATTEMPTS):
        one.not_before.clear()
        one.start("damaged")
    assert read_json(tmp_path / "queue/damaged/state.json")["phase"] == "failed"
    assert "run damaged: cannot start its driver: File is not a zip file" in capsys.readouterr().err
    assert (tmp_path / "log").read_text() == "cancel --name=damaged 2\n"
    (tmp_path / "queue/one/program.zip").unlink()
    os.mkfifo(tmp_path / "queue/one/program.zip")
    one.reap()
    one.start("one")  # it waits for no writer
    assert "run one: cannot start its driver" in capsys.readouterr().err


def test_a_number_that_slurm_has_given_to_another_job_is_no_job_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm(tmp_path, monkeypatch, scontrol="echo 'JobId=7 JobName=other JobState=RUNNING NodeList=node1'")
    assert lease.read_job(7, "mine") is None
    found = lease.read_job(7, "other")
    assert found is not None and found.hosts == ("node1",)


def test_the_service_corrects_what_slurm_does_after_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs that no user holds are released; a job that runs after the end of its run gets a driver.

    The words are those of Slurm 22.05. A crash of slurmctld loses its last seconds: a job may be held again as it was submitted,
    also after the end of its run.
    """
    jobs = table("queue_lease")["jobs"]
    words = [(number, name, *said.split("|")) for number, (name, (_, said)) in enumerate(jobs.items(), 1)]
    squeue = "; ".join(f"echo '{job}|{state}|{comment}|{run}|{why}'" for job, run, state, comment, why in words)
    slurm(
        tmp_path, monkeypatch, squeue=f"{squeue}; echo asked >>{tmp_path}/log", scontrol=f'echo "$@" >>{tmp_path}/log'
    )
    # Slurm has forgotten the jobs of two runs, and given their numbers to a run that runs.
    phases = {name: phase for name, (phase, _) in jobs.items()} | {"lost": "waiting", "old": "finished"}
    for number, (name, phase) in enumerate(phases.items(), 1):
        number = 5 if name in ("lost", "old") else number
        (tmp_path / "queue" / name).mkdir(parents=True)
        write_json(tmp_path / f"queue/{name}/state.json", {"job": number, "phase": phase})
    one = service.Service(tmp_path / "queue", sys.executable, tmp_path / "programs")
    started: list[str] = []
    monkeypatch.setattr(one, "start", started.append)
    one.start_due()
    asked, *then = (tmp_path / "log").read_text().splitlines()
    released = [list(jobs)[int(line.removeprefix("release ")) - 1] for line in then]
    assert asked == "asked" and sorted(started) == ["again", "lost"]
    assert sorted(released) == ["forgotten", "held-after-its-end", "returned-after-its-end", "slurm-holds"]
    for name in phases:
        write_json(tmp_path / f"queue/{name}/state.json", {"job": 99, "phase": "cancelled"})
    one.start_due()
    assert (tmp_path / "log").read_text().count("asked") == 1, "without live runs, Slurm is asked less often"


@pytest.mark.parametrize(
    ("reason", "node", "told"), table("queue_lease")["the_health_check_corrects_what_slurm_says_of_an_idle_host"]
)
def test_the_health_check_corrects_what_slurm_says_of_an_idle_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reason: str, node: str, told: str
) -> None:
    """A host that is drained for nothing returns, and GPUs of an idle host that count as used are counted anew."""
    answer = f"NodeName=node3 {node} ThreadsPerCore=1"
    show = f'case "$*" in *show*) echo "{answer}" ;; *) echo "$@" >>{tmp_path}/log ;; esac'
    slurm(tmp_path, monkeypatch, sinfo=f"echo '{reason}'", scontrol=show)
    text = (REPO / "roles/queue/templates/health.j2").read_text().replace("{{ inventory_hostname | quote }}", "node3")
    (tmp_path / "log").touch()
    subprocess.run(["/bin/sh", "-c", text], check=True, timeout=30)
    assert (tmp_path / "log").read_text() == told


def test_a_session_is_read_as_written(tmp_path: Path) -> None:
    login = Login(address="h", user="u", port=2222, key_file="/home/me/key", extra_arguments=("-o", "ProxyCommand=x"))
    file = StagedFile("model", "files/0", "store/m", {}, "0" * 64, 0)
    written = QueuedStart(
        [host("node1", gpus=("0",), env={"A": "b"}, login=login)],
        LaunchOptions(max_restarts=3),
        PreparedRun(RunSpec(run="r"), [file, replace(file, src="", on_hosts="/m")], {}),
    )
    (tmp_path / "session.json").write_bytes(written.as_json())
    read = read_session(tmp_path)
    assert read.options == written.options and read.hosts[0].gpus == ("0",) and read.hosts[0].env == {"A": "b"}
    assert read.prepared.files[0].src == str(tmp_path / "files/0")
    one = read.hosts[0].login
    assert (one.address, one.user, one.port) == ("10.0.0.1", "u", 2222)
    assert "ProxyCommand=x" not in one.extra_arguments and one.key_file.endswith("trainyard_queue_ed25519")
    (tmp_path / "session.json").write_bytes(written.as_json().replace(b"files/0", b"../../0"))
    with pytest.raises(Exception, match="outside of the folder"):
        read_session(tmp_path)


@pytest.mark.slow
def test_the_program_is_complete(tmp_path: Path) -> None:
    with zipfile.ZipFile(io.BytesIO(program_archive())) as archive:
        archive.extractall(tmp_path)
    words = [sys.executable, "-P", "-c", "import trainyard.queue.driver as d; print(d.__file__)"]
    done = subprocess.run(words, env={"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, check=True)
    assert done.stdout.strip().startswith(str(tmp_path))
    assert not is_locked(tmp_path / "none")


def test_a_driver_that_cannot_start_ends_the_run_at_the_third_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its hosts are free then, and `queue list` says why."""
    (tmp_path / "a").mkdir()
    write_json(tmp_path / "a/state.json", {"phase": "waiting", "job": 7})
    ended: list[list[str]] = []
    monkeypatch.setattr(service.subprocess, "run", lambda words, **_more: ended.append(words))
    here = service.Service(tmp_path, "/nowhere/python", tmp_path)
    monkeypatch.setattr(here, "program", lambda run: tmp_path)
    for attempt in range(service.ATTEMPTS):
        assert not ended, attempt
        here.not_before.clear()
        here.start("a")
    state = read_json(tmp_path / "a/state.json") or {}
    assert state["phase"] == "failed" and "correct cluster_python" in state["exit"]["reason"]
    assert ended == [["scancel", "--name=a", "7"]]
