"""`python -m trainer evaluate` beside a loop of transformers, written by hand."""

import io
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from trainer_runs import Here, records, write_jsonl

from trainer.common.errors import UserError
from trainer.config import read_yaml
from trainer.data.samples import read_samples
from trainer.launch.gguf_export import export
from trainer.models import greedy_answers
from trainer.offline import evaluate
from trainer.offline.merge import read_request
from trainer.spec import make_spec


def ask(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], **request: Any) -> dict[str, Any]:
    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps(request)))
    assert evaluate.main() == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return found


def by_hand(base: Path, adapter: Path | None, questions: list[dict[str, Any]]) -> list[tuple[str, float | None]]:
    """Return the answer to each question and the loss of its reference, one question at a time."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(base)
    model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    model = PeftModel.from_pretrained(model, str(adapter)) if adapter else model
    found = []
    for question in questions:
        ids = tokenizer.apply_chat_template(
            question["messages"], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )["input_ids"]
        out = model.generate(input_ids=ids, max_new_tokens=24, do_sample=False, eos_token_id=1, pad_token_id=2)
        answer = tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
        loss = None
        if question["reference"]:
            full = tokenizer.apply_chat_template(
                [*question["messages"], {"role": "assistant", "content": question["reference"]}],
                return_tensors="pt",
                return_dict=True,
            )["input_ids"]
            labels = full.clone()
            labels[0, : ids.shape[1]] = -100
            loss = float(model(input_ids=full, labels=labels).loss)
        found.append((answer, loss))
    return found


@pytest.mark.slow
def test_answers_and_losses_are_those_of_a_loop_by_hand(
    here: Here, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Questions of other lengths are in one batch; every batch size gives the same answers."""
    assert here(lora_r=4, lr=0.02, max_steps=20, precision="32-true") == 0, here.err
    run_dir, questions = here.run_dir(), []
    for number, record in enumerate(records(30, seed=5)):
        messages = [{"role": "user", "content": record["instruction"] * (1 + number % 4)}]
        questions.append({"messages": messages, "reference": record["output"] if number % 3 else ""})
    capsys.readouterr()
    for base, adapter in ((False, run_dir / "adapter"), (True, None)):
        expected = by_hand(Path(here.model), adapter, questions)
        assert len({answer for answer, _ in expected}) > 5
        for size in (16, 1):
            request = {"folder": str(run_dir), "base": base, "max_tokens": 24, "batch_size": size}
            found = ask(monkeypatch, capsys, questions=questions, **request)["answers"]
            assert [answer["text"] for answer in found] == [answer for answer, _ in expected]
            for answer, (_, loss) in zip(found, expected, strict=True):
                assert answer["loss"] == (None if loss is None else pytest.approx(loss, rel=1e-5))
                assert (answer["tokens"] == 24) >= answer["cut"] and (answer["loss_tokens"] > 0) == (loss is not None)


def test_a_run_without_weights(here: Here, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (here.run_dir()).mkdir(parents=True)
    (here.run_dir() / "spec.yml").write_text(f"model: {here.model}\n")
    request = {"folder": str(here.run_dir()), "base": False, "questions": [], "max_tokens": 4, "batch_size": 1}
    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps(request)))
    assert evaluate.main() == 1 and "has no adapter" in json.loads(capsys.readouterr().out)["error"]
    (here.run_dir() / "adapter").mkdir()
    os.mkfifo(here.run_dir() / "adapter/adapter_model.safetensors")
    parts = {"parts": [{"run": "r", "folder": str(here.run_dir())}]}
    exported = {"run_dir": str(here.run_dir()), "quantize": ""}
    for call in (lambda: evaluate._answer(request), lambda: read_request(parts), lambda: export(exported)):
        with pytest.raises(UserError, match=r"adapter_model.safetensors is not a regular file: remove it$"):
            call()


# The greedy answers that a run keeps ---------------------------------------------------------------------------------


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
    rows: list[Any] = [{"text": "one two three four"}] * 2
    rows += [{"text": "a " * 40}, *records(100), {"instruction": "x" * 3000, "output": "y"}, {"text": "alone"}]
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


def test_a_run_on_plain_text_is_asked_without_a_chat_template(
    here: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"prompt": f"the {word}", "completion": " runs"} for word in ("cat", "dog", "sun", "moon")]
    data = write_jsonl(tmp_path / "text.jsonl", rows)
    options = {"dataset": str(data), "eval_split": 0, "total_batch_size": 4, "max_steps": 40, "packing": False}
    assert here(lora_r=0, lr=3e-3, precision="32-true", **options) == 0, here.err
    asked = [{"messages": [{"role": "user", "content": row["prompt"]}], "reference": "runs"} for row in rows]
    request = {"folder": str(here.run_dir()), "base": False, "max_tokens": 8, "batch_size": 4, "questions": asked}
    found = ask(monkeypatch, capsys, **request)["answers"]
    assert [answer["text"].strip() for answer in found] == ["runs"] * 4 and max(answer["loss"] for answer in found) < 1
