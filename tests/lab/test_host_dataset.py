"""A dataset and a model that the hosts already have, below a bind mount: they are used in place."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from lab_hosts import NEEDS_LAB, VENV, Host, Lab, run_playbook

from trainer.data.samples import read_samples
from trainer.data.tiny import make_tiny

pytestmark = [*NEEDS_LAB, pytest.mark.slow]

# 200 records of a megabyte, of which most is a column that no shape uses: reading it takes seconds.
DATASET = """
import json
for n in range(200):
    print(json.dumps({"text": f"{n} and {n + 1}", "blob": str(n % 10) * 1_000_000}))
"""
MOUNT = "mkdir -p /srv/real /srv/files && mount --bind /srv/real /srv/files && chmod 755 /srv/real"


def test_a_dataset_of_the_hosts_does_not_pass_through_the_controller(
    lab: Lab, hosts: list[Host], tmp_path: Path
) -> None:
    (tmp_path / "few.jsonl").write_text("".join(json.dumps({"text": f"{n} and {n + 1}"}) + "\n" for n in range(50)))
    make_tiny(read_samples(tmp_path / "few.jsonl"), tmp_path / "small", 1)
    model = subprocess.run(["tar", "-C", tmp_path, "-c", "small"], capture_output=True, check=True).stdout
    for host in hosts:
        lab.inside(host, f"{MOUNT} && {VENV}/bin/python -c '{DATASET}' > /srv/files/big.jsonl")
        subprocess.run(
            [*lab.ssh(host), "sudo tar -C /srv/files --no-same-owner -x && sudo chmod -R a+rX /srv/files"],
            input=model,
            check=True,
        )
    sent = Path(f"/sys/class/net/trainyard{lab.running.net}/statistics/tx_bytes")
    variables = {"dataset": "host:/srv/files/big.jsonl", "model": "host:/srv/files/small", "max_steps": 2}
    variables |= {"seq_length": 64, "total_batch_size": 6, "eval_interval": 0, "strategy": "auto"}
    try:
        before = int(sent.read_text())
        played = run_playbook("train.yml", lab.inventory, variables)
        used = int(sent.read_text()) - before
        print(f"{used} bytes left the controller")
        assert played.rc == 0, played.stdout
        assert "step 2/2" in played.stdout and used < 5_000_000, used
        # A model on the controller leaves it once, and passes from host to host.
        make_tiny(read_samples(tmp_path / "few.jsonl"), tmp_path / "other", 2)
        before, copied = int(sent.read_text()), variables | {"model": str(tmp_path / "other"), "run": "copied"}
        staged = run_playbook("train.yml", lab.inventory, copied, "--tags", "stage")
        used = int(sent.read_text()) - before
        assert staged.rc == 0 and "relay failed" not in staged.stdout, staged.stdout
        print(f"{used} bytes for a model of {len(model)} on three hosts")
        assert len(model) < used < 1.5 * len(model) + 2_000_000
        lab.inside(hosts[1], "sed -i '1s/0 and 1/0 und 1/' /srv/files/big.jsonl")
        refused = run_playbook("train.yml", lab.inventory, variables)
        assert refused.rc != 0
        text = " ".join(refused.stdout.split())
        assert "dataset: /srv/files/big.jsonl is not the same on all hosts: node1 has" in text, refused.stdout
    finally:
        for host in hosts:
            lab.inside(host, "umount /srv/files; rm -rf /srv/files /srv/real")
