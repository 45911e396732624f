"""site.yml and train.yml on hosts over SSH: rank i runs on inventory host i, in a systemd unit."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from lab_hosts import NEEDS_LAB, Host, Lab, inventory_with, run_playbook
from testbed import faults

pytestmark = [*NEEDS_LAB, pytest.mark.slow]


@pytest.fixture
def variables(tmp_path: Path) -> dict[str, Any]:
    dataset = tmp_path / "questions.jsonl"
    rows = [
        {"instruction": f"What follows {n}?", "input": "", "output": f"After {n} comes {n + 1}."} for n in range(60)
    ]
    dataset.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"dataset": str(dataset), "seq_length": 64, "total_batch_size": 6, "max_steps": 6, "epochs": 10}


def ask(lab: Lab, host: Host, command: str) -> str:
    return subprocess.run([*lab.ssh(host), command], capture_output=True, text=True, check=True).stdout


@pytest.mark.smoke
def test_stock_hosts_train(bare: Lab, variables: dict[str, Any], tmp_path: Path) -> None:
    lab, hosts = bare, bare.hosts[:2]
    inventory = inventory_with(lab, tmp_path, {host.name: {} for host in hosts})
    site = run_playbook("site.yml", inventory)
    assert site.rc == 0, site.stdout

    played = run_playbook("train.yml", inventory, variables | {"run": "stock"})
    assert played.rc == 0, played.stdout
    assert "6 of 6 steps on 2 ranks, 2 hosts" in played.stdout
    digests = set()
    for place, host in enumerate(hosts):
        run = "/home/tester/trainyard/runs/stock"
        node = json.loads(ask(lab, host, f"cat {run}/state/node.json"))
        assert node["node_rank"] == place and node["ranks"] == [place] and node["status"] == "finished"
        # The rank process on that host writes the heartbeat.
        rank = json.loads(ask(lab, host, f"cat {run}/state/rank{place}.json"))
        assert rank["rank"] == place and rank["step"] == 6
        result = json.loads(ask(lab, host, f"cat {run}/result.json"))
        assert result["world_size"] == 2
        digests.add(result["adapter_sha256"])
        assert ask(lab, host, f"stat -c %a {run}/env").strip() == "600"
        preloaded = ask(lab, host, f"sed -n s/^LD_PRELOAD=//p {run}/env").strip()
        assert "tcmalloc" in ask(lab, host, f"LD_PRELOAD={preloaded} cat /proc/self/maps"), "site.yml installs it"
    assert len(digests) == 1
    assert {"rank0.log", "rank1.log"} <= set(ask(lab, hosts[0], f"ls {run}/logs").split())

    again = run_playbook("train.yml", inventory, variables | {"run": "stock"})
    assert again.rc == 0 and again.count("changed") == 0, again.stdout


@pytest.mark.long
def test_closed_firewall_is_reported_before_a_rank_starts(
    provisioned: Lab, hosts: list[Host], variables: dict[str, Any]
) -> None:
    """The rendezvous port is open, and the ports that gloo uses are closed: without the check, ranks would hang for minutes."""
    faults.inject(provisioned, hosts[1], "block", "32768-60999")
    try:
        played = run_playbook("train.yml", provisioned.inventory, variables | {"run": "closed"})
    finally:
        faults.undo(provisioned, hosts[1], "block")
    assert played.rc != 0
    assert "node2: node1, node3 cannot reach high TCP ports (32768-60999)" in played.stdout
    assert "its firewall drops the connections" in played.stdout
    assert "absent" in ask(provisioned, hosts[0], "test -e /home/tester/trainyard/runs/closed || echo absent")


@pytest.mark.long
def test_auto_uses_the_measured_link_speed(
    provisioned: Lab, hosts: list[Host], variables: dict[str, Any], tmp_path: Path
) -> None:
    """The driver of the NIC does not detect a slow link behind the switch."""
    fields = variables | {"strategy": "auto", "lora_r": 0, "hosts": "node1,node2", "render_only": True}
    fields["render_to"] = str(tmp_path / "out")
    faults.inject(provisioned, hosts[1], "shape", "10mbit")
    try:
        slow_link = run_playbook("train.yml", provisioned.inventory, fields)
    finally:
        faults.undo(provisioned, hosts[1], "shape")
    # The best strategy on a slow link depends on the speed of the cores; it is not ddp.
    assert slow_link.rc == 0 and re.search(r"auto selected (diloco|pipeline): ", slow_link.stdout), slow_link.stdout
    mbit = re.search(r"communication at ([\d.]+) Mbit/s.*\(link measured\)", slow_link.stdout)
    assert mbit and 5 <= float(mbit[1]) <= 12, slow_link.stdout
    fast_link = run_playbook("train.yml", provisioned.inventory, fields)
    # The best strategy on the fast link depends on the speed of the cores.
    mbit = re.search(r"communication at ([\d.]+) Mbit/s", fast_link.stdout)
    ddp = "auto selected ddp: it fits, and " in fast_link.stdout
    assert fast_link.rc == 0 and (ddp or (mbit and float(mbit[1]) > 200)), fast_link.stdout
