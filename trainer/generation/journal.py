"""The completions of a run on disk: what has arrived survives the end of the process, so a resumed run trains on the same ones."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from trainer.common.files import write_atomic


@dataclass(frozen=True)
class Completion:
    """One completion.

    Attributes:
        step, place: the step of the run that trains on it, and its place in the step.
        version: of the adapter that wrote it: the number of steps that the adapter had been trained.
        worker: name of the server; empty for a rank.
        ids: its tokens.
    """

    step: int
    place: int
    version: int
    worker: str
    ids: list[int]


class Journal:
    """A file of completions, one a line."""

    def __init__(self, path: Path, is_valid: Callable[[Completion], bool], oldest: int) -> None:
        """Read the file, and keep in it what is valid and belongs to the step `oldest` or a later one.

        A line that a crash has cut is not valid.
        """
        self._path, self.found = path, list[Completion]()
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else ():
            try:
                completion = Completion(**json.loads(line))
                if completion.step >= oldest and is_valid(completion):
                    self.found.append(completion)
            except (ValueError, TypeError, RecursionError):
                continue
        self._lines = [(each.step, _line(each)) for each in self.found]
        self._write()

    def add(self, completions: Iterable[Completion]) -> None:
        """Add completions. When this returns, they are on the disk. Raises OSError."""
        new = [(each.step, _line(each)) for each in completions]
        self._lines += new
        with self._path.open("a", encoding="utf-8") as file:
            file.writelines(line for _, line in new)
            file.flush()
            os.fsync(file.fileno())

    def prune(self, oldest: int) -> None:
        """Forget the completions of the steps before `oldest`. Raises OSError."""
        kept = [(step, line) for step, line in self._lines if step >= oldest]
        if len(kept) < len(self._lines):
            self._lines = kept
            self._write()

    def _write(self) -> None:
        write_atomic(self._path, "".join(line for _, line in self._lines))


def _line(completion: Completion) -> str:
    return json.dumps(asdict(completion)) + "\n"
