"""train.yml with diloco_membership=torchft on three hosts: one loses its ranks or its network, the others go on, it comes back."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from fault_trial import Trial
from lab_hosts import NEEDS_LAB, Host, Lab, run_playbook
from test_train import ask, said  # noqa: F401  a fixture
from testbed import faults

pytestmark = [*NEEDS_LAB, pytest.mark.slow]
HOME = "/home/tester/trainyard/runs"
RUN = f"{HOME}/members"


@pytest.fixture(scope="module")
def made(lab: Lab) -> Lab:
    site = run_playbook("site.yml", lab.inventory)
    assert site.rc == 0, site.stdout
    return lab


def state(lab: Lab, host: Host, name: str, run: str = "members") -> dict[str, Any]:
    return json.loads(ask(lab, host, f"cat {HOME}/{run}/state/{name}.json 2>/dev/null || echo '{{}}'"))


def at_step(lab: Lab, host: Host, rank: int, step: int, run: str = "members") -> dict[str, Any]:
    deadline = time.monotonic() + 240
    while (now := state(lab, host, f"rank{rank}", run)).get("step", 0) < step:
        assert time.monotonic() < deadline, f"rank {rank} is at {now}"
        time.sleep(0.2)
    return now


def test_a_replica_is_killed_and_comes_back(made: Lab, hosts: list[Host], said: dict[str, Any]) -> None:  # noqa: F811
    fields = said | {"run": "members", "strategy": "diloco", "diloco_membership": "torchft", "local_steps": 5}
    fields |= {"max_steps": 300, "epochs": 300, "checkpoint_interval": 50}
    with ThreadPoolExecutor(1) as aside:
        playing = aside.submit(run_playbook, "train.yml", made.inventory, fields, timeout=500)
        victim = at_step(made, hosts[1], 1, 20)
        command = next(entry["command"] for entry in json.loads(ask(made, hosts[0], f"cat {RUN}/plan.json")))
        lighthouse = next(word.partition("=")[2] for word in command if word.startswith("--lighthouse="))
        listening = ask(made, hosts[0], "ss -ltnH")
        assert f" {lighthouse} " in listening, "at the cluster address"
        assert f":{lighthouse.rpartition(':')[2]} " not in listening.replace(f" {lighthouse} ", ""), "and nowhere else"
        made.inside(hosts[1], f"kill -9 {victim['pid']}")
        killed, step = time.monotonic(), state(made, hosts[0], "rank0")["step"]
        at_step(made, hosts[0], 0, step + 10)
        print(f"two rounds on, {time.monotonic() - killed:.1f} s after the kill")
        played = playing.result()
    assert played.rc == 0, played.stdout
    assert [state(made, host, "node").get("restarted") for host in hosts] == [None, 1, None]
    kept = [json.loads(ask(made, host, f"cat {RUN}/result.json")) for host in hosts]
    assert len({result["adapter_sha256"] for result in kept}) == 1
    assert kept[0]["replicas"] == {"configured": 3, "at_the_end": [0, 1, 2]}
    assert kept[0]["missed_samples"] > 0 and kept[0]["world_size"] == 3
    assert "was received from another replica" in ask(made, hosts[1], f"cat {RUN}/logs/rank1.log")
    again = run_playbook("train.yml", made.inventory, fields)
    assert again.rc == 0 and again.count("changed") == 0, again.stdout


def test_a_host_is_cut_off_and_comes_back(made: Lab, hosts: list[Host], said: dict[str, Any]) -> None:  # noqa: F811
    """Neither its peers nor the controller reach it; they go on without it, and a stop with all three back is a clean one."""
    fields = said | {"run": "cut", "strategy": "diloco", "diloco_membership": "torchft", "local_steps": 5}
    trial = Trial(made, made.inventory, fields | {"max_steps": 100_000, "epochs": 100_000, "checkpoint_interval": 50})
    trial.start()
    try:
        at_step(made, hosts[1], 1, 20, "cut")
        cut = time.time()
        faults.inject(made, hosts[1], "cut")
        step = state(made, hosts[0], "rank0", "cut")["step"]
        at_step(made, hosts[0], 0, step + 10, "cut")
        print(f"two rounds on, {time.time() - cut:.1f} s after the cut")
        trial.wait_line(".*node2.*replica 1 is away, the others go on", cut)
        mended = time.time()
        faults.undo(made, hosts[1], "cut")
        trial.wait_line(".*replica 1 is back", mended)
        at_step(made, hosts[1], 1, state(made, hosts[0], "rank0", "cut")["step"] + 1, "cut")
        print(f"back {time.time() - mended:.1f} s after the cut was mended")
        stopped = run_playbook("playbooks/stop.yml", made.inventory, {"run": "cut"})
        assert stopped.rc == 0, stopped.stdout
        assert trial.end(60) == 0, trial.output()
    finally:
        trial.clean()
    newest = f"$(ls -d {HOME}/cut/checkpoints/step-* | tail -1)"
    kept = {ask(made, host, f"cd {newest} && basename $PWD && sha256sum trained.safetensors") for host in hosts}
    assert len(kept) == 1, kept
