"""train.yml with rewards: the Ollama servers of the cluster, which site.yml has installed, write completions of a run in a sandboxed unit."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import pytest
from lab_hosts import NEEDS_LAB, VENV, Lab, inventory_with, run_playbook
from test_services import archive, tags

__all__ = ["archive"]

pytestmark = [*NEEDS_LAB, pytest.mark.long]


def test_the_servers_of_the_cluster_write_completions(tmp_path: Path, archive: Path) -> None:
    lab = Lab(f"rollouts-{os.getpid()}")
    wanted = {"ollama_state": "present", "ollama_version": "0.5.4", "ollama_archive": str(archive)}
    wanted |= {"ollama_sha256": hashlib.sha256(archive.read_bytes()).hexdigest()}
    words = ["cat", "dog", "tree", "house", "sun", "moon", "water", "fire"]
    prompts, reward = tmp_path / "p.jsonl", tmp_path / "mine.py"
    prompts.write_text("".join(json.dumps({"prompt": f"the {a} and the {b}"}) + "\n" for a in words for b in words))
    reward.write_text("def reward_e(completions, **_): return [text.count('e') for text in completions]")
    run = {
        "run": "r",
        "model": "tiny",
        "dataset": str(prompts),
        "method": "grpo",
        "reward": str(reward),
        "seq_length": 64,
    }
    # Few tokens: most texts of this model have bytes that are none, which Ollama loses, so that ranks write them again.
    run |= {"grpo_max_tokens": 3, "total_batch_size": 32, "batch_size": 8, "max_steps": 4, "eval_split": 0}
    run |= {"rollout_servers": "cluster"}
    try:
        lab.up(hosts=2, venv=VENV, persistent=False)
        inventory = inventory_with(lab, tmp_path, **wanted)
        played = run_playbook("site.yml", inventory, {}, timeout=900)
        assert played.rc == 0, played.stdout
        trained = run_playbook("train.yml", inventory, run)
        assert trained.rc == 0, trained.stdout
        assert "completions are written by node1, node2, too" in trained.stdout, trained.stdout
        run_dir = "/home/tester/trainyard/runs/r"
        lines = lab.inside(lab.hosts[0], f"cat {run_dir}/metrics.jsonl").splitlines()
        assert len(lines) == 4
        metrics = [json.loads(line)["metrics"] for line in lines]
        for host in lab.hosts:
            name = f"completions_per_second/{host.address}:11434"
            assert any(step[name] > 0 for step in metrics), metrics
            assert tags(host) == {}, "the run leaves nothing on a server"
    finally:
        lab.down()
