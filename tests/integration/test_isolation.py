"""A run of the default inventory, seen from another machine on the LAN: none of its ports can be reached."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from lab_hosts import Played, run_playbook
from netlab import Lab, in_namespace, why_no_lab
from outsider import CLIENT, SCAN
from run_hosts import local_inventory, until

REASON = why_no_lab()
TOP = Path(__file__).parents[2]
HOST, OUTSIDER = "10.94.0.1", "10.94.0.2"


def listening(namespace: str) -> dict[int, str]:
    """Return the ports on which programs in a namespace listen, with the address of each."""
    show = ["ip", "netns", "exec", namespace, "ss", "-Hltn"]
    rows = [
        line.split()[3] for line in subprocess.run(show, capture_output=True, text=True, check=True).stdout.splitlines()
    ]
    return {int(row.rpartition(":")[2]): row.rpartition(":")[0] for row in rows}


def run_in(namespace: str, code: str, *arguments: str) -> str:
    command = ["ip", "netns", "exec", namespace, sys.executable, "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.long
@pytest.mark.skipif(bool(REASON), reason=REASON)
@pytest.mark.parametrize("options", [{}, {"elastic": True}], ids=["static", "elastic"])
def test_no_other_machine_reaches_a_run_of_the_default_inventory(tmp_path: Path, options: dict[str, Any]) -> None:
    inventory = local_inventory(tmp_path)
    dataset = tmp_path / "questions.jsonl"
    dataset.write_text("".join(json.dumps({"text": f"{n} and {n + 1}"}) + "\n" for n in range(60)))
    given = {"run": "seen", "dataset": str(dataset), "seq_length": 64, "total_batch_size": 4, "eval_interval": 0}
    given |= {"max_steps": 4000, "epochs": 1000, "checkpoint_interval": 0, **options}
    run_dir, played = tmp_path / "node1/runs/seen", []

    def rank() -> dict[str, Any]:
        # An elastic launch gives rank 0 to either host.
        files = [tmp_path / name / "runs/seen/state/rank0.json" for name in ("node1", "node2")]
        return next((json.loads(file.read_text()) for file in files if file.exists()), {})

    with Lab() as lan:
        machine, outsider = lan.node("host", f"{HOST}/24"), lan.node("out", f"{OUTSIDER}/24")
        lan.wait_for_links()

        def play() -> Played:
            return run_playbook("train.yml", inventory, given)

        playing = threading.Thread(target=lambda: played.append(in_namespace(machine, play)))
        playing.start()
        try:
            until(lambda: (rank().get("step") or 0) >= 2 or not playing.is_alive(), 180, "step 2")
            assert playing.is_alive(), played[0].stdout
            ports = listening(machine)
            assert len(ports) >= 3, ports  # the store, and gloo on each rank
            places = {address.strip("[]").removeprefix("::ffff:") for address in ports.values()}
            assert places <= {"127.0.0.1", "::1"}, ports
            assert json.loads(run_in(outsider, SCAN, HOST, json.dumps(list(ports)))) == [], ports
            command = " ".join(json.loads((run_dir / "plan.json").read_text())[0]["command"])
            rendezvous = re.search(r"(--master-port=|--rdzv-endpoint=[0-9.]+:)(\d+)", command)[2]
            assert run_in(outsider, CLIENT, HOST, rendezvous) == "rejected"
            # The client itself works: on the machine of the run, it connects.
            assert run_in(machine, CLIENT, "127.0.0.1", rendezvous) == "connected"
            assert "NoNewPrivs:\t1" in Path(f"/proc/{rank()['pid']}/status").read_text()
        finally:
            for name in ("node1", "node2"):
                (tmp_path / name / "runs/seen/stop").touch()
            playing.join(120)
    assert played[0].rc == 0, played[0].stdout
