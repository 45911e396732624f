"""distill.yml -e teacher_copy=true with two real servers on loopback addresses of this machine, in place of two hosts.

tests/lab/test_teacher_copy_hosts.py does the same with hosts; this test is nightly.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import real_ollama
import yaml
from lab_hosts import run_playbook
from run_hosts import TOP, free_port

from trainyard.ollama.answers import answers_path
from trainyard.ollama.client import OllamaClient

MODEL = f"copied{os.getpid()}"


@pytest.fixture
def clients(tmp_path: Path) -> Iterator[list[OllamaClient]]:
    with real_ollama.serve([f"127.0.13.{number}:{free_port()}" for number in (1, 2)], tmp_path) as found:
        yield found
    answers = answers_path(TOP / ".trainyard", MODEL)
    for file in (answers, *(TOP / ".trainyard/distill").glob(f"{answers.stem}-*.jsonl")):
        file.unlink(missing_ok=True)


def inventory(folder: Path, clients: list[OllamaClient], **second: Any) -> Path:
    document = yaml.safe_load((TOP / "inventory/local.yml").read_text())
    children = document["all"]["children"]["cluster"]["children"]
    for number, (group, name) in enumerate((("head", "node1"), ("workers", "node2")), 1):
        settings = {"cluster_data_dir": str(folder / name), "ollama_url": clients[number - 1].url}
        settings |= {"cluster_address": f"127.0.13.{number}", **(second if number == 2 else {})}
        children[group]["hosts"][name] = settings
    (folder / "inventory.yml").write_text(yaml.safe_dump(document, sort_keys=False))
    return folder / "inventory.yml"


@pytest.mark.long
@pytest.mark.skipif(not real_ollama.weights() or os.geteuid() != 0, reason="needs `ollama` on PATH, and root")
def test_a_missing_teacher_is_copied(tmp_path: Path, clients: list[OllamaClient]) -> None:
    """The digest is the same afterwards; the folder of the store is found, or the message names the variable."""
    one, two = clients
    digest = real_ollama.create(one, MODEL)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"question {n}"}) + "\n" for n in range(12)))
    given = {"teacher": MODEL, "prompts": str(prompts), "model": "tiny", "teacher_copy": True, "max_tokens": 16}
    given |= {"keep_cut": True, "near_duplicates": 0, "max_steps": 2, "seq_length": 64, "run": MODEL}
    unknown = run_playbook("playbooks/distill.yml", inventory(tmp_path, clients), given)
    assert unknown.rc and "node2: the folder of Ollama's models is unknown: set ollama_models" in unknown.stdout
    there = inventory(tmp_path, clients, ollama_models=str(tmp_path / "models1"))
    checked = run_playbook("playbooks/distill.yml", there, given, "--check")
    assert checked.rc == 0 and f"copying {MODEL} from node1 to node2" in checked.stdout, checked.stdout
    assert not two.digest(MODEL)
    played = run_playbook("playbooks/distill.yml", there, given)
    assert played.rc == 0, played.stdout
    assert two.digest(MODEL) == digest
    assert f"{MODEL} teaches on node1, node2" in played.stdout
    assert not list(Path("/var/lib/trainyard").glob("ollama-copy-*"))
    two.delete(MODEL)
    real_ollama.create(two, "other")
    again = run_playbook("playbooks/distill.yml", inventory(tmp_path, clients), given)
    assert again.rc == 0 and two.digest(MODEL) == digest, again.stdout
