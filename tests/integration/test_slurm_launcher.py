"""Runs with `launcher=slurm`: RunSession, the batch script and real ranks, on a stand-in for a Slurm cluster of two nodes.

tests/lab/test_slurm_launcher_hosts.py does the same on the real Slurm.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from run_hosts import free_port
from small_slurm import SmallSlurm
from trainer_runs import records, until, write_jsonl

from trainer.spec import make_spec
from trainyard.run.follow.manage_runs import manage_runs, stop_run
from trainyard.run.launch_options import make_options
from trainyard.run.session import RunSession
from trainyard.wire.connection import Host, HostConnection
from trainyard.wire.openssh import LocalTransport
from trainyard.wire.run_errors import RunError


class Site:
    """A controller and the login host of the cluster, which are this machine."""

    def __init__(self, folder: Path, slurm: SmallSlurm) -> None:
        self.folder, self.slurm = folder, slurm
        # A name that a shell, Slurm or a format could misread.
        self.data_dir = folder / "shared %n $HOME it's"
        self.host = Host("login", "127.0.0.1", str(self.data_dir), sys.executable)
        self.said: list[str] = []

    def connect(self, host: Host) -> HostConnection:
        return HostConnection(host, LocalTransport())

    def options(self, **values: Any) -> Any:
        given = {"launcher": "slurm", "slurm_nodes": 2, "progress_interval": 0, "master_port": free_port()}
        return make_options(given | values)

    def session(self, spec: dict[str, Any], **options: Any) -> RunSession:
        how: dict[str, Any] = {"home": self.folder / "controller", "report": self.said.append}
        return RunSession([self.host], self.connect, self.options(**options), spec=make_spec(spec, "test"), **how)

    def run_dir(self, run: str) -> Path:
        return self.data_dir / "runs" / run

    def step(self, run: str) -> int:
        file = self.run_dir(run) / "state/rank1.json"
        return int(json.loads(file.read_text()).get("step") or 0) if file.exists() else 0


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    slurm = SmallSlurm(tmp_path / "slurm")
    monkeypatch.setenv("PATH", f"{slurm.programs}:{os.environ['PATH']}")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    yield Site(tmp_path, slurm)
    slurm.clean()


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    return write_jsonl(tmp_path / "data.jsonl", records(64))


def spec(run: str, dataset: Path, steps: int = 12) -> dict[str, Any]:
    return {
        "run": run, "model": "tiny", "dataset": str(dataset), "seq_length": 32, "total_batch_size": 4, "batch_size": 2,
        "max_steps": steps, "epochs": 1000, "lr": 1e-3, "checkpoint_interval": 100, "eval_interval": 0, "loggers": ["none"],
        "balance": "even",  # shares by speed add up in another order
    }  # fmt: skip


@pytest.mark.slow
def test_a_job_that_returns_to_the_queue_resumes_exactly(site: Site, dataset: Path, tmp_path: Path) -> None:
    """The second run is not followed, receives a stop request at its time limit, and returns to the queue; the same
    command then follows it."""
    straight = site.session(spec("straight", dataset), collect_to=str(tmp_path / "out")).run()
    assert (tmp_path / "out/straight/adapter/adapter_config.json").exists()
    assert {"rank0.log", "rank1.log", "torchrun.0.log", "torchrun.1.log"} <= {
        file.name for file in (tmp_path / "out/straight/logs").iterdir()
    }
    left = site.session(spec("moved", dataset), follow=False)
    left.run()
    assert left.state.phase == "running" and "continues: the same command without follow=false" in site.said[-1]
    until(lambda: site.step("moved") >= 3, what="step 3")
    site.slurm.signal(2, signal.SIGTERM)
    until(lambda: site.slurm.jobs()[1]["restart"] == 1, what="the requeue")
    moved = site.session(spec("moved", dataset)).run()
    assert "run moved is already running: following it" in site.said
    assert "strategy ddp unless it does not fit, 4 rows per step in micro-batches of 2" in site.said
    assert moved["result"]["loss_last"] == straight["result"]["loss_last"]
    assert moved["result"]["eval_loss"] == straight["result"]["eval_loss"]
    assert "resuming from step" in (site.run_dir("moved") / "logs/rank0.log").read_text()
    assert "nothing to do" in " ".join(site.session(spec("moved", dataset)).run()["lines"])
    assert len(site.slurm.jobs()) == 2
    other = site.run_dir("moved") / "nodes/1/result.json"
    other.write_text(json.dumps(json.loads(other.read_text()) | {"adapter_sha256": "0" * 64}))
    with pytest.raises(
        RunError, match=r"the hosts ended with different weights .*login nodes/1/result.json 000000000000"
    ):
        site.session(spec("moved", dataset)).run()


@pytest.mark.slow
def test_a_killed_rank_is_started_again_and_stop_takes_a_checkpoint(site: Site, dataset: Path) -> None:
    """A second job continues after a rank of the first one was killed. Then a user stops the run."""
    session = site.session(spec("again", dataset, 5000) | {"checkpoint_interval": 2}, max_restarts=1)
    connect: Any = lambda name: site.connect(site.host)  # noqa: E731
    stopped: list[dict[str, Any]] = []

    def disturb() -> None:
        until(lambda: site.step("again") >= 3, what="step 3")
        os.kill(json.loads((site.run_dir("again") / "state/rank1.json").read_text())["pid"], signal.SIGKILL)
        until(lambda: len(site.slurm.jobs()) == 2 and site.step("again") >= 5, what="step 5 of the second job")
        stopped.append(stop_run("again", [site.host], connect, site.options()))

    thread = threading.Thread(target=disturb)
    thread.start()
    session.run()
    thread.join()
    assert session.state.status == "stopped" and stopped[0]["hosts"] == {"login": "stopped"}
    assert [job["state"] for job in site.slurm.jobs()] == ["FAILED", "COMPLETED"]
    assert site.slurm.jobs()[1]["restart"] == 0, "a job that a user stopped does not return to the queue"
    log = (site.run_dir("again") / "logs/rank0.log").read_text()
    assert "resuming from step" in log and "run again stopped at step" in log


@pytest.mark.slow
def test_a_rank_that_fails_is_named_with_its_node(site: Site, dataset: Path) -> None:
    session = site.session(spec("bad", dataset) | {"lr": 1e30, "max_grad_norm": 0})
    with pytest.raises(RunError, match=r"rank \d on n[01]: .*(not a number|not finite)"):
        session.run()
    assert site.slurm.jobs()[0]["state"] == "FAILED"


@pytest.mark.slow
def test_a_waiting_job_says_why_and_is_cancelled(site: Site, dataset: Path) -> None:
    site.slurm.hold(True)
    site.session(spec("waits", dataset), follow=False).run()
    how: dict[str, Any] = {"connect": site.connect, "options": site.options(), "report": site.said.append}
    listed = manage_runs("listed", "waits", [site.host], **how)["runs"]
    assert [(state["status"], state["alive"], state["job"]["reason"]) for state in listed] == [
        ("starting", True, "Resources")
    ]
    stopped = stop_run("waits", [site.host], lambda name: site.connect(site.host), site.options())
    assert stopped["hosts"] == {"login": "stopped"} and site.slurm.jobs()[0]["state"] == "CANCELLED"


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (
            {"slurm_partition": "huge"},
            "login: Slurm refuses the job: there is no partition huge: choose one of batch, gpu",
        ),
        ({"slurm_account": "broke"}, "login: Slurm refuses the job: sbatch: Invalid account"),
        ({"elastic": True}, "elastic: has no effect with launcher=slurm"),
    ],
)
def test_what_the_cluster_refuses_is_refused_before_submission(
    site: Site, dataset: Path, options: dict[str, Any], why: str
) -> None:
    with pytest.raises(RunError) as caught:
        site.session(spec("r", dataset), **options).run()
    assert str(caught.value).startswith(why)
    assert site.slurm.jobs() == [] and not (site.data_dir / "runs").exists()


def test_a_node_without_the_folder_or_python_is_named(site: Site, dataset: Path, tmp_path: Path) -> None:
    session = site.session(spec("r", dataset))
    session.plan()
    program = site.slurm.programs / "srun"
    real = program.read_text()
    for said, why in (
        ("trainyard n1 unshared torch", "node n1 does not share .* with login: set cluster_data_dir of login"),
        ("trainyard n1 shared none", "node n1 has no Python at .*: set cluster_python of login"),
        ("trainyard n1 shared python", "node n1 has a Python at .* without torch"),
    ):
        program.write_text(f"#!/bin/sh\necho {said}\n")
        with pytest.raises(RunError, match=why):
            session.preflight()
    program.write_text(
        "#!/bin/sh\necho 'srun: error: Unable to allocate resources: Requested nodes are busy' >&2; exit 1\n"
    )
    assert "no node is free to be looked at" in session.preflight()["lines"][0]
    program.write_text(real)
    assert session.preflight()["lines"] == []
    for name in ("sbatch", "sinfo"):
        (site.slurm.programs / name).unlink()
    if not shutil.which("sbatch"):
        with pytest.raises(RunError, match="login: there is no sbatch here: choose a login host of the Slurm cluster"):
            session.preflight()
