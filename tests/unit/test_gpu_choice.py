"""The GPUs of a run: the pool of every host, GPUs that other runs hold, and hosts that are one machine."""

from typing import Any

import pytest
from tables import table

from trainer.spec import make_spec
from trainer.supervise.link_free import link_free
from trainer.supervise.run_files import SupervisorError, hold_lock, write_json
from trainer.supervise.start import check_idle
from trainer.supervise.start_request import StartRequest
from trainyard.host_variables import make_host
from trainyard.preflight.gpu_choice import assign_gpus, devices
from trainyard.preflight.host_state import HostState
from trainyard.run.launch.start_ranks import start_request
from trainyard.run.plan.nodes import environment, plan_lines, plan_nodes
from trainyard.wire.connection import Host, InventoryError
from trainyard.wire.run_errors import PlanError


def state(name: str, count: int, machine: str = "", **more: Any) -> HostState:
    host = Host(name, f"10.0.0.{len(name)}", "/d", "/p", **{k: more.pop(k) for k in ("gpus", "processes") if k in more})
    cards = [{"name": "A", "memory_mib": 1000 * (n + 1), "uuid": f"GPU-{machine or name}-{n}"} for n in range(count)]
    facts = {"gpus": cards, "boot_id": name, "route_error": "", "interface": "e0", "source": "10.0.0.1", "cpus": 8}
    facts |= {"memory_mib": 1000, "link_mbit": 0, "versions": {}, "part": None, "stop_wanted": False}
    return HostState(host, facts=facts | more)


def chosen(*states: HostState) -> list[list[str]]:
    assert assign_gpus(states) == []
    return [[gpu["uuid"].rpartition("-")[2] for gpu in one.gpus] for one in states]


@pytest.mark.parametrize(("more", "expected"), table("gpu_choice")["the_gpus_of_a_run"])
def test_the_gpus_of_a_run(more: dict[str, Any], expected: list[str]) -> None:
    assert chosen(state("a", 3, **more)) == [expected]


@pytest.mark.parametrize(("more", "message"), table("gpu_choice")["a_host_without_the_gpus_is_refused_by_one_line"])
def test_a_host_without_the_gpus_is_refused_by_one_line(more: dict[str, Any], message: str) -> None:
    assert [finding.message for finding in assign_gpus([state("a", 3, **more)])] == [message]
    (found,) = assign_gpus([state("a", 0, gpus=("0",))])
    assert found.text == "cluster_gpus names GPU '0', and the driver shows no GPU"


def test_only_the_ranks_of_a_single_host_share_gpus() -> None:
    assert chosen(state("a", 3, processes=4)) == [["0", "1", "2"]]
    (found,) = assign_gpus([state("a", 3, processes=4), state("b", 1)])
    assert found.headline == (
        "a: cluster_processes is 4, and a run of several hosts may use 3 GPUs of this host: "
        "set cluster_processes to at most 3, or change cluster_gpus"
    )


def test_hosts_that_are_one_machine_share_its_gpus() -> None:
    assert chosen(*(state(name, 3, "m") for name in ("a", "bb"))) == [["0"], ["1", "2"]]
    assert chosen(state("a", 2, "m", gpus=("1",)), state("bb", 2, "m", processes=1)) == [["1"], ["0"]]
    assert chosen(*(state(name, 1, "m") for name in ("a", "bb", "ccc"))) == [["0"], ["0"], ["0"]]
    first, second = state("a", 1, "m"), state("bb", 1, "m", processes=1)
    (found,) = assign_gpus([first, second])
    assert found.headline.startswith("bb: it is one machine with a, which uses its 1 GPU: exclude one with --limit")
    assert chosen(*(state(name, 1, "m", gpus=()) for name in ("a", "bb"))) == [[], []]


def test_uuids_that_are_no_names_of_devices_are_not_used() -> None:
    for uuid in ("", "[N/A]", "GPU-1\nLD_PRELOAD=/tmp/x", "GPU-1,GPU-2", "0"):
        assert devices([{"uuid": uuid}]) == []
    assert devices([{"uuid": "GPU-1"}, {"uuid": "GPU-1"}]) == [] and devices([]) == []


