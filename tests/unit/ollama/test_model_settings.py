"""What a deployed model has beside its weights: what the run was trained with, unless an option says otherwise."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from fake_target import Target, serve_target
from go_template import render
from tables import table

from trainer.common.errors import UserError
from trainer.generation.ollama_client import OllamaClient
from trainer.generation.ollama_models import create_body
from trainer.generation.ollama_names import same_model, server_form
from trainyard.deploy.deploy_options import make_deploy_options
from trainyard.deploy.model_settings import ModelSettings, SettingsReader
from trainyard.deploy.trained_run import TrainedRun, find_copies, find_run
from trainyard.remote.ollama import _accept, _describe, ollama
from trainyard.wire.connection import Host, HostConnection
from trainyard.wire.openssh import LocalTransport

CHATML = table("model_settings")["chatml"]
NO_SYSTEM = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}" + CHATML
USER = {"role": "user", "content": "Why?"}
SYSTEM = {"role": "system", "content": "Be\nbrief."}
BLOB = f"@sha256:{'a' * 64}"


def settings(
    folder: Path, *, template: str = CHATML, prompts: Any = (), run: Any = None, context: int = 32768, **options: Any
) -> ModelSettings:
    """Return the settings of the model of a run."""
    special = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(special))
    host = Host("node1", "127.0.0.1", "/data", "")
    trained = TrainedRun(host, "/data/runs/r", "adapter", "0" * 64, {}, **run or {})
    chosen = make_deploy_options({"run": "r", "deploy_name": "m", **options})
    answers = {"created": "2026-01-02T03:04:05", "stop": "<|im_end|>", "prompts": list(prompts)}
    return SettingsReader(trained, folder, chosen).read(answers, False, context)


@pytest.mark.parametrize(
    ("most", "row", "wanted", "context"),
    [(2048, 512, 0, 2048), (131072, 512, 0, 8192), (131072, 16384, 0, 16384), (4096, 8192, 0, 4096)]
    + [(131072, 512, 65536, 65536), (0, 512, 0, 0), (0, 10**30, 0, 0), (0, 512, 1024, 1024)],
)
def test_the_context_is_that_of_the_model(most: int, row: int, wanted: int, context: int, tmp_path: Path) -> None:
    found = settings(tmp_path, context=most, run={"seq_length": row}, deploy_context=wanted)
    assert found.context == context
    assert found.parameters == {"stop": ["<|im_end|>", "</s>"]} | ({"num_ctx": context} if context else {})


def test_an_adapter_resets_what_its_base_sets(tmp_path: Path) -> None:
    found = replace(settings(tmp_path), reset=("presence_penalty", "temperature"))
    assert found.parameters == settings(tmp_path).parameters | {"presence_penalty": 0.0, "temperature": 0.8}
    shown = {"parameters": 'stop "x"\npresence_penalty               1.5\ntemperature 1', "model_info": {}}
    assert _describe("b", "0" * 64, shown, 1)["parameters"] == ["presence_penalty", "temperature"]


@pytest.mark.parametrize("name", ["bot:trainyard-check", "Bot:Trainyard-Old", "library/bot:trainyard-source"])
def test_tags_of_deployments_are_refused(name: str) -> None:
    with pytest.raises(UserError, match="deploy_name: deployments use the tag trainyard-"):
        make_deploy_options({"run": "r", "deploy_name": name})


def test_the_system_message_of_the_training_data_is_the_default(tmp_path: Path) -> None:
    same = [{"messages": [SYSTEM, USER | {"content": text}]} for text in "ab"]
    found = settings(tmp_path, prompts=same)
    assert found.system == "Be\nbrief." and "'Be\\nbrief.'" in found.notes[-1]
    assert settings(tmp_path, prompts=[*same, {"messages": [USER]}]).system == ""
    assert settings(tmp_path, prompts=[{"prompt": "a"}]).system == ""
    for text in ("", "Other."):
        assert settings(tmp_path, prompts=same, deploy_system=text).system == text


def test_a_template_needs_a_place_for_the_system_message(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"deploy_system: the chat template of r has no place .*: remove"):
        settings(tmp_path, template=NO_SYSTEM, deploy_system="Be brief.")
    # A run with system=prepend has it in the first question.
    found = settings(tmp_path, template=NO_SYSTEM, run={"prepend": True}, deploy_system="Be brief.")
    more = [{"role": "assistant", "content": "So."}, USER]
    chat = [USER | {"content": "Be\nbrief.\n\nWhy?"}, *more]
    assert render(found.template, [SYSTEM, USER, *more]) == render(found.template, chat)
    assert "<|im_start|>system" not in found.template


def test_both_forms_of_create() -> None:
    more: dict[str, Any] = {"template": "{{ .Prompt }}", "system": 'A "b"\nc.', "quantize": "q6_K"}
    more |= {"parameters": {"stop": ["</s>", "<e>"], "num_ctx": 4096}}
    new = create_body((0, 9, 3), "m", BLOB, **more)
    assert new == {"model": "m", "files": {"model.gguf": BLOB[1:]}} | more
    old = create_body((0, 5, 4), "m", BLOB, **more)
    assert old.pop("modelfile").splitlines() == [
        f"FROM {BLOB}",
        'TEMPLATE """{{ .Prompt }}"""',
        'SYSTEM """A "b"',
        'c."""',
        'PARAMETER stop "</s>"',
        'PARAMETER stop "<e>"',
        "PARAMETER num_ctx 4096",
    ]
    assert old == {"model": "m", "quantize": "q6_K"}
    assert create_body((0, 9, 3), "m", "base", adapter=BLOB) == {
        "model": "m",
        "from": "base",
        "adapters": {"adapter.gguf": BLOB[1:]},
    }
    for bad in ({"system": 'x"""\nFROM y'}, {"system": 'x"'}, {"parameters": {"stop": ["a\nFROM y"]}}):
        assert create_body((0, 9, 3), "m", "base", **bad)
        with pytest.raises(ValueError, match=r"this version of Ollama cannot read"):
            create_body((0, 5, 4), "m", "base", **bad)


