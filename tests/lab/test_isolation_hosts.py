"""A run on three hosts without a firewall: no other machine reaches its ports."""

from __future__ import annotations

import json
import re
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from lab_hosts import NEEDS_LAB, Host, Lab, Played, run_playbook
from outsider import CLIENT, SCAN
from run_hosts import until

pytestmark = [*NEEDS_LAB, pytest.mark.slow]
RUN_DIR = "/home/tester/trainyard/runs/seen"
UNIT = "$(systemctl list-units --plain --no-legend 'trainyard-seen-*.service' | cut -d' ' -f1)"


def listening(lab: Lab, host: Host) -> list[int]:
    """Return the ports on which the host accepts connections at its address, without SSH."""
    rows = [line.split()[3] for line in lab.inside(host, "ss -Hltn").splitlines()]
    ports = {int(row.rpartition(":")[2]) for row in rows if not row.startswith(("127.", "[::1]"))}
    return sorted(ports - {22})


@pytest.mark.long
def test_no_other_machine_reaches_the_ranks(lab: Lab, hosts: list[Host], tmp_path: Path) -> None:
    dataset = tmp_path / "questions.jsonl"
    dataset.write_text("".join(json.dumps({"text": f"{n} and {n + 1}"}) + "\n" for n in range(60)))
    variables = {"run": "seen", "dataset": str(dataset), "seq_length": 64, "total_batch_size": 6}
    variables |= {"max_steps": 4000, "epochs": 1000, "checkpoint_interval": 0, "eval_interval": 0}
    played: list[Played] = []
    playing = threading.Thread(target=lambda: played.append(run_playbook("train.yml", lab.inventory, variables)))
    # Another test of the session may have run site.yml. A firewall without configuration must stay off because it would block SSH.
    firewalls = [host for host in hosts if "Status: active" in lab.inside(host, "ufw status 2>/dev/null || true")]
    for host in hosts:
        lab.inside(host, f"rm -rf {RUN_DIR}")
    for host in firewalls:
        lab.inside(host, "ufw disable")

    def rank() -> dict[str, Any]:
        return json.loads(lab.inside(hosts[0], f"cat {RUN_DIR}/state/rank0.json || echo '{{}}'"))

    playing.start()
    try:
        until(lambda: (rank().get("step") or 0) >= 2 or not playing.is_alive(), 180, "step 2")
        assert playing.is_alive(), played[0].stdout
        ports = {host.name: listening(lab, host) for host in hosts}
        for host in hosts:
            assert ports[host.name], "gloo listens on every host"
            scan = [sys.executable, "-c", SCAN, host.address, json.dumps(ports[host.name])]
            assert json.loads(lab.in_lab(*scan)) == [], ports
        command = " ".join(json.loads(lab.inside(hosts[0], f"cat {RUN_DIR}/plan.json"))[0]["command"])
        rendezvous = re.search(r"--master-port=(\d+)", command)
        assert rendezvous and int(rendezvous[1]) in ports["node1"]
        client = [sys.executable, "-c", CLIENT, hosts[0].address, rendezvous[1]]
        assert lab.in_lab(*client).strip() == "rejected"
        assert run_in_host(lab, hosts[2], client) == "connected"  # a host of the run
        denied = lab.inside(hosts[0], f"systemctl show --value -p IPAddressDeny {UNIT}").split()
        assert sorted(denied) == ["0.0.0.0/0", "::/0"]
    finally:
        for host in hosts:
            lab.inside(host, f"mkdir -p {RUN_DIR}; touch {RUN_DIR}/stop")
        for host in firewalls:
            lab.inside(host, "ufw --force enable")
        playing.join(120)
    assert played[0].rc == 0, played[0].stdout


def run_in_host(lab: Lab, host: Host, argv: list[str]) -> str:
    quoted = " ".join(f"'{word}'" for word in argv)
    # MKL of torch does not load where the working directory cannot be named.
    return lab.inside(host, f"cd / && {quoted}").strip()
