"""The questions that a run and its base answer when the run has finished: the launch option `eval_questions`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.common.errors import UserError
from trainer.common.files import to_json, write_atomic
from trainer.config import RunSpec
from trainyard.evaluate.questions import Question, read_questions
from trainyard.evaluate.side_by_side import Connect, EvaluateOptions, evaluate
from trainyard.run.launch_options import LaunchOptions
from trainyard.run.session import KeepRecord
from trainyard.run.types import Report
from trainyard.wire.connection import Host
from trainyard.wire.run_errors import RunError

FOLDER = "final-evaluations"  # below the folder of created files


@dataclass(frozen=True)
class FinalEvaluation:
    """Evaluates a run that has finished. The result is kept, so that the same command shows it again.

    Attributes:
        work: folder of created files.
        keep_record: keeps a record of the result for the service of the dashboard, see `evaluate`.
    """

    hosts: Sequence[Host]
    connect: Connect
    launch: LaunchOptions
    work: Path
    report: Report
    keep_record: KeepRecord | None

    def __call__(self, run: str, result: Mapping[str, Any]) -> dict[str, Any]:
        """Return `scores`, and readable `lines`. Raises RunError."""
        file = self.work / FOLDER / f"{run}.json"
        try:
            key = _key(result, read_questions(self.launch.eval_questions))
        except UserError as error:
            raise RunError(f"run {run} is finished, but not evaluated: {error}") from None
        try:
            kept = json.loads(file.read_text(encoding="utf-8"))
            if kept["key"] == key:
                return {"scores": kept["scores"], "lines": kept["lines"]}
        except (OSError, ValueError, KeyError, TypeError):
            pass  # evaluate again
        options = EvaluateOptions(subjects=("base", run), questions=self.launch.eval_questions)
        how: dict[str, Any] = {"home": self.work.parent, "report": self.report}
        how["keep_record"] = self.keep_record
        try:
            found = evaluate(options, self.hosts, self.connect, self.launch, **how)
            file.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(file, to_json({"key": key, "lines": found["lines"]} | found["result"], indent=1))
        except (RunError, UserError) as error:
            raise RunError(f"run {run} is finished, but not evaluated: {error}") from None
        except OSError as error:
            raise RunError(f"run {run} is finished: cannot write {file}: {error.strerror}") from None
        return {"scores": found["result"]["scores"], "lines": found["lines"]}


def _key(result: Mapping[str, Any], questions: Sequence[Question]) -> str:
    """Return the digest of what decides about an evaluation: the weights, and all that the questions say."""
    weights = [result.get(name) for name in ("adapter_sha256", "model_sha256")]
    asked = [
        [each.file, list(each.messages), each.answer, each.choices, each.pattern.pattern if each.pattern else None]
        for each in questions
    ]
    return hashlib.sha256(json.dumps([weights, asked]).encode()).hexdigest()


def check_eval_questions(launch: LaunchOptions, spec: RunSpec) -> None:
    """Check `eval_questions` before a host is contacted. Raises UserError."""
    if launch.eval_questions and spec.script:
        raise UserError("eval_questions: the result of a script cannot be evaluated: omit it")
    read_questions(launch.eval_questions)
