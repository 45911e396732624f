"""train.yml with diloco_membership=torchft on three hosts: a replica loses its ranks or its network, its peers continue, it rejoins."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from fault_trial import Trial
from lab_hosts import NEEDS_LAB, Host, Lab, run_playbook
from test_train import ask, variables  # noqa: F401  a fixture
from testbed import faults

pytestmark = [*NEEDS_LAB, pytest.mark.slow]
HOME = "/home/tester/trainyard/runs"
RUN = f"{HOME}/members"


def state(lab: Lab, host: Host, name: str, run: str = "members") -> dict[str, Any]:
    return json.loads(ask(lab, host, f"cat {HOME}/{run}/state/{name}.json 2>/dev/null || echo '{{}}'"))


def at_step(lab: Lab, host: Host, rank: int, step: int, run: str = "members") -> dict[str, Any]:
    deadline = time.monotonic() + 240
    while (now := state(lab, host, f"rank{rank}", run)).get("step", 0) < step:
        assert time.monotonic() < deadline, f"rank {rank} is at {now}"
        time.sleep(0.2)
    return now


@pytest.mark.long
def test_killed_replica_rejoins(provisioned: Lab, hosts: list[Host], variables: dict[str, Any]) -> None:  # noqa: F811
    fields = variables | {"run": "members", "strategy": "diloco", "diloco_membership": "torchft", "local_steps": 5}
    fields |= {"max_steps": 300, "epochs": 300, "checkpoint_interval": 50}
    with ThreadPoolExecutor(1) as aside:
        playing = aside.submit(run_playbook, "train.yml", provisioned.inventory, fields, timeout=500)
        victim = at_step(provisioned, hosts[1], 1, 20)
        command = next(entry["command"] for entry in json.loads(ask(provisioned, hosts[0], f"cat {RUN}/plan.json")))
        lighthouse = next(word.partition("=")[2] for word in command if word.startswith("--lighthouse="))
        listening = ask(provisioned, hosts[0], "ss -ltnH")
        assert f" {lighthouse} " in listening, "at the cluster address"
        assert f":{lighthouse.rpartition(':')[2]} " not in listening.replace(f" {lighthouse} ", ""), "and nowhere else"
        provisioned.inside(hosts[1], f"kill -9 {victim['pid']}")
        killed, step = time.monotonic(), state(provisioned, hosts[0], "rank0")["step"]
        at_step(provisioned, hosts[0], 0, step + 10)
        print(f"two rounds later: {time.monotonic() - killed:.1f} s after the kill")
        played = playing.result()
    assert played.rc == 0, played.stdout
    assert [state(provisioned, host, "node").get("restarted") for host in hosts] == [None, 1, None]
    kept = [json.loads(ask(provisioned, host, f"cat {RUN}/result.json")) for host in hosts]
    assert len({result["adapter_sha256"] for result in kept}) == 1
    assert kept[0]["replicas"] == {"configured": 3, "at_the_end": [0, 1, 2]}
    assert kept[0]["missed_samples"] > 0 and kept[0]["world_size"] == 3
    assert "was received from another replica" in ask(provisioned, hosts[1], f"cat {RUN}/logs/rank1.log")
    again = run_playbook("train.yml", provisioned.inventory, fields)
    assert again.rc == 0 and again.count("changed") == 0, again.stdout


@pytest.mark.long
def test_disconnected_host_rejoins(provisioned: Lab, hosts: list[Host], variables: dict[str, Any]) -> None:  # noqa: F811
    """Neither its peers nor the controller reach a host. The peers continue, the host rejoins, and a stop then ends all three cleanly."""
    fields = variables | {"run": "cut", "strategy": "diloco", "diloco_membership": "torchft", "local_steps": 5}
    trial = Trial(
        provisioned,
        provisioned.inventory,
        fields | {"max_steps": 100_000, "epochs": 100_000, "checkpoint_interval": 50},
    )
    trial.start()
    try:
        at_step(provisioned, hosts[1], 1, 20, "cut")
        cut = time.time()
        faults.inject(provisioned, hosts[1], "cut")
        step = state(provisioned, hosts[0], "rank0", "cut")["step"]
        at_step(provisioned, hosts[0], 0, step + 10, "cut")
        print(f"two rounds later: {time.time() - cut:.1f} s after the cut")
        trial.wait_line(".*node2.*replica 1 is absent, the other replicas continue", cut)
        restored = time.time()
        faults.undo(provisioned, hosts[1], "cut")
        trial.wait_line(".*replica 1 has rejoined", restored)
        at_step(provisioned, hosts[1], 1, state(provisioned, hosts[0], "rank0", "cut")["step"] + 1, "cut")
        print(f"rejoined {time.time() - restored:.1f} s after the network was restored")
        stopped = run_playbook("playbooks/stop.yml", provisioned.inventory, {"run": "cut"})
        assert stopped.rc == 0, stopped.stdout
        assert trial.end(60) == 0, trial.output()
    finally:
        trial.clean()
    newest = f"$(ls -d {HOME}/cut/checkpoints/step-* | tail -1)"
    kept = {ask(provisioned, host, f"cd {newest} && basename $PWD && sha256sum trained.safetensors") for host in hosts}
    assert len(kept) == 1, kept
