"""Slurm's view of the hosts: nodes from hostile facts, and versions that do not fit together."""

import json
from typing import Any

import pytest
from hostile import HOSTILE_STRINGS

from plugins.filter.queue import queue_facts, queue_problems
from trainyard.queue.slurm_conf import gpu_type, oldest, queue_nodes, version_problems

GPU = {"name": "NVIDIA GeForce RTX 3090", "memory_mib": 24576, "uuid": "GPU-1", "device": "/dev/nvidia0"}
SMALL = {"name": "NVIDIA GeForce RTX 4060", "memory_mib": 8188, "uuid": "GPU-2", "device": "/dev/nvidia1"}
FACTS: dict[str, Any] = {"hostname": "box", "cpus": 8, "memory_mib": 32_043, "gpus": [GPU, SMALL], "time": 1000.0}


def test_a_node_has_gpus_by_type_and_the_smallest_memory() -> None:
    [node] = queue_nodes({"node1": FACTS}, {"node1": "10.0.0.1"})
    assert node.gres == "gpu:rtx3090:1,gpu:rtx4060:1,vram:no_consume:8"
    assert node.devices == {"rtx3090": ["/dev/nvidia0"], "rtx4060": ["/dev/nvidia1"]}
    assert node.memory_mib % 64 == 0 and 0.94 < node.memory_mib / 32_043 < 0.951
    [same] = queue_nodes({"node1": FACTS | {"memory_mib": 32_040}}, {"node1": "10.0.0.1"})
    assert same == node


@pytest.mark.parametrize(
    "wanted, gres",
    [([0], "gpu:rtx3090:1,vram:no_consume:24"), (["GPU-2"], "gpu:rtx4060:1,vram:no_consume:8"), ([], "")],
)
def test_the_queue_offers_the_gpus_of_the_inventory(wanted: list[Any], gres: str) -> None:
    [node] = queue_nodes({"node1": FACTS}, {"node1": "10.0.0.1"}, {"node1": wanted})
    assert node.gres == gres


@pytest.mark.parametrize("text", [*HOSTILE_STRINGS, "node[1-9]", "a,b", "a b", "a\nNodeName=b"])
def test_a_name_never_becomes_a_list_or_a_line(text: str) -> None:
    assert gpu_type(text).isalnum() and gpu_type(text).isascii() and len(gpu_type(text)) <= 32
    for facts in (FACTS | {"hostname": text}, FACTS | {"gpus": [GPU | {"device": text}]}):
        try:
            [node] = queue_nodes({"node1": facts}, {"node1": "10.0.0.1"})
        except ValueError as error:
            assert str(error).startswith("node1: ") and str(error).isprintable()
        else:
            assert node.hostname.replace("-", "").replace(".", "").isalnum()


def test_an_environment_in_a_folder_that_services_do_not_see_is_refused() -> None:
    info = {"__queue_info": FACTS | {"foreign": False, "version": "22.05.8"}}
    for python, problems in (("/tmp/env/bin/python", 1), ("/srv/tmp/bin/python", 0)):
        found = queue_problems({"node1": info | {"cluster_python": python}}, {"node1": "10.0.0.1"}, "node1")
        assert len(found) == problems and all("cluster_python of node1 is /tmp/env" in each for each in found)


def test_a_host_that_fails_or_does_not_answer_leaves_the_queue_to_the_others() -> None:
    addresses = {f"node{number}": f"10.0.0.{number}" for number in range(1, 6)}
    info = {"__queue_info": FACTS | {"foreign": [], "version": "22.05.8"}, "cluster_python": "/srv/bin/python"}
    late = info | {"__queue_info": info["__queue_info"] | {"time": 8000.0}}
    known = {"__queue_known": {"stdout": json.dumps({"node3": FACTS | {"cpus": 2}, "gone": FACTS})}}
    hosts: dict[str, Any] = {"node1": info | known, "node2": info, "node3": {}, "node4": {}, "node5": late}
    facts = queue_facts(hosts, addresses, "node1")
    assert [facts[name]["cpus"] for name in facts] == [8, 8, 2] and list(facts) == ["node1", "node2", "node3"]
    [said] = queue_problems(hosts, {"node1": "10.0.0.1", "node5": "10.0.0.5"}, "node1")
    assert said.startswith("the clock of node5 differs by 7000 s from that of the queue host node1")


def test_versions_that_slurm_cannot_mix_are_named() -> None:
    def problems(*versions: str) -> list[str]:
        return version_problems({f"node{number + 1}": version for number, version in enumerate(versions)}, "node1")

    assert problems("22.05.8-4+deb12u3", "21.08.5-2ubuntu1") == []
    assert problems("24.11.5-4", "23.11.4-1.2ubuntu5", "24.11.5-4") == []
    [newer] = problems("22.05.8-4", "24.11.5-4")
    assert newer.startswith("node2 has Slurm 24.11, newer than 22.05 of the queue host node1: put node2 into the group")
    [older] = problems("24.11.5-4", "22.05.8-4")
    assert older.startswith("node2 has Slurm 22.05, more than two releases older than 24.11")
    [absent] = problems("22.05.8-4", "")
    assert absent.startswith("node2 finds no package slurmd")
    assert oldest(["24.11.5-4", "22.05.8-4"]) == "22.05"
