"""A server takes several spellings for one model: none of them replaces or removes a model of another owner."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fake_target import Target, serve_target

from trainer.generation.ollama_client import OllamaClient, same_model, server_form
from trainyard.remote.ollama import _accept, ollama

SPELLINGS = ["mine", "Mine", "mine:latest", "MINE:Latest", "library/mine", "registry.ollama.ai/library/Mine"]


def request_of(target: Target, folder: Path, name: str, **more: Any) -> dict[str, Any]:
    return {"urls": [target.url], "records": str(folder / "deployed"), "name": name} | more


@pytest.mark.parametrize("name", SPELLINGS)
def test_each_spelling_finds_the_model_of_another_owner(name: str, tmp_path: Path) -> None:
    with serve_target("127.0.0.1", "0.9.3", lambda body, question: "") as target:
        target.models["mine:latest"] = {"owner": "user"}
        state = ollama(request_of(target, tmp_path, name, step="state", base="", like=None, tokens=0))
        assert state["digest"] == target.digest("mine:latest") and state["record"] is None and state["models"] == 0
        assert ollama(request_of(target, tmp_path, name, step="remove", check=False)) == {
            "changed": False,
            "foreign": True,
        }
        assert target.models == {"mine:latest": {"owner": "user"}}
        assert OllamaClient(target.url).digest(name) == state["digest"]


@pytest.mark.parametrize("name", SPELLINGS)
def test_a_record_belongs_to_one_digest(name: str, tmp_path: Path) -> None:
    """A model that the user created anew under the name of a deployment is the user's, however the deployment was spelled."""
    with serve_target("127.0.0.1", "0.9.3", lambda body, question: "") as target:
        target.models["mine:trainyard-check"] = {"from": "run"}
        request = request_of(target, tmp_path, name, key="k", refused=[])
        _accept(OllamaClient(target.url), request, "mine:trainyard-check")
        record = json.loads(next((tmp_path / "deployed").iterdir()).read_text())
        assert record["name"] == "mine:latest" and record["digest"] == target.digest(target.listed("mine"))
        target.models[target.listed("mine")] = {"owner": "user"}
        assert ollama(request | {"step": "remove", "check": False}) == {"changed": False, "foreign": True}
        assert {"owner": "user"} in target.models.values()


def test_names_that_differ_for_a_server() -> None:
    others = {"mine:7b": "a", "hf.co/mine:latest": "b", "user/mine:latest": "c", "mine2:latest": "d"}
    assert same_model(others, "mine") == "" and len({server_form(name) for name in others}) == len(others)
    assert server_form("hf.co/User/Model-GGUF:Q4_K_M") == "hf.co/user/model-gguf:q4_k_m"
