"""site.yml and train.yml on three hosts of their own, over real SSH: rank i is inventory host i, and lives in a unit there."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from lab_hosts import NEEDS_LAB, Host, Lab, run_playbook
from testbed import faults

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


@pytest.mark.smoke
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
        run = "/home/tester/trainyard/runs/three"
        node = json.loads(ask(lab, host, f"cat {run}/state/node.json"))
        assert node["node_rank"] == place and node["ranks"] == [place] and node["status"] == "finished"
        # The heartbeat is the rank's own word, written by a process on that host.
        rank = json.loads(ask(lab, host, f"cat {run}/state/rank{place}.json"))
        assert rank["rank"] == place and rank["step"] == 6
        result = json.loads(ask(lab, host, f"cat {run}/result.json"))
        assert result["world_size"] == 3
        digests.add(result["adapter_sha256"])
        assert ask(lab, host, f"stat -c %a {run}/env").strip() == "600"
        preloaded = ask(lab, host, f"sed -n s/^LD_PRELOAD=//p {run}/env").strip()
        assert "tcmalloc" in ask(lab, host, f"LD_PRELOAD={preloaded} cat /proc/self/maps"), "site.yml brought it"
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
        node = json.loads(ask(lab, host, "cat /home/tester/trainyard/runs/two/state/node.json"))
        assert node["node_rank"] == place and node["ranks"] == [place]
    assert "absent" in ask(lab, hosts[0], "test -e /home/tester/trainyard/runs/two || echo absent")


@pytest.fixture(scope="module")
def made(lab: Lab) -> Lab:
    site = run_playbook("site.yml", lab.inventory)
    assert site.rc == 0, site.stdout
    return lab


def test_a_closed_firewall_is_named_before_a_rank_starts(made: Lab, hosts: list[Host], said: dict[str, Any]) -> None:
    """The rendezvous port is open and those that gloo takes are not: that would hang for minutes."""
    faults.inject(made, hosts[1], "block", "32768-60999")
    try:
        played = run_playbook("train.yml", made.inventory, said | {"run": "closed"})
    finally:
        faults.undo(made, hosts[1], "block")
    assert played.rc != 0
    assert "node2: node1, node3 cannot reach high TCP ports (32768-60999)" in played.stdout
    assert "its firewall is closed" in played.stdout
    assert "absent" in ask(made, hosts[0], "test -e /home/tester/trainyard/runs/closed || echo absent")


def test_auto_goes_by_what_the_link_carries(made: Lab, hosts: list[Host], said: dict[str, Any], tmp_path: Path) -> None:
    """Its driver says nothing of a thin line behind the next switch."""
    fields = said | {"strategy": "auto", "lora_r": 0, "hosts": "node1,node2", "render_only": True}
    fields["render_to"] = str(tmp_path / "out")
    faults.inject(made, hosts[1], "shape", "10mbit")
    try:
        thin = run_playbook("train.yml", made.inventory, fields)
    finally:
        faults.undo(made, hosts[1], "shape")
    assert thin.rc == 0 and "auto selected diloco: ddp would spend " in thin.stdout, thin.stdout
    mbit = re.search(r"communication at ([\d.]+) Mbit/s.*\(link measured\)", thin.stdout)
    assert mbit and 5 <= float(mbit[1]) <= 12, thin.stdout
    thick = run_playbook("train.yml", made.inventory, fields)
    assert thick.rc == 0 and "auto selected ddp: it fits, and " in thick.stdout, thick.stdout


def losses(lab: Lab, host: Host, run: str) -> list[float]:
    lines = ask(lab, host, f"cat /home/tester/trainyard/runs/{run}/metrics.jsonl").splitlines()
    return [json.loads(line)["loss"] for line in lines]


@pytest.mark.parametrize("strategy", ["fsdp", "deepspeed", "diloco", "averaging"])
def test_a_strategy_trains_and_resumes_and_follows_ddp(
    strategy: str, made: Lab, hosts: list[Host], said: dict[str, Any]
) -> None:
    fields = said | {"hosts": "node1,node2", "checkpoint_interval": 2, "hv.local_steps": 2}
    # Whole weights are what these two take apart.
    fields |= {"lora_r": 0, "lr": 1e-3} if strategy in ("fsdp", "deepspeed") else {}
    fields |= {"strategy": strategy, "run": strategy, "deepspeed_stage": 3, "deepspeed_offload": "all"}
    played = run_playbook("train.yml", made.inventory, fields)
    assert played.rc == 0, played.stdout
    assert "hv.local_steps is local_steps here: local_steps=2" in played.stdout
    folder = f"/home/tester/trainyard/runs/{strategy}"
    kind = "adapter_sha256" if strategy in ("diloco", "averaging") else "model_sha256"
    kept = [json.loads(ask(made, host, f"cat {folder}/result.json")) for host in hosts[:2]]
    assert kept[0][kind] == kept[1][kind]
    assert len(kept[0].get("parts", [])) == (2 if strategy == "averaging" else 0)
    straight = losses(made, hosts[0], strategy)

    for host in hosts[:2]:
        ask(made, host, f"rm -r {folder}/result.json {folder}/checkpoints/step-00000006")
    again = run_playbook("train.yml", made.inventory, fields)
    assert again.rc == 0, again.stdout
    assert "resuming from step 4 of 6" in ask(made, hosts[1], f"cat {folder}/logs/rank1.log")
    assert json.loads(ask(made, hosts[1], f"cat {folder}/result.json"))[kind] == kept[0][kind]

    if kind == "model_sha256":
        beside = run_playbook("train.yml", made.inventory, fields | {"strategy": "ddp", "run": f"{strategy}-ddp"})
        assert beside.rc == 0, beside.stdout
        assert straight == pytest.approx(losses(made, hosts[0], f"{strategy}-ddp"), rel=1e-3)