def test_the_ranks_see_only_the_chosen_gpus() -> None:
    hosts = [state("a", 3, gpus=("2", "0")), state("bb", 0), state("ccc", 2, gpus=())]
    assert assign_gpus(hosts) == []
    nodes = plan_nodes(hosts, run="r", port=29500)
    assert [node.ranks for node in nodes] == [[0, 1], [2], [3]]
    first, cpu, hidden = (environment(node, {}) for node in nodes)
    assert "\nCUDA_VISIBLE_DEVICES=GPU-a-2,GPU-a-0\n" in first and "\nCUDA_DEVICE_ORDER=PCI_BUS_ID\n" in first
    assert "CUDA" not in cpu and "\nCUDA_VISIBLE_DEVICES=\n" in hidden
    with pytest.raises(PlanError, match="a: CUDA_VISIBLE_DEVICES in run_env or cluster_env is set by the plan"):
        environment(nodes[0], {"CUDA_VISIBLE_DEVICES": "0"})
    spec = make_spec({"strategy": "ddp", "balance": "even", "total_batch_size": 4, "batch_size": 1}, "the test")
    table = plan_lines(nodes, spec, 29500, [])
    assert table[0].split()[6] == "GPUs" and [line.split()[6] for line in table[1:4]] == ["0,2", "-", "-"]
    request = StartRequest.from_json(start_request(nodes[0], ["a"], []))
    assert StartRequest.read(request.to_json()).devices == ["GPU-a-2", "GPU-a-0"]


def test_ranks_of_one_machine_share_its_only_gpu() -> None:
    hosts = [state("a", 1, "m"), state("bb", 1, "m"), state("ccc", 1)]
    assert assign_gpus(hosts) == []
    environments = [environment(node, {}) for node in plan_nodes(hosts, run="r", port=29500)]
    assert ["\nTRAINYARD_SHARED_GPUS=1\n" in text for text in environments] == [True, True, True]
    assert ["\nCUDA_VISIBLE_DEVICES=GPU-m-0\n" in text for text in environments] == [True, True, False]


def test_a_host_starts_several_runs_on_different_gpus_only(tmp_path: Any) -> None:
    other, run = tmp_path / "runs/other", tmp_path / "runs/mine"
    for folder in (other, run):
        (folder / "state").mkdir(parents=True)
    write_json(other / "state/node.json", {"devices": ["GPU-1"]})
    with hold_lock(other / "lock"):
        check_idle(link_free(run), ["GPU-0"])
        with pytest.raises(SupervisorError, match=r"^busy: run other is running here and uses GPU-1$"):
            check_idle(link_free(run), ["GPU-0", "GPU-1"])
        with pytest.raises(SupervisorError, match=r"^busy: run other is running here$"):
            check_idle(link_free(run))
        write_json(other / "state/node.json", {"devices": {"bad": 1}})
        with pytest.raises(SupervisorError, match=r"^busy: run other is running here$"):
            check_idle(link_free(run), ["GPU-0"])


@pytest.mark.parametrize(("value", "expected"), table("gpu_choice")["values_of_cluster_gpus"])
def test_values_of_cluster_gpus(value: Any, expected: Any) -> None:
    assert make_host("a", {"cluster_gpus": value}).gpus == (None if expected is None else tuple(expected))


@pytest.mark.parametrize("value", [True, "first", [-1], {"a": 1}, ["GPU-1\n"], [[0]], 1.5])
def test_a_bad_value_of_cluster_gpus_is_refused(value: Any) -> None:
    with pytest.raises(InventoryError, match=r"^a: cluster_gpus is .*; set it to a list of GPU numbers or UUIDs"):
        make_host("a", {"cluster_gpus": value})


def test_values_of_cluster_env() -> None:
    host = make_host("a", {"cluster_env": {"NCCL_DEBUG": "INFO", "N": 1, "TOKEN": "s3cret"}})
    assert host.env == {"NCCL_DEBUG": "INFO", "N": "1", "TOKEN": "s3cret"}
    assert make_host("a", {}).env == {} and "s3cret" not in repr(host)
    for value, message in table("gpu_choice")["values_of_cluster_env"]:
        with pytest.raises(InventoryError) as raised:
            make_host("a", {"cluster_env": value})
        assert str(raised.value).startswith(message) and "s3cret" not in str(raised.value)
