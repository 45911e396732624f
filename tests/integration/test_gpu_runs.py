"""Two runs on one host with two GPUs, which a stand-in for nvidia-smi shows. The ranks themselves use the CPU."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_nvidia_smi import write_nvidia_smi
from run_hosts import Bed, bed
from test_run_session import SMALL, hosts, local

from trainer.spec import make_spec
from trainyard.run.follow.manage_runs import manage_runs
from trainyard.run.launch_options import LaunchOptions, make_options
from trainyard.run.session import RunSession
from trainyard.run.types import PlanEntry
from trainyard.wire.connection import Host
from trainyard.wire.run_errors import PlanError

__all__ = ["bed"]


def start(host: Host, folder: Path, run: str, **options: Any) -> list[PlanEntry]:
    """Start a run that takes long; return its plan."""
    spec = make_spec(SMALL | {"model": "tiny", "fake_data": True, "max_steps": 100_000, "run": run}, "the test")
    session = RunSession([host], local, make_options(options), spec=spec, home=folder, report=lambda line: None)
    for step in (session.prepare, session.plan, session.stage, session.launch):
        step()
    return session.state.plan


@pytest.mark.long
def test_two_runs_on_one_host_use_different_gpus(bed: Bed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    uuids = write_nvidia_smi(tmp_path / "bin", 2)
    host = replace(hosts(bed.folder, 1)[0], processes=1, env={"NCCL_DEBUG": "INFO", "WHO": "host"})
    for run, uuid in zip(("one", "two"), uuids, strict=True):
        (entry,) = start(host, tmp_path, run, run_env={"WHO": run})
        assert entry.devices == [uuid] and entry.gpus == ["Stand-in GPU"] and entry.memory_mib == 24576
        state = bed.at_step(0, 1, run)
        environment = Path(f"/proc/{state['pid']}/environ").read_text().split("\0")
        assert {f"CUDA_VISIBLE_DEVICES={uuid}", "NCCL_DEBUG=INFO", f"WHO={run}"} <= {*environment}
        assert bed.node(0, run)["devices"] == [uuid]
    with pytest.raises(
        PlanError, match=r"^node1: run one uses 1 GPU of this host, 0 of 2 are free and the run needs 1: "
    ):
        start(host, tmp_path, "three")
    # A folder of another inventory host on the same machine.
    with pytest.raises(PlanError, match=r"^node9: run two uses 1 GPU of this host, 0 of 1 are free"):
        start(replace(host, name="node9", data_dir=str(tmp_path / "node9"), gpus=("1",)), tmp_path, "three")
    with pytest.raises(PlanError, match=r"^node1: run one is in progress on this host"):
        (tmp_path / "bin/nvidia-smi").unlink()
        start(host, tmp_path, "three")
    for run in ("one", "two"):
        manage_runs("stopped", run, [host], local, LaunchOptions(), print, now=True)
    assert not bed.live_processes()
