"""Answers of a teacher on disk: one JSON line each, synced before it counts.

A line is keyed by the digest of the teacher, the messages, the options, the number of the sample, and whether it was
asked with log-probabilities. A controller that is killed loses only the requests in flight. A line that a crash cut off
is removed when the file is opened.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from trainer.common.errors import DiskError, UserError, disk_failure
from trainer.common.files import sync_path
from trainer.generation.ollama_client import Answer
from trainyard.ollama.teacher_nodes import Prompt

_BLOCK = 1 << 20


def answer_key(digest: str, prompt: Prompt) -> str:
    """Return the SHA-256 (hex) of the inputs of an answer: the digest of the teacher and the prompt."""
    parts = [digest, [dict(message) for message in prompt.messages], dict(prompt.options), prompt.sample]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


class AnswerFile:
    """The answers of one teacher, open for this process alone.

    with AnswerFile(path) as answers: ... `path`: path of the file. `repaired`: bytes of a cut line that opening has
    removed. `damaged`: number of lines that are not answers; they are ignored.
    """

    def __init__(self, path: Path) -> None:
        """Open or create the file. Raises UserError: another process has it open; DiskError: it cannot be read or written."""
        self.path, self.repaired, self.damaged = path, 0, 0
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            new = not path.exists()
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise DiskError(f"distill: cannot open {path}: {error.strerror}") from None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._file)
            raise UserError(
                f"distill: another controller collects answers in {path}: wait for it, or stop it first"
            ) from None
        try:
            self._repair()
            if new:
                sync_path(path.parent)
            # A truncated one is asked again: the server may have a larger context now.
            self._keys = {record["key"] for record in self.records() if not record.get("truncated")}
        except OSError as error:
            os.close(self._file)
            raise DiskError(f"distill: cannot read {path}: {error.strerror}") from None

    def __enter__(self) -> AnswerFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._file)

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, key: object) -> bool:
        return key in self._keys

    def add(self, answers: Iterable[tuple[Prompt, str, str, Answer]]) -> None:
        """Append answers and return when they are on disk.

        `answers`: the prompt, the node's name, the digest of its model, and the answer. Raises DiskError: they cannot
        be written; none of them counts.
        """
        lines, keys = [], []
        for prompt, node, digest, answer in answers:
            key = answer_key(digest, prompt)
            if key in self._keys or key in keys:
                continue
            keys.append(key)
            record = {
                "key": key,
                "digest": digest,
                "messages": [dict(message) for message in prompt.messages],
                "options": dict(prompt.options),
                "sample": prompt.sample,
                "text": answer.text,
                "thinking": answer.thinking,
                "finished": answer.finished,
                "truncated": answer.truncated,
                "tokens": answer.tokens,
                "seconds": round(answer.seconds, 3),
                "node": node,
                "time": round(time.time(), 3),
            }
            lines.append(json.dumps(record) + "\n")
        if not lines:
            return
        try:
            self._write("".join(lines).encode())
        except OSError as error:
            raise DiskError(
                f"distill: cannot write {self.path}: {disk_failure(error) or error.strerror}: free disk space, then run "
                "the same command again"
            ) from None
        self._keys.update(keys)

    def records(self) -> Iterator[dict[str, Any]]:
        """Yield the answers in the order of the file; a line that is not an answer is counted in `damaged` and left
        out."""
        self.damaged = 0
        with self.path.open("rb") as file:
            for line in file:
                record: Any = None
                with contextlib.suppress(ValueError, RecursionError):
                    record = json.loads(line)
                if _is_answer(record):
                    yield record
                else:
                    self.damaged += 1

    def _write(self, data: bytes) -> None:
        end = os.fstat(self._file).st_size
        try:
            left = memoryview(data)
            while left:
                left = left[os.write(self._file, left) :]
            os.fsync(self._file)
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, end)
            raise

    def _repair(self) -> None:
        """Remove what follows the last line feed: the line of a write that did not end."""
        size = end = os.fstat(self._file).st_size
        while end:
            start = max(0, end - _BLOCK)
            found = os.pread(self._file, end - start, start).rfind(b"\n")
            if found >= 0:
                end = start + found + 1
                break
            end = start
        if end < size:
            self.repaired = size - end
            os.ftruncate(self._file, end)
            os.fsync(self._file)


def _is_answer(record: Any) -> bool:
    return (
        isinstance(record, dict)
        and all(isinstance(record.get(name), str) for name in ("key", "digest", "text", "finished"))
        and isinstance(record.get("messages"), list)
    )


def answers_path(home: Path, teacher: str) -> Path:
    """Return the file with the answers of a teacher below the folder `home`. The name of the teacher is any text."""
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", teacher).strip("-._")[:60] or "teacher"
    return home / "answers" / f"{stem}-{hashlib.sha256(teacher.encode()).hexdigest()[:8]}.jsonl"
