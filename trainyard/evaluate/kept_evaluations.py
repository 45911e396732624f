"""Results of `evaluate` as the dashboard shows them: the scores, and the answers that changed, in a limited number and size."""

from __future__ import annotations

import contextlib
import functools
import json
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.common.files import to_json, write_atomic
from trainer.common.inputs import read_regular
from trainer.supervise.run_files import newest_first
from trainyard.evaluate.scores import Score, sign_test
from trainyard.run.types import plain, read

FOLDER = "evaluations"  # of `.trainyard`
NAME = re.compile(r"[0-9]{8}-[0-9]{6}-[0-9a-f]{6}")
KEPT = 50  # results, the newest
LIMIT = 2 << 20  # bytes of a result
_TEXT = 2000  # characters of a question, a reference and an answer
_ROOM = 150_000  # characters of all of them


@dataclass(frozen=True)
class KeptScore(Score):
    """The score of a subject in one file of questions."""

    subject: str
    tokens_per_second: float


@dataclass(frozen=True)
class Change:
    """How many answers of a file became right (`gained`) or wrong (`lost`) from the first subject to this one; see `sign_test`."""

    subject: str
    gained: int
    lost: int
    p: float


@dataclass(frozen=True)
class ChangedQuestion:
    """A question that some subjects have right and others wrong."""

    text: str
    reference: str
    answers: list[tuple[str, bool] | None]  # text and whether it is right, of each subject; None without an answer


@dataclass(frozen=True)
class FileResult:
    """The result of one file of questions. `left_out`: number of questions that changed and are not in `changed`."""

    file: str
    scores: list[KeptScore]
    changes: list[Change]
    changed: list[ChangedQuestion]
    left_out: int


@dataclass(frozen=True)
class KeptEvaluation:
    """One result; `time` in seconds since the epoch. The first of the `subjects` is the one that others are compared with."""

    time: float
    subjects: list[str]
    files: list[FileResult]


def _file_result(file: str, result: Mapping[str, Any]) -> FileResult:
    speeds, records = result["tokens_per_second"], result["questions"]
    places = {place for place, record in enumerate(records) if record["file"] == file}
    changes, moved = [], set()
    for change in result["changes"]:
        gained, lost = places.intersection(change["gained"]), places.intersection(change["lost"])
        changes.append(Change(change["subject"], len(gained), len(lost), sign_test(len(gained), len(lost))))
        moved |= gained | lost
    room, changed = _ROOM // len(result["scores"]), []
    for place in sorted(moved):
        question = _changed_question(records[place], list(speeds))
        room -= len(str(question))
        if room < 0:
            break
        changed.append(question)
    scores = [KeptScore(**each, tokens_per_second=speeds[each["subject"]]) for each in result["scores"][file]]
    return FileResult(file, scores, changes, changed, len(moved) - len(changed))


def _changed_question(record: Mapping[str, Any], subjects: Sequence[str]) -> ChangedQuestion:
    found = [record["answers"][subject] for subject in subjects]
    answers = [(each["text"][:_TEXT], each["right"]) if each else None for each in found]
    return ChangedQuestion(record["messages"][-1]["content"][:_TEXT], record["answer"][:_TEXT], answers)


def keep_evaluation(work: Path, result: Mapping[str, Any]) -> Path:
    """Write a result of `summarise` below the folder of created files, and remove the oldest ones. Return its path.

    Raises OSError: it cannot be written, or is too large.
    """
    files = [_file_result(file, result) for file in result["scores"]]
    content = to_json(plain(KeptEvaluation(time.time(), list(result["tokens_per_second"]), files)))
    if len(content) > LIMIT:
        raise OSError(0, f"it is larger than {LIMIT >> 20} MiB")
    path = work / FOLDER / f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, content, 0o600)
    for old in newest_first(path.parent.glob("*.json"))[KEPT:]:
        old.unlink(missing_ok=True)
    return path


def kept_evaluations(folder: Path) -> dict[str, KeptEvaluation]:
    """Return the results in a folder by name, the newest first. What is not valid is left out."""
    found = {}
    for path in newest_first(folder.glob("*.json"))[:KEPT]:
        with contextlib.suppress(FileNotFoundError):
            if NAME.fullmatch(path.stem) and (kept := _read_kept(path, path.stat().st_mtime_ns)):
                found[path.stem] = kept
    return dict(sorted(found.items(), key=lambda item: -item[1].time))


@functools.lru_cache(2 * KEPT)
def _read_kept(path: Path, changed: int) -> KeptEvaluation | None:
    """Return a result; None for what is not one. `changed` is the time of its last change, in ns."""
    try:
        return read(KeptEvaluation, json.loads(read_regular(path, LIMIT)))
    except (OSError, ValueError, RecursionError):
        return None
