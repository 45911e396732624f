"""The questions that a run and its base answer when the run has finished: the launch option `eval_questions`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.common.errors import UserError
from trainer.common.files import to_json, write_atomic
from trainer.config import RunSpec
from trainyard.evaluate.questions import Question, read_questions
from trainyard.evaluate.side_by_side import Connect, EvaluateOptions, evaluate
from trainyard.run.launch_options import LaunchOptions
from trainyard.run.types import Report
from trainyard.wire.connection import Host
from trainyard.wire.run_errors import RunError

FOLDER = "final-evaluations"  # below the folder of created files


@dataclass(frozen=True)
class FinalEvaluation:
    """Evaluates a run that has finished. The result is kept, so that the same command shows it again.

    Attributes:
        questions: read before the run starts, so that a mistake is found then.
        work: folder of created files.
    """

    questions: Sequence[Question]
    hosts: Sequence[Host]
    connect: Connect
    launch: LaunchOptions
    work: Path
    report: Report

    def __call__(self, run: str, result: Mapping[str, Any]) -> dict[str, Any]:
        """Return `scores`, and readable `lines`. Raises RunError."""
        file = self.work / FOLDER / f"{run}.json"
        asked = [[list(question.messages), question.answer, str(question.pattern)] for question in self.questions]
        weights = result.get("adapter_sha256") or result.get("model_sha256")
        key = hashlib.sha256(json.dumps([weights, asked]).encode()).hexdigest()
        try:
            kept = json.loads(file.read_text(encoding="utf-8"))
            if kept["key"] == key:
                return {"scores": kept["scores"], "lines": kept["lines"]}
        except (OSError, ValueError, KeyError, TypeError):
            pass  # evaluate again
        options = EvaluateOptions(subjects=("base", run), questions=self.launch.eval_questions)
        how: dict[str, Any] = {"home": self.work.parent, "report": self.report}
        try:
            found = evaluate(options, self.hosts, self.connect, self.launch, **how)
            file.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(file, to_json({"key": key, "lines": found["lines"]} | found["result"], indent=1))
        except (RunError, UserError) as error:
            raise RunError(f"run {run} is finished, but not evaluated: {error}") from None
        except OSError as error:
            raise RunError(f"run {run} is finished: cannot write {file}: {error.strerror}") from None
        return {"scores": found["result"]["scores"], "lines": found["lines"]}


def final_evaluation(
    launch: LaunchOptions, spec: RunSpec | None, hosts: Sequence[Host], connect: Connect, work: Path, report: Report
) -> Callable[[str, Mapping[str, Any]], dict[str, Any]] | None:
    """Return what evaluates a run at its end; None without `eval_questions`. Raises UserError."""
    if not launch.eval_questions:
        return None
    if spec and spec.script:
        raise UserError("eval_questions: the result of a script cannot be evaluated: omit it")
    return FinalEvaluation(read_questions(launch.eval_questions), hosts, connect, launch, work, report)
