"""DiLoCo with fragments on several hosts: resume, evaluation, hosts that lost their disk, replicas of several ranks."""

from __future__ import annotations

import json
import shutil

import pytest
from safetensors.torch import load_file
from test_replicas import FOUR, LONG, PAIR, newest, result
from test_torchrun import assert_every_sample_once, weights
from trainer_runs import Cluster

from trainer.strategy.diloco_fragments import LOCAL_FILE

FRAGMENTS = LONG | {"strategy": "diloco", "local_steps": 5, "diloco_comm_dtype": "int4"}
FRAGMENTS |= {"diloco_fragments": 2, "diloco_delay": 2, "eval_interval": 10}


@pytest.mark.slow
def test_fragments_stop_resume_and_follow_the_curve(cluster: Cluster) -> None:
    wanted = cluster.run(2, run="straight", **FRAGMENTS)
    assert_every_sample_once(cluster, PAIR, "straight")
    whole = cluster.run(2, run="whole", **(FRAGMENTS | {"diloco_fragments": 1}))
    assert wanted[-1] < wanted[0] and wanted[-1] == pytest.approx(whole[-1], rel=0.03)
    ended = weights(cluster.run_dir(0, "straight"))
    assert weights(cluster.run_dir(1, "straight")) == ended, "the last synchronization makes all replicas equal"
    assert result(cluster, "straight", 0)["eval_loss"] == result(cluster, "straight", 1)["eval_loss"]

    launchers = cluster.start(2, **FRAGMENTS)
    cluster.stop_between(launchers)
    ends = [newest(cluster, host) for host in (0, 1)]
    for name, equal in (("trained.safetensors", True), ("outer.pt", True), (LOCAL_FILE, False)):
        assert ((ends[0] / name).read_bytes() == (ends[1] / name).read_bytes()) == equal, name
    assert cluster.run(2, **FRAGMENTS) == wanted, "bit-equal"
    assert_every_sample_once(cluster, PAIR)
    assert "checkpoint: copying" not in cluster.logs()
    assert weights(cluster.run_dir(0)) == weights(cluster.run_dir(1)) == ended
    evaluated = [
        [
            json.loads(line)["eval_loss"]
            for line in (cluster.run_dir(0, run) / "metrics.jsonl").read_text().splitlines()
            if "eval_loss" in line
        ]
        for run in ("r", "straight")
    ]
    assert evaluated[0] == evaluated[1]

    # A host with an empty disk receives the weights and the inner state of its peer.
    shutil.rmtree(cluster.run_dir(1, "lost"))
    assert cluster.run(2, run="lost", **FRAGMENTS)[-1] == pytest.approx(wanted[-1], rel=0.03)
    assert weights(cluster.run_dir(0, "lost")) == weights(cluster.run_dir(1, "lost"))


@pytest.mark.slow
@pytest.mark.long
def test_fragments_of_replicas_of_two_ranks(cluster: Cluster) -> None:
    """Two hosts of two ranks; then the same run continues from an older checkpoint on a single host."""
    fields = FRAGMENTS | {"max_steps": 10, "total_batch_size": 8, "checkpoint_interval": 5}
    wanted = cluster.run(2, 2, **fields)
    assert_every_sample_once(cluster, FOUR)
    assert weights(cluster.run_dir(0)) == weights(cluster.run_dir(1))
    for host in (0, 1):
        (cluster.run_dir(host) / "result.json").unlink()
        shutil.rmtree(newest(cluster, host))
    assert cluster.run(1, 2, **fields)[-1] == pytest.approx(wanted[-1], rel=0.05)
    state = load_file(newest(cluster, 0) / "trained.safetensors")
    assert all(value.isfinite().all() for value in state.values())