def test_a_run_on_plain_text_gets_no_chat_template(tmp_path: Path) -> None:
    found = settings(tmp_path, prompts=[{"prompt": "a"}])
    assert found.template == "{{ .Prompt }}" and "without a chat template" in found.notes[0]


# Spellings of one model ----------------------------------------------------------------------------------------------

SPELLINGS = ["mine", "Mine", "mine:latest", "MINE:Latest", "library/mine", "registry.ollama.ai/library/Mine"]


def request_of(target: Target, folder: Path, name: str, **more: Any) -> dict[str, Any]:
    return {"urls": [target.url], "records": str(folder / "deployed"), "name": name} | more


@pytest.mark.parametrize("name", SPELLINGS)
def test_each_spelling_finds_the_model_of_another_owner(name: str, tmp_path: Path) -> None:
    with serve_target("127.0.0.1", "0.9.3", lambda body, question: "") as target:
        target.models["mine:latest"] = {"owner": "user"}
        state = ollama(request_of(target, tmp_path, name, step="state", base="", like=None, tokens=0))
        assert state["digest"] == target.digest("mine:latest") and state["record"] is None and state["models"] == 0
        found = ollama(request_of(target, tmp_path, name, step="remove", check=False))
        assert found == {"changed": False, "foreign": True}
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


# What a rank has written into a finished run -------------------------------------------------------------------------

CONFIG = {"model_type": "llama", "hidden_size": 64}


def find(folder: Path, spec: str, **result: str) -> TrainedRun:
    """Return what the controller finds in a run with this spec."""
    run = folder / "data/runs/r"
    run.mkdir(parents=True, exist_ok=True)
    (run / "spec.yml").write_text(spec)
    (run / "result.json").write_text(json.dumps({"status": "finished", "adapter_sha256": "ab" * 32, **result}))
    host = Host("node1", "127.0.0.1", str(folder / "data"), sys.executable)
    return find_run("r", {"node1": host}, {"node1": HostConnection(host, LocalTransport())}, with_base=True)


def test_a_spec_whose_aliases_take_all_memory_is_refused(tmp_path: Path) -> None:
    lines = ["a0: &a0 {k: 1}", *(f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 10)}]}}" for i in range(1, 6))]
    with pytest.raises(UserError, match=r"node1: .*alias"):
        find(tmp_path, "\n".join(lines))


def test_the_configuration_of_the_base_model_is_read(tmp_path: Path) -> None:
    for model in (tmp_path / "models/base", tmp_path / "data/runs/other/model"):
        model.mkdir(parents=True)
        (model / "config.json").write_text(json.dumps(CONFIG))
        found = find(tmp_path, yaml.safe_dump({"model": str(model)}))
        assert (found.base, found.base_name) == (CONFIG, model.name)


def test_no_other_file_is_taken_for_it(tmp_path: Path) -> None:
    secret, model = tmp_path / ".docker", tmp_path / "data/runs/other/model"
    secret.mkdir()
    model.parent.mkdir(parents=True)
    (secret / "config.json").write_text('{"auths": {}}')
    model.symlink_to(secret)
    assert not find(tmp_path, yaml.safe_dump({"model": str(secret)})).base
    (secret / "config.json").write_text(json.dumps(CONFIG))
    assert not find(tmp_path, yaml.safe_dump({"model": str(model)})).base, "a link in a folder of runs"


def test_only_hosts_with_the_same_weights_have_the_run(tmp_path: Path) -> None:
    hosts = {}
    for number, digest in enumerate(("a", "b", "a")):
        name = f"node{number + 1}"
        find(tmp_path / name, "model: /m", adapter_sha256=digest * 64)
        hosts[name] = Host(name, "127.0.0.1", str(tmp_path / name / "data"), sys.executable)
    connections = {name: HostConnection(host, LocalTransport()) for name, host in hosts.items()}
    assert [copy.host.name for copy in find_copies("r", hosts, connections)] == ["node1", "node3"]
