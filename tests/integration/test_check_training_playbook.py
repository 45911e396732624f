"""playbooks/check_training.yml on this machine as two hosts, one of which cannot train."""

from __future__ import annotations

from pathlib import Path

import pytest
from lab_hosts import run_playbook
from run_hosts import write_inventory

SECRET = "s3cret-of-the-host"
# Other tests of the machine may take the rendezvous port between its choice and the start.
QUICK = {"max_steps": 3, "seq_length": 32, "total_batch_size": 2, "max_restarts": 2, "restart_delay": 0.1}


@pytest.mark.long
def test_every_host_trains_alone_and_one_table_compares_them(tmp_path: Path) -> None:
    own: dict[str, dict[str, object]] = {"node1": {}, "node2": {}, "node3": {"cluster_python": "/nonexistent/python"}}
    secret = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "A_TOKEN": SECRET}
    path = write_inventory(tmp_path, own, cluster_env=secret)

    checked = run_playbook("playbooks/check_training.yml", path, QUICK, "--check", "--limit", "node1")
    assert checked.rc == 0 and not (tmp_path / "node1").exists(), checked.stdout
    played = run_playbook("playbooks/check_training.yml", path, QUICK)
    text = played.stdout
    assert played.rc != 0 and "error: node3 cannot train alone" in text, text
    assert "node3: failed: there is no Python at /nonexistent/python: run site.yml" in text
    rows = {
        line.split()[0]: line.split()
        for line in text.splitlines()
        if line.startswith(("node1  CPU", "node2  CPU", "node3  -"))
    }
    losses = [rows[name][-4] for name in ("node1", "node2")]
    assert losses[0] == losses[1] and float(losses[0]) > 0 and "GB" in rows["node1"]
    assert rows["node3"][-1] == "failed" and "the losses of 2 hosts are equal within 2%" in text
    assert "slowest: node" in text and SECRET not in text
    assert [list(tmp_path.glob(f"node{n}/runs/check-*")) for n in (1, 2, 3)] == [[], [], []], text
