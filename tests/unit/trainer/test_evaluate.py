"""`python -m trainer evaluate` beside a loop of transformers, written by hand."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from trainer_runs import Here, records

from trainer.offline import evaluate


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
            request = {
                "folder": str(run_dir),
                "base": base,
                "questions": questions,
                "max_tokens": 24,
                "batch_size": size,
            }
            found = ask(monkeypatch, capsys, **request)["answers"]
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
