"""Replicas that walk apart: diloco meets every few steps, averaging once, at the end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from starts import Cluster
from test_torchrun import assert_every_sample_once, weights

LONG = {"epochs": 200, "max_steps": 60, "checkpoint_interval": 10, "lora_r": 8}


def result(cluster: Cluster, run: str, host: int = 0) -> dict[str, Any]:
    return json.loads((cluster.run_dir(host, run) / "result.json").read_text())


@pytest.mark.slow
def test_diloco_follows_ddp(cluster: Cluster) -> None:
    cluster.run(2, run="ddp", **LONG)
    cluster.run(2, run="diloco", strategy="diloco", **LONG)
    ddp, diloco = result(cluster, "ddp"), result(cluster, "diloco")
    print(ddp, diloco)
    cluster.run(2, run="avg", strategy="averaging", **LONG)
    print(result(cluster, "avg"))
    assert_every_sample_once(cluster, [(0, 0), (1, 1)], "diloco")
    assert 0
