"""site.yml and train.yml on three hosts of their own, over real SSH: rank i is inventory host i, and lives in a unit there."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from lab_hosts import NEEDS_LAB, Host, Lab, run_playbook

pytestmark = [*NEEDS_LAB, pytest.mark.slow]


@pytest.fixture
def said(tmp_path: Path) -> dict[str, Any]:
    dataset = tmp_path / "questions.jsonl"
    rows = [
        {"instruction": f"What follows {n}?", "input": "", "output": f"After {n} comes {n + 1}."} for n in range(60)
    ]
    dataset.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"dataset": str(dataset), "seq_length": 64, "total_batch_size": 6, "max_steps": 6, "epochs": 10}


def ask(lab: Lab, host: Host, command: str) -> str:
    return subprocess.run([*lab.ssh(host), command], capture_output=True, text=True, check=True).stdout


def test_three_hosts_from_bare_to_a_result(bare: Lab, said: dict[str, Any]) -> None:
    lab, hosts = bare, bare.hosts
    for again in (False, True):
        site = run_playbook("site.yml", lab.inventory)
        assert site.rc == 0, site.stdout
        assert (site.count("changed") == 0) is again, site.stdout

    played = run_playbook("train.yml", lab.inventory, said | {"run": "three"})
    assert played.rc == 0, played.stdout
    assert "6 of 6 steps on 3 ranks, 3 hosts" in played.stdout
    digests = set()
    for place, host in enumerate(hosts):
        run = "/home/yard/trainyard/runs/three"
        node = json.loads(ask(lab, host, f"cat {run}/state/node.json"))
        assert node["node_rank"] == place and node["ranks"] == [place] and node["status"] == "finished"
        # The heartbeat is the rank's own word, written by a process on that host.
        rank = json.loads(ask(lab, host, f"cat {run}/state/rank{place}.json"))
        assert rank["rank"] == place and rank["step"] == 6
        result = json.loads(ask(lab, host, f"cat {run}/result.json"))
        assert result["world_size"] == 3
        digests.add(result["adapter_sha256"])
        assert ask(lab, host, f"stat -c %a {run}/env").strip() == "600"
    assert len(digests) == 1
    logs = ask(lab, hosts[0], f"ls {run}/logs").split()
    assert {"rank0.log", "rank1.log", "rank2.log"} <= set(logs)

    again = run_playbook("train.yml", lab.inventory, said | {"run": "three"})
    assert again.rc == 0 and again.count("changed") == 0, again.stdout


def test_ranks_follow_the_hosts_that_were_chosen(lab: Lab, hosts: list[Host], said: dict[str, Any]) -> None:
    site = run_playbook("site.yml", lab.inventory)
    assert site.rc == 0, site.stdout
    played = run_playbook("train.yml", lab.inventory, said | {"run": "two", "hosts": "node2,node3"})
    assert played.rc == 0, played.stdout
    assert "on 2 ranks, 2 hosts" in played.stdout
    for place, host in enumerate(hosts[1:]):
        node = json.loads(ask(lab, host, "cat /home/yard/trainyard/runs/two/state/node.json"))
        assert node["node_rank"] == place and node["ranks"] == [place]
    assert "absent" in ask(lab, hosts[0], "test -e /home/yard/trainyard/runs/two || echo absent")


@pytest.mark.parametrize("strategy", ["diloco", "averaging"])
def test_replicas_train_and_resume(strategy: str, lab: Lab, hosts: list[Host], said: dict[str, Any]) -> None:
    site = run_playbook("site.yml", lab.inventory)
    assert site.rc == 0, site.stdout
    fields = said | {"run": strategy, "hosts": "node1,node2", "checkpoint_interval": 2, "hv.local_steps": 2}
    fields |= {"strategy": strategy}
    played = run_playbook("train.yml", lab.inventory, fields)
    assert played.rc == 0, played.stdout
    assert "hv.local_steps is local_steps here: local_steps=2" in played.stdout
    run = f"/home/yard/trainyard/runs/{strategy}"
    kept = [json.loads(ask(lab, host, f"cat {run}/result.json")) for host in hosts[:2]]
    assert kept[0]["adapter_sha256"] == kept[1]["adapter_sha256"]
    assert len(kept[0].get("parts", [])) == (2 if strategy == "averaging" else 0)
    for host in hosts[:2]:
        ask(lab, host, f"rm -r {run}/result.json {run}/checkpoints/step-00000006")
    again = run_playbook("train.yml", lab.inventory, fields)
    assert again.rc == 0, again.stdout
    assert "going on from step 4 of 6" in ask(lab, hosts[1], f"cat {run}/logs/rank1.log")
    assert json.loads(ask(lab, hosts[1], f"cat {run}/result.json"))["adapter_sha256"] == kept[0]["adapter_sha256"]
