"""The models of a server that can be the base of an adapter: the search on the node, and the check of its reply."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_target import Target, serve_target
from tables import table

from trainyard.deploy.adapter_base import base_misfit, run_misfit, tokens_digest, wanted_base
from trainyard.deploy.trained_run import TrainedRun
from trainyard.remote.ollama import BASES_LIMIT, ollama
from trainyard.wire.connection import Host
from trainyard.wire.replies import ReplyError, checked_reply

TOKENS = ["<s>", "a", "b", "ab"]
CONFIG = table("adapter_base")["config"]
SIZES = table("adapter_base")["sizes"]


def trained(name: str = "Llama-3.1-8B-Instruct", kind: str = "adapter", **config: Any) -> TrainedRun:
    host = Host("node1", "127.0.0.1", "/srv", "python3")
    return TrainedRun(host, "/srv/runs/mine", kind, "0" * 64, CONFIG | config, name)


def info(architecture: str = "llama", tokens: Any = TOKENS, **sizes: Any) -> dict[str, Any]:
    """Return `model_info` of a model; a size that is None is missing."""
    known = {f"{architecture}.{name.replace('__', '.')}": size for name, size in (SIZES | sizes).items()}
    known = {name: size for name, size in known.items() if size is not None}
    return {"general.architecture": architecture, "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.pre": "x", **known}


@pytest.fixture(scope="module")
def server() -> Iterator[Target]:
    with serve_target("127.0.0.1", "0.5.4", lambda _, question: question) as target:
        yield target


def state(server: Target, folder: Path, infos: dict[str, Any], run: TrainedRun | None = None) -> dict[str, Any]:
    """Return the state of a server that has these models."""
    server.models = {name: {"model": name} | known.pop("made", {"made": name}) for name, known in infos.items()}
    server.infos = infos
    server.log.clear()
    request = {"step": "state", "urls": [server.url], "name": "mine", "records": str(folder), "base": ""}
    request |= {"like": wanted_base(run or trained(), TOKENS), "tokens": len(TOKENS)}
    return checked_reply("ollama_state", json.loads(json.dumps(ollama(request))))


def names(found: dict[str, Any]) -> list[str]:
    return [base["name"] for base in found["bases"]]


def test_only_models_of_equal_architecture_vocabulary_and_shape_are_found(server: Target, tmp_path: Path) -> None:
    split = {name: (how, how.pop("made", None)) for name, how in table("adapter_base")["infos"].items()}
    known = {name: info(**sizes) | ({"made": made} if made else {}) for name, (sizes, made) in split.items()}
    infos: dict[str, Any] = known | table("adapter_base")["raw_infos"]
    found = state(server, tmp_path, infos)
    assert names(found) == ["fits:1"] and found["bases"][0]["tokens"] == tokens_digest(TOKENS)
    assert (found["models"], found["read"], found["adapters"]) == (16, 14, True)
    assert not base_misfit(trained(), found, TOKENS)
    shows = server.log.count("POST /api/show")
    assert shows == 14 + 4, "the tokens are read only of models whose shape fits"
    plain = trained(num_key_value_heads=None)
    assert names(state(server, tmp_path, {"keys:1": info(**{"attention.head_count_kv": None})}, plain)) == ["keys:1"]


def test_names_that_resemble_the_base_come_first_and_deployed_models_last(server: Target, tmp_path: Path) -> None:
    wanted = ["llama3.1:8b-instruct-q8_0", "hub.example/me/llama-3.1:8b", "llama3:latest"]
    others = ["a:x", "b:x", "llama-3.1-instruct:8b"]
    path = tmp_path / f"{hashlib.sha256(others[-1].encode()).hexdigest()[:32]}.json"
    path.write_text(json.dumps({"name": others[-1], "key": "k", "digest": "d"}))
    found = state(server, tmp_path, {name: info() for name in [*others, *wanted]})
    assert names(found) == wanted and len(wanted) == BASES_LIMIT
    assert (found["read"], found["models"]) == (3, 6)
    same = {"made": {"made": "one model of two names"}}
    found = state(server, tmp_path, {"a:x": info() | same, "b:x": info() | same, others[-1]: info()})
    assert names(found) == ["a:x", others[-1]]


def test_servers_without_adapters_or_with_many_models_are_not_read_to_the_end(server: Target, tmp_path: Path) -> None:
    found = state(server, tmp_path, {f"m{number:02}:1": info(block_count=5) for number in range(70)})
    assert (found["read"], found["models"]) == (64, 70)
    assert "none of the 64 models that were read of its 70 has" in base_misfit(trained(), found, TOKENS)
    server.version = "0.12.3"
    try:
        found = state(server, tmp_path, {"fits:1": info()})
    finally:
        server.version = "0.5.4"
    assert not server.log.count("POST /api/show")
    assert base_misfit(trained(), found, TOKENS) == "Ollama 0.12.3 takes no adapters"


def test_the_controller_checks_what_a_node_says(server: Target, tmp_path: Path) -> None:
    found = state(server, tmp_path, {"fits:1": info(), "other:1": info()})
    for field, value, why in table("adapter_base")["the_controller_checks"]:
        bases = [found["bases"][0], found["bases"][1] | {field: value}]
        assert base_misfit(trained(), found | {"bases": bases}, TOKENS).startswith(why)
    for name in ("../x", "a b", "x\nFROM y", "", "-a", "a:b:c", "\u202ea", 5, "a" * 400):
        with pytest.raises(ReplyError, match=r"ollama_state: bases\.0\.name"):
            checked_reply("ollama_state", found | {"bases": [found["bases"][0] | {"name": name}]})
    with pytest.raises(ReplyError, match="bases"):
        checked_reply("ollama_state", found | {"bases": found["bases"] * 2})
    empty = found | {"bases": [], "models": 0, "read": 0}
    assert base_misfit(trained(), empty, TOKENS) == "its server has no model that could be the base of the adapter"
    assert base_misfit(trained(), empty | {"models": 2, "read": 2}, TOKENS) == (
        "none of its 2 models has the architecture, vocabulary and shape of the run's base model, Llama-3.1-8B-Instruct"
    )
    assert base_misfit(trained(), empty, TOKENS, "llama3") == "it has no model llama3"
    assert "does not list its vocabulary" in base_misfit(trained(), found, [])


def test_runs_that_no_base_takes() -> None:
    assert run_misfit(trained(kind="model")) == "the run has no adapter"
    assert run_misfit(trained(architectures=["XForCausalLM"])) == "adapters of 'XForCausalLM' cannot be written as GGUF"
    assert not run_misfit(trained())
    assert "no readable config.json" in run_misfit(TrainedRun(trained().host, "/srv", "adapter", "0" * 64, {}))
