"""Records in a run folder that code of a rank has written: small parts of them are read, or none."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from trainer.supervise.link_free import run_folder
from trainer.supervise.run_files import DEVICE_LIMIT, RANKS_LIMIT, RECORD_LIMIT, read_node, read_ranks, run_devices

NODE = {"status": "running", "started": 1.0}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "runs/r/state").mkdir(parents=True)
    return tmp_path / "runs/r"


def test_one_large_heartbeat_with_many_names_is_read_a_few_times(run: Path) -> None:
    first = run / "state/rank0.json"
    first.write_text(json.dumps({"rank": 0, "x": "a" * (RECORD_LIMIT - 40)}))
    for name in range(1, 200):
        os.link(first, run / f"state/rank{name}.json")
    (run / "state/rank-other.json").write_text("{}")
    assert len(read_ranks(run_folder(str(run)))) == RANKS_LIMIT // RECORD_LIMIT


@pytest.mark.parametrize(
    "more", [{"x": "a" * RECORD_LIMIT}, {"x": [[[[[[[0]]]]]]]}, {"x": {"a": {"b": {"c": {"d": {"e": {"f": {}}}}}}}}]
)
def test_a_large_or_deep_record_counts_as_none(run: Path, more: dict[str, object]) -> None:
    for name in ("node", "rank0"):
        (run / f"state/{name}.json").write_text(json.dumps(NODE | more))
    assert read_node(run_folder(str(run))) is None and read_ranks(run_folder(str(run))) == []


def test_a_record_names_few_devices(run: Path) -> None:
    named = [7, "x\n", *(f"GPU-{number}" for number in range(1000))]
    (run / "state/node.json").write_text(json.dumps(NODE | {"devices": named}))
    found = run_devices(run_folder(str(run)))
    assert found[0] == "GPU-0" and len(found) == DEVICE_LIMIT - 2
