"""Which evaluations at the end of a run are kept and shown again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trainer.common.errors import UserError
from trainer.spec import make_spec
from trainyard.evaluate import after_run
from trainyard.run.launch_options import make_options
from trainyard.wire.run_errors import RunError

LONG = "a" * 300


def test_an_evaluation_is_repeated_if_anything_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, asked, kept = tmp_path / "q.jsonl", list[Any](), list[Any]()

    def evaluate(options: Any, *_: Any, keep_record: Any, **__: Any) -> dict[str, Any]:
        asked.append(options.subjects)
        keep_record("evaluations/1.json", "{}")
        return {"lines": [f"table {len(asked)}"], "result": {"scores": {"q": []}}}

    monkeypatch.setattr(after_run, "evaluate", evaluate)
    launch = make_options({"eval_questions": [str(file)]})
    run = after_run.FinalEvaluation([], lambda _: None, launch, tmp_path, print, lambda *record: kept.append(record))  # type: ignore[arg-type, return-value]
    steps: list[tuple[dict[str, Any], str]] = [
        ({"prompt": "?", "answer": "a", "choices": ["a", "b"]}, "1"),
        ({"prompt": "?", "answer": "a", "choices": ["a", "c"]}, "1"),
        ({"prompt": "?", "regex": f"{LONG}b"}, "1"),
        ({"prompt": "?", "regex": f"{LONG}c"}, "1"),
        ({"prompt": "?", "regex": f"{LONG}c"}, "2"),
    ]
    for number, (question, weights) in enumerate(steps, 1):
        file.write_text(json.dumps(question) + "\n")
        for _ in range(2):
            found = run("mine", {"adapter_sha256": weights, "model_sha256": None})
            assert found == {"lines": [f"table {number}"], "scores": {"q": []}}
    assert asked == [("base", "mine")] * len(steps) == [("base", "mine")] * len(kept)

    file.unlink()
    with pytest.raises(RunError, match="run mine is finished, but not evaluated: questions: no such file"):
        run("mine", {})


def test_the_questions_are_checked_with_the_spec(tmp_path: Path) -> None:
    after_run.check_eval_questions(make_options({}), make_spec({"model": "tiny"}, "here"))
    with pytest.raises(UserError, match="no such file"):
        after_run.check_eval_questions(make_options({"eval_questions": "./none"}), make_spec({"model": "tiny"}, "here"))
    (tmp_path / "own.py").touch()
    with pytest.raises(UserError, match="eval_questions: the result of a script"):
        script = make_spec({"script": str(tmp_path / "own.py")}, "here")
        after_run.check_eval_questions(make_options({"eval_questions": "general"}), script)
