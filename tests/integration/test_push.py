"""Pushing the result of a run: at its end, and later, as adapter, merged model and GGUF file, with a model card."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from fake_hub import FakeHub
from gguf import GGUFReader
from run_hosts import TOP, free_port, questions

from trainer.common.errors import UserError
from trainyard.workflows.push_run import PushOptions, check_push


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[FakeHub]:
    one = FakeHub(tmp_path / "hub")
    yield one
    one.close()


@pytest.mark.long
def test_a_run_is_pushed_at_its_end_and_again(hub: FakeHub, tmp_path: Path) -> None:
    outer = {name: value for name, value in os.environ.items() if name not in ("ANSIBLE_CONFIG", "HF_HUB_OFFLINE")}
    environment = outer | {"PYTHONPATH": str(TOP), "ANSIBLE_NOCOLOR": "1"}
    environment |= {"HF_ENDPOINT": hub.url, "HF_TOKEN": "hf_right"}

    def call(*words: str, **more: str) -> subprocess.CompletedProcess[str]:
        command = [Path(sys.executable).with_name(words[0]), *words[1:]] if words[0].startswith("ansible") else words
        return subprocess.run(command, cwd=folder, env=environment | more, capture_output=True, text=True, check=False)

    folder = tmp_path
    made = call(sys.executable, "-m", "trainyard.cli", "init", "mine")
    assert made.returncode == 0, made.stderr
    folder = tmp_path / "mine"
    values = {"model": "tiny", "dataset": str(questions(tmp_path)), "max_steps": 2, "epochs": 20, "run": "first"}
    values |= {"merge": True, "push": "me/first"}
    done = call("ansible-playbook", "train.yml", "-e", json.dumps(values))
    assert done.returncode == 0, done.stdout[-3000:]
    assert f"pushed first (result) to {hub.url}/me/first" in done.stdout and "hf_right" not in done.stdout
    there = hub.folder / "models/me/first"
    adapter = folder / "runs/first/adapter/adapter_model.safetensors"
    assert (there / "adapter_model.safetensors").read_bytes() == adapter.read_bytes()
    assert json.loads((there / "adapter_config.json").read_text())["base_model_name_or_path"] == "tiny"
    assert hub.created == [{"name": "first", "organization": "me", "visibility": "private"}]
    card = (there / "README.md").read_text()
    assert yaml.safe_load(card.split("---")[1])["library_name"] == "peft"
    assert "| steps | 2 of 2," in card and "\nmax_steps: 2\n" in card and "| dataset | questions.jsonl" in card
    assert str(tmp_path) not in card

    push_again = ("ansible-playbook", "playbooks/push.yml", "-e")
    again_words = (*push_again, "run=first push=me/all push_as=merged,gguf")
    again = call(*again_words)
    assert again.returncode == 0, again.stdout[-3000:]
    all_forms = hub.folder / "models/me/all"
    merged = folder / "runs/first/merged/model.safetensors"
    assert (all_forms / "merged/model.safetensors").read_bytes() == merged.read_bytes()
    assert (all_forms / "README.md").read_text() == card
    assert len(GGUFReader(all_forms / "first.gguf").tensors) > 20
    refused = call(*push_again, "run=first push=me/first", HF_TOKEN="hf_wrong")
    why = "error: push: the hub refuses me/first (status 401): check the name and the rights of the token"
    assert why in refused.stdout
    assert "hf_wrong" not in refused.stdout + refused.stderr
    lost = call(*again_words, HF_ENDPOINT=f"http://127.0.0.1:{free_port()}")
    assert "error: push: me/all: [Errno 111] Connection refused" in lost.stdout and "Traceback" not in lost.stdout


def test_what_cannot_be_pushed_is_known_before_the_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    for values, why in (
        ({"push": "a/b"}, r"^push: there is no token of the hub: set HF_TOKEN"),
        ({"push": ""}, r"^push: name a repository"),
        ({"push": "a/b", "push_as": "onnx"}, r"^push_as: expected some of result, merged, gguf, got onnx"),
    ):
        with pytest.raises(UserError, match=why):
            check_push(PushOptions.from_variables({"run": "r"} | values, "push"))
    with pytest.raises(UserError, match=r"push: expected OWNER/NAME, got '\.\./b'"):
        PushOptions.from_variables({"run": "r", "push": "../b"}, "push")
