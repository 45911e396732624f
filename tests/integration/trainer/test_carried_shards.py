"""A run with full weights that moves to other hosts of the queue: its shards go with it, and its losses stay the same."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from trainer_runs import Cluster, lines, losses

from trainer.records.checkpoint import HostCheckpoint
from trainyard.queue.carry import CheckpointCopy
from trainyard.wire.connection import Host, HostConnection
from trainyard.wire.openssh import LocalTransport

pytestmark = pytest.mark.slow


def machine(cluster: Cluster, number: int) -> Host:
    """Return a simulated host of a cluster."""
    data_dir = cluster.run_dir(number).parents[1]
    return Host(f"{cluster.folder.name}-{number}", "127.0.0.1", str(data_dir), sys.executable)


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["fsdp", "pipeline"])
def test_shards_continue_on_other_hosts(strategy: str, cluster: Cluster, tmp_path: Path) -> None:
    """Two hosts are replaced by two others. The first one of these receives a full copy, and passes it on."""
    fields = {"strategy": strategy, "lora_r": 0, "lr": 3e-3, "epochs": 200, "max_steps": 30, "checkpoint_interval": 5}
    straight = cluster.run(2, run="straight", **fields)
    launchers = cluster.start(2, **fields)
    cluster.at_step(12)
    (cluster.run_dir() / "stop").touch()
    assert cluster.wait(launchers) == [0, 0], cluster.logs()
    before = losses(cluster.run_dir())
    assert 12 <= len(before) < 30
    newest = f"step-{len(before):08d}"
    assert HostCheckpoint.read(cluster.run_dir() / "checkpoints" / newest).elsewhere, "the checkpoint is not divided"

    others = Cluster(tmp_path / "others", cluster.spec)
    was, now = ([machine(each, number) for number in (0, 1)] for each in (cluster, others))
    every = {host.name: host for host in [*was, *now]}
    (tmp_path / "queue").mkdir()
    copy = CheckpointCopy(tmp_path / "queue", "r", lambda name: HostConnection(every[name], LocalTransport()), print)
    assert copy.carry(now, list(every.values())) == newest
    try:
        launchers = others.start(2, **fields)
        assert others.wait(launchers) == [0, 0], others.logs()
        assert f"resuming from step {len(before)}" in (others.run_dir() / "logs/rank0.log").read_text()
        after = lines(others.run_dir() / "metrics.jsonl")
        assert [record["step"] for record in after] == list(range(len(before) + 1, 31))
        assert [*before, *(record["loss"] for record in after)] == pytest.approx(straight, abs=1e-6)
    finally:
        others.end()
