"""What a deployed model has beside its weights: what the run was trained with, unless an option says otherwise."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from go_template import render

from trainer.common.errors import UserError
from trainer.generation.ollama_models import create_body
from trainyard.deploy.deploy_options import make_deploy_options
from trainyard.deploy.model_settings import ModelSettings, SettingsReader
from trainyard.deploy.trained_run import TrainedRun
from trainyard.remote.ollama import _describe
from trainyard.wire.connection import Host

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
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
def test_the_context_is_that_of_the_model_and_not_of_a_row(
    most: int, row: int, wanted: int, context: int, tmp_path: Path
) -> None:
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
    with pytest.raises(
        UserError, match="deploy_system: the chat template of r has no place for a system message: remove"
    ):
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
