"""Runs whose teacher is another process, as on a separate host."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from run_hosts import Bed, bed, until
from teacher_process import teacher_process
from test_distillation_runs import teacher
from trainer_runs import Here, losses

from trainer.distributed import TEACHER_TOKEN
from trainer.spec import make_spec
from trainyard.run.launch_options import make_options
from trainyard.run.session import RunSession
from trainyard.wire.connection import Host, HostConnection
from trainyard.wire.openssh import LocalTransport
from trainyard.wire.run_errors import RunError

__all__ = ["bed", "teacher"]


FEW = {"max_steps": 6, "eval_split": 0.1}


def fields_of(here: Here, teacher: Path, **more: Any) -> dict[str, Any]:
    common = {"model": here.model, "teacher": teacher, "teacher_host": "node3", "seq_length": 64, "batch_size": 2}
    return common | {"distill_alpha": 0.6, "checkpoint_interval": 2, **FEW} | more


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> Any:
    def use(values: dict[str, str]) -> None:
        for name, value in values.items():
            monkeypatch.setenv(name, value)

    return use


@pytest.mark.slow
def test_the_losses_equal_those_of_a_local_teacher(here: Here, teacher: Path, tmp_path: Path, environment: Any) -> None:
    for run, more in (("text", {}), ("written", {"distill_alpha": 1, "packing": False})):
        fields = {name: str(value) for name, value in fields_of(here, teacher, **more).items()}
        local = fields | {"teacher_host": "", "teacher_top_k": "20"}
        assert here(f"{run}-local", **local) == 0, here.err
        with teacher_process(tmp_path / run, fields) as process:
            environment(process.environment)
            assert here(f"{run}-remote", **fields) == 0, here.err
            assert process.process.wait(30) == 0, process.log
            assert process.state["status"] == "finished"
        assert here.losses(f"{run}-remote") == pytest.approx(here.losses(f"{run}-local"), abs=1e-5)
        assert here.result(f"{run}-remote")["eval_loss"] == pytest.approx(
            here.result(f"{run}-local")["eval_loss"], abs=1e-5
        )


def outcome(session: RunSession) -> Any:
    """Return the result of a run, or its error."""
    try:
        return session.run()
    except RunError as error:
        return error


def connect(host: Host) -> HostConnection:
    return HostConnection(host, LocalTransport())


@pytest.mark.slow
def test_a_killed_teacher_fails_the_run_which_restarts_with_it(
    bed: Bed, here: Here, dataset: Path, teacher: Path
) -> None:
    """The whole way through RunSession: one host trains, the other one teaches."""
    fields = fields_of(
        here, teacher, dataset=dataset, run="r", epochs=9, max_steps=60, total_batch_size=4, loggers="none"
    )
    fields |= {"lr": 1e-2, "teacher_host": "node2", "eval_interval": 0}
    texts = {name: str(value) for name, value in fields.items()}
    hosts = [
        Host(f"node{i}", "127.0.0.1", str(bed.folder / f"node{i}"), sys.executable, backend="process") for i in (1, 2)
    ]
    lines: list[str] = []
    at: dict[str, float] = {}

    def report(line: str) -> None:
        lines.append(line)
        at.setdefault(line, time.monotonic())

    options = make_options({"max_restarts": 1, "restart_delay": 0.1, "progress_interval": 0.2})
    session = RunSession(hosts, connect, options, spec=make_spec(texts, "test"), home=bed.folder, report=report)
    results: list[Any] = []
    running = threading.Thread(target=lambda: results.append(outcome(session)), daemon=True)
    running.start()
    until(lambda: not running.is_alive() or (bed.state(0).get("step") or 0) >= 10, 240, "step 10")
    assert running.is_alive(), (results, lines)
    secret = dict(line.split("=", 1) for line in (bed.run_dir(1) / "env").read_text().splitlines())[TEACHER_TOKEN]
    shown = [Path(f"/proc/{pid}/cmdline").read_bytes().decode() for pid in bed.live_processes()]
    killed_at = time.monotonic()
    os.kill(bed.state(1, host=1)["pid"], signal.SIGKILL)
    running.join(300)
    assert results and isinstance(results[0], dict), (results, lines)
    cause = "failed: the teacher on node2 was killed by SIGKILL"
    assert cause in lines and at[cause] - killed_at < 20, lines
    assert "following r: 1 rank on node1, teacher on node2" in lines
    assert any(line.startswith(f"teacher {teacher} on node2 (127.0.0.1:") for line in lines), lines
    assert any("60 of 60 steps on 1 rank, 1 host" in line for line in lines)
    assert bed.node(0)["attempt"] == 2 and bed.node(1)["status"] == "finished"
    assert not bed.live_processes()

    local = texts | {"teacher_host": "", "teacher_top_k": "20"}
    del local["run"]
    assert here("local", **local) == 0, here.err
    assert losses(bed.run_dir(0)) == pytest.approx(here.losses("local"), abs=1e-5)

    # Only the teacher's host has the teacher, and it has nothing else.
    stores = [sorted(path.name for path in (bed.folder / f"node{i}/store").glob("*/*")) for i in (1, 2)]
    assert any(name.startswith("teacher") for name in stores[1])
    assert not any(name.startswith("teacher") for name in stores[0])
    assert not list((bed.folder / "node2/store/datasets").glob("*"))
    # The token is in the private files alone.
    logs = [path.read_text() for i in (0, 1) for path in bed.run_dir(i).glob("logs/*.log")]
    plans = [path.read_text() for i in (0, 1) for path in [*bed.run_dir(i).glob("*.json"), bed.run_dir(i) / "spec.yml"]]
    assert shown and not any(secret in text for text in [*shown, *logs, *plans, *lines, str(session.state)])
    assert (bed.run_dir(1) / "env").stat().st_mode & 0o777 == 0o600
