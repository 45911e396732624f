"""The greedy answers that a run keeps for its deployment."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from trainer_runs import Here, records, write_jsonl

from trainer.config import read_yaml
from trainer.data.samples import read_samples
from trainer.models import greedy_answers
from trainer.spec import make_spec


def test_a_run_keeps_the_answers_of_its_weights(here: Here) -> None:
    """They equal those that the first deployment would compute, although the run rounds its base to 16 bits."""
    assert here(lora_r=4, max_steps=3, precision="bf16-mixed") == 0, here.err
    file = here.run_dir() / "deploy/answers.json"
    kept = json.loads(file.read_text())
    assert kept["weights"] == here.result()["adapter_sha256"] and len(kept["prompts"]) == len(kept["answers"]) == 20
    assert sum(map(bool, kept["answers"])) > 10
    file.unlink()
    spec = make_spec(read_yaml(here.run_dir() / "spec.yml"), "spec.yml")
    computed = greedy_answers.greedy_answers(spec, here.run_dir(), kept["weights"])
    assert computed["prompts"] == kept["prompts"] and computed["bos"] == kept["bos"] == ""
    assert computed["answers"] == kept["answers"]


def test_a_failure_does_not_fail_the_run(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("out\nof memory")

    monkeypatch.setattr(greedy_answers, "answer", fail)
    assert here(lora_r=0, max_steps=2) == 0, here.err
    assert "warning: no greedy answers (" in here.out and not (here.run_dir() / "deploy/answers.json").exists()
    monkeypatch.setattr(greedy_answers, "MAX_PARAMETERS", 10)
    assert here("s", lora_r=0, max_steps=2) == 0 and "warning" not in here.out


def test_prompts(tmp_path: Path) -> None:
    """They are different, bounded and spread; the prompt of a text is its first half, that of a chat its question."""
    text = {"text": "one two three four"}
    rows = [
        text,
        text,
        {"text": "a " * 40},
        *records(100),
        {"instruction": "x" * 3000, "output": "y"},
        {"text": "alone"},
    ]
    prompts = greedy_answers.choose_prompts(read_samples(write_jsonl(tmp_path / "d.jsonl", rows)), 200)
    assert prompts[0] == {"prompt": "one two"} and prompts[1] == {"prompt": "a a a a a a a a a a a a"}
    assert {"prompt": "alone"} in prompts and all(len(json.dumps(prompt)) < 2100 for prompt in prompts)
    assert {tuple(m["role"] for m in prompt["messages"]) for prompt in prompts[2:-1]} == {("user",)}
    assert len(greedy_answers.choose_prompts(read_samples(tmp_path / "d.jsonl"), 7)) == 7


def test_prompts_are_what_a_server_can_be_asked(tmp_path: Path) -> None:
    chat = [{"role": role, "content": f"the {role}"} for role in ("system", "user", "assistant", "user", "assistant")]
    thought = [*chat[:2], {**chat[2], "reasoning_content": "hm"}, *chat[3:]]
    file = write_jsonl(tmp_path / "d.jsonl", [{"messages": chat}, {"messages": thought}])
    for system, roles in (
        ("keep", ["system", "user", "assistant", "user"]),
        ("prepend", ["user", "assistant", "user"]),
    ):
        spec = make_spec({"dataset": str(file), "system": system}, "-e")
        prompts = greedy_answers.choose_prompts(greedy_answers._samples(spec))
        assert [[message["role"] for message in prompt["messages"]] for prompt in prompts] == [roles]


def test_generation_itself_ends_at_the_time_limit(here: Here) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, words = AutoModelForCausalLM.from_pretrained(here.model), AutoTokenizer.from_pretrained(here.model)
    seen: list[float] = []
    generate = model.generate

    def watched(*args: Any, **options: Any) -> Any:
        seen.append(options["max_time"])
        return generate(*args, **options)

    model.generate = watched
    prompts = [{"messages": [{"role": "user", "content": "what"}]}]
    assert len(greedy_answers.answer(model, words, prompts, time.monotonic() + 60)) == 1
    assert seen and all(0 < limit <= 60 for limit in seen)
    with pytest.raises(TimeoutError):
        greedy_answers.answer(model, words, prompts, time.monotonic() + 0.001)
