"""The hosts that receive the files of a model's weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from trainer.config import RunSpec
from trainer.spec import make_spec
from trainer.supervise.link_free import link_free
from trainyard.preflight.host_state import HostState
from trainyard.remote.host_facts import staged_bytes
from trainyard.run.prepare.weight_files import (
    hosts_that_share,
    serves_layers,
    space_needed,
    staged_paths,
    weight_groups,
)
from trainyard.run.types import PlanEntry, StagedFile
from trainyard.wire.connection import Host

SIZES = {"config.json": 5, "model-00001-of-00002.safetensors": 400, "model-00002-of-00002.safetensors": 200}
MODEL = StagedFile("model", "", "store/models/m-1", dict.fromkeys(SIZES, "1"), "2", 605, SIZES)
DATASET = StagedFile("dataset", "", "store/datasets/d", {"": "4"}, "4", 10, {"": 10})

REPLICAS = {"replica_strategy": "pipeline", "replica_hosts": 2}


def spec_of(strategy: str, **fields: Any) -> RunSpec:
    return make_spec({"model": "/d/store/models/m-1", "strategy": strategy} | fields, "the test")


def entries(hosts: int = 3) -> list[PlanEntry]:
    return [PlanEntry(f"node{n}", n, [2 * n, 2 * n + 1]) for n in range(hosts)]


@pytest.mark.parametrize(
    "fields", [{"strategy": "pipeline"}, {"strategy": "diloco"} | REPLICAS], ids=["one", "replicas"]
)
def test_the_host_of_rank_0_alone_receives_the_weights_of_a_pipeline(fields: dict[str, Any]) -> None:
    """Also of the pipelines of diloco: the ranks of other replicas receive their layers from it, too."""
    plan = entries(4)
    (head, files), (rest, reduced) = weight_groups([(plan, [MODEL, DATASET])], spec_of(**fields))
    assert (head, rest) == (plan[:1], plan[1:])
    assert files == [MODEL, DATASET]
    assert reduced == [replace(MODEL, sha256={"config.json": "1"}), DATASET]


@pytest.mark.parametrize(
    ("strategy", "hosts", "more", "fields"),
    [
        ("ddp", 3, {}, {}),
        ("diloco", 4, {}, {}),
        ("diloco", 4, {}, REPLICAS | {"replica_hosts": 1}),
        ("pipeline", 4, {}, {"pipeline_hosts": 1}),
        ("pipeline", 1, {}, {}),
        ("pipeline", 3, {"on_hosts": "/srv/model"}, {}),
        ("pipeline", 3, {"fetched_by": "node2"}, {}),
    ],
)
def test_otherwise_all_hosts_receive_all_files(
    strategy: str, hosts: int, more: dict[str, Any], fields: dict[str, Any]
) -> None:
    groups = [(entries(hosts), [replace(MODEL, **more), DATASET])]
    assert weight_groups(groups, spec_of(strategy, **fields)) == groups


def test_a_new_first_host_is_asked_although_it_was_staged() -> None:
    """It had the place of another rank before, and lacks the weights."""
    assert [serves_layers(entry, spec_of("pipeline")) for entry in entries()] == [True, False, False]
    assert not any(serves_layers(entry, spec_of("ddp")) for entry in entries())


def test_hosts_share_the_weights_of_their_pipeline() -> None:
    def shared(strategy: str, **fields: Any) -> int:
        return hosts_that_share(spec_of(strategy, **fields), 4)

    assert shared("ddp") == shared("diloco") == shared("fsdp") == 1
    assert shared("pipeline") == 4
    assert shared("pipeline", pipeline_hosts=2) == shared("diloco", **REPLICAS) == 2


# Space on the disks ------------------------------------------------------------------------------------------------------


def state(name: str) -> HostState:
    return HostState(Host(name, "10.0.0.1", "/d", "/p"))


@pytest.mark.parametrize(("share", "first", "needed"), [(1.0, "a", 615), (1 / 3, "a", 615), (1 / 3, "b", 215)])
def test_a_host_needs_space_for_what_is_sent_to_it(share: float, first: str, needed: int) -> None:
    assert space_needed([MODEL, DATASET], state("a"), first, share) == needed


def test_all_hosts_need_space_for_a_model_that_another_host_than_the_first_fetched() -> None:
    assert space_needed([replace(MODEL, fetched_by="c")], state("a"), "b", 1 / 3) == 605
    assert space_needed([replace(MODEL, fetched_by="b")], state("a"), "b", 1 / 3) == 205
    linked = replace(MODEL, on_hosts="/srv/m", bytes=0, sha256={})
    assert space_needed([linked], state("a"), "b", 1 / 3) == 0


def test_what_a_host_has_needs_no_space(tmp_path: Path) -> None:
    """Of a restart, nothing is copied, so a disk that the first start has filled suffices."""
    store = tmp_path / "store"
    folder = store / "models/m-1"
    folder.mkdir(parents=True)
    (store / "datasets").mkdir()
    (store / "datasets/d").write_bytes(bytes(10))
    for name, size in SIZES.items():
        (folder / name).write_bytes(bytes(size))
    paths = staged_paths([MODEL, DATASET, replace(MODEL, on_hosts="/srv/m", dest="store/models/l")], str(tmp_path))
    assert paths == [str(folder), str(store / "datasets/d")]
    found = {path: staged_bytes(link_free(Path(path))) for path in paths}
    assert list(found.values()) == [[600, 5], [0, 10]]
    host = HostState(Host("a", "10.0.0.1", str(tmp_path), "/p"), facts={"staged": found})
    assert space_needed([MODEL, DATASET], host, "a", 1.0) == space_needed([MODEL, DATASET], host, "b", 0.5) == 0
    (folder / "config.json").unlink()
    (folder / "model-00001-of-00002.safetensors").unlink()
    host.facts["staged"] = {path: staged_bytes(link_free(Path(path))) for path in paths}
    assert space_needed([MODEL, DATASET], host, "a", 1.0) == 405
    assert space_needed([MODEL, DATASET], host, "b", 0.5) == 5 + 100
    host.facts["layers"] = 60  # which ranks received for an earlier start of the run
    assert space_needed([MODEL, DATASET], host, "b", 0.5) == 5 + 40
    (store / "models/link").symlink_to(folder)
    assert staged_bytes(link_free(store / "models/link")) == [0, 0]
