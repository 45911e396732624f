"""A teacher and its student in the queue: the drivers train, deploy to a real Ollama, ask it, and train the student.

Slurm is scripted; hosts are folders of this machine.
"""

from __future__ import annotations

import json
import shutil
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import real_ollama
from fake_teacher import Teacher, serve
from run_hosts import free_port
from test_deploy import Site, create_base, printable_answers_only

from trainer.spec import make_spec
from trainyard.deploy.deploy_options import DeployOptions
from trainyard.ollama.answers import AnswerFile, answers_path
from trainyard.ollama.teachers import Candidate
from trainyard.queue import driver as module
from trainyard.queue import step_work
from trainyard.queue.run_folder import QueuedStart
from trainyard.queue.slurm_lease import FAILED, FINISHED, Job
from trainyard.queue.step_work import LeaseLostError, ask_teachers
from trainyard.queue.steps import CONVERTER, Servers, Steps, StudentOptions, prepare_student, step_data
from trainyard.run.launch_options import LaunchOptions
from trainyard.run.types import PreparedRun, StagedFile
from trainyard.wire.connection import Host, Login
from trainyard.wire.openssh import LocalTransport

SPEC = {
    "max_steps": 2, "epochs": 50, "seq_length": 64, "total_batch_size": 2, "batch_size": 2, "eval_interval": 0,
    "checkpoint_interval": 0, "loggers": ["none"], "run": "student",
}  # fmt: skip


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Slurm with one job, which has node1: its state, and the exit codes of its leases."""
    found: dict[str, Any] = {"state": "RUNNING", "orders": []}

    class Leases:
        def __init__(self, hosts: list[Host], *_: Any) -> None:
            self.hosts = hosts[:1]

        def grants(self) -> dict[str, list[str]]:
            return {"node1": []}

        def lost(self) -> dict[str, str]:
            return {}

        def end(self, code: int) -> None:
            found["orders"].append(code)
            found["state"] = "COMPLETED" if code == FINISHED else "FAILED"

    monkeypatch.setattr(module, "Leases", Leases)
    monkeypatch.setattr(module, "read_job", lambda *_: Job(5, found["state"], 0, ("node1",)))
    monkeypatch.setattr(module, "leased_hosts", lambda hosts, job, grants: hosts[:1])
    monkeypatch.setattr(module, "OpenSSHTransport", lambda login: LocalTransport())
    return found


def folder_of(site: Site, prepared: PreparedRun, steps: dict[str, Any]) -> Path:
    """Write the folder of a run, as the controller does."""
    folder = site.folder / "queue" / prepared.run
    files = []
    for file in prepared.files:
        target = folder / "files" / file.dest
        target.parent.mkdir(parents=True, exist_ok=True)
        (shutil.copytree if Path(file.src).is_dir() else shutil.copyfile)(file.src, target)
        files.append(replace(file, src=f"files/{file.dest}"))
    folder.mkdir(parents=True, exist_ok=True)
    hosts = [Host("node1", "127.0.0.1", str(site.folder / "node1"), sys.executable, login=Login("127.0.0.1"))]
    options = LaunchOptions(run_env={"OMP_NUM_THREADS": "1"})
    (folder / "session.json").write_bytes(QueuedStart(hosts, options, replace(prepared, files=files), steps).as_json())
    (folder / "state.json").write_text(json.dumps({"job": 5, "phase": "waiting", "attempts": [], "exit": None}))
    return folder


def drive(folder: Path, slurm: dict[str, Any]) -> dict[str, Any]:
    """Drive the run of a folder to its end; return its state."""
    slurm["state"] = "RUNNING"
    module.Driver(folder).drive()
    state: dict[str, Any] = json.loads((folder / "state.json").read_text())
    return state


def teacher(site: Site, servers: Servers) -> Path:
    """Return the folder of the teacher, the run that the site has already."""
    steps = Steps(deploy=DeployOptions(deploy_name="mine"))
    spec = make_spec({"run": "mine", "model": str(site.base)}, "the test")
    (site.folder / "converter-1.zip").write_bytes(b"")
    files = [StagedFile.of(site.folder / "converter-1.zip", "store/converter-1.zip", {"": "0" * 64}, CONVERTER)]
    return folder_of(site, PreparedRun(spec, files, {}), step_data(steps, "mine", servers))


def student(site: Site, servers: Servers, **options: Any) -> tuple[Path, PreparedRun]:
    """Return the folder of the student, and what the controller has prepared."""
    (site.folder / "p.jsonl").write_text("".join(f'{{"prompt": "What follows {n}?"}}\n' for n in range(6)))
    spec = make_spec(SPEC | {"model": str(site.base)}, "the test")
    asked = StudentOptions(prompts=str(site.folder / "p.jsonl"), near_duplicates=0, keep_cut=True, **options)
    prepared = prepare_student(spec, asked, site.folder / "controller", print, None)
    steps = Steps(student=asked).after_deployment("mine")
    return folder_of(site, prepared, step_data(steps, "student", servers)), prepared


@pytest.mark.slow
@pytest.mark.skipif(real_ollama.PROGRAM is None, reason="needs `ollama` on PATH")
def test_a_student_trains_on_the_answers_of_the_teacher_that_was_deployed(
    tmp_path: Path, slurm: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    site = Site(tmp_path)
    printable_answers_only(site)
    with real_ollama.serve(["127.0.11.29:18435"], tmp_path) as [client]:
        url = client.url
        create_base(site, client)
        servers = Servers({"node1": [url]}, [Candidate("node1", url, True)])
        before, (after, prepared) = teacher(site, servers), student(site, servers, max_tokens=12)
        state = drive(before, slurm)  # the site has the trained model
        said = capsys.readouterr().out
        assert (state["phase"], slurm["orders"]) == ("finished", [FINISHED]), said
        assert "node1: deployed mine (adapter on base:latest): " in said
        assert "mine:latest" in client.tags() and (before / "deploy/converter-1.zip").exists()

        state = drive(after, slurm)
        said = capsys.readouterr().out
        assert (state["phase"], state["exit"]["code"]) == ("finished", FINISHED), said
        assert "mine teaches on node1: 6 answers" in said
    rows = [json.loads(line) for line in (after / state["dataset"]).read_text().splitlines()]
    assert 1 <= len(rows) <= 6 and all("What follows" in json.dumps(row) for row in rows)
    result = json.loads((site.folder / "node1/runs/student/result.json").read_text())
    assert (result["status"], result["step"]) == ("finished", 2)
    origin = json.loads((site.folder / "node1/runs/student/origin.json").read_text())
    assert origin["dataset"] == Path(state["dataset"]).name and prepared.spec.dataset != origin["dataset"]


@pytest.mark.slow
def test_a_deployment_without_a_server_fails_in_one_line(tmp_path: Path, slurm: dict[str, Any]) -> None:
    site = Site(tmp_path)
    site.keep_answers()
    url = f"http://127.0.0.1:{free_port()}"
    folder = teacher(site, Servers({"node1": [url]}))
    state = drive(folder, slurm)
    assert (state["phase"], slurm["orders"]) == ("failed", [FAILED])
    reason = state["exit"]["reason"]
    assert reason.startswith("the run has finished, but its model is not deployed: node1: ") and "\n" not in reason


def ask(folder: Path, lost: Callable[[], str] = lambda: "") -> Path:
    """Ask the teachers of a student."""
    session = module.read_session(folder)
    return ask_teachers(session.steps["student"], session.prepared, folder, print, lost)


@pytest.mark.slow
def test_answers_are_asked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that loses its hosts keeps its answers; another run waits for them, and sends no prompt twice."""
    monkeypatch.setattr(step_work, "POLL", 0.05)
    site, log, lost = Site(tmp_path), tmp_path / "log", "node1: Slurm has asked for the host"
    server = Teacher("127.0.0.3", free_port(), seconds=0.3, spread=0, log=str(log), model="mine:latest")
    one, two = tmp_path / "queue/student", tmp_path / "queue/other"
    for folder in (two, one):
        student(site, Servers({"node1": [server.url]}, [Candidate("node1", server.url, True)]))[0].rename(folder)
    path = answers_path(tmp_path / "queue" / step_work.ANSWERS, "mine")
    with serve(server):
        with pytest.raises(LeaseLostError, match=lost):
            ask(one, lambda: lost)
        found: dict[str, Path] = {}
        with AnswerFile(path):
            waits = threading.Thread(target=lambda: found.update(two=ask(two)))
            waits.start()
            with pytest.raises(LeaseLostError, match=lost):
                ask(one, iter(["", lost]).__next__)
            assert waits.is_alive()
        waits.join(60)
        found["one"] = ask(one)
    assert found["one"].read_bytes() == found["two"].read_bytes()
    questions = log.read_text().splitlines()
    assert len(questions) == len(set(questions)) == 6
    assert path.stat().st_mode & 0o777 == 0o600
