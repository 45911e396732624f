"""The completions of a run on disk: what has arrived survives the end of the process, so a resumed run trains on the same ones."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from trainer.common.files import write_atomic


@dataclass(frozen=True)
class Completion:
    """One completion. `step, place`: the step of the run that trains on it, and its place in the step."""

    step: int
    place: int
    version: int  # of the adapter that wrote it: the number of steps that the adapter had been trained
    worker: str  # name of the server; empty for a rank
    ids: list[int]  # its tokens


class Journal:
    """A file of completions, one a line."""

    def __init__(self, path: Path, is_valid: Callable[[Completion], bool], oldest: int) -> None:
        """Read the file, and keep in it what is valid and belongs to the step `oldest` or a later one.

        A line that a crash has cut is not valid.
        """
        self._path, self._oldest = path, oldest
        self.found = list(self._read(is_valid))
        self._write(self.found)

    def add(self, completions: Iterable[Completion]) -> None:
        """Add completions. When this returns, they are on the disk. Raises OSError."""
        with self._path.open("a", encoding="utf-8") as file:
            file.writelines(map(_line, completions))
            file.flush()
            os.fsync(file.fileno())

    def prune(self, oldest: int) -> None:
        """Forget the completions of the steps before `oldest`. Raises OSError."""
        if oldest > self._oldest:
            self._oldest = oldest
            self._write(self._read(lambda each: True))

    def _read(self, is_valid: Callable[[Completion], bool]) -> Iterator[Completion]:
        """Yield what is valid and belongs to the oldest step or a later one."""
        for line in (
            self._path.read_text(encoding="utf-8", errors="replace").splitlines() if self._path.exists() else ()
        ):
            try:
                completion = Completion(**json.loads(line))
                if completion.step >= self._oldest and is_valid(completion):
                    yield completion
            except (ValueError, TypeError, RecursionError):
                continue

    def _write(self, completions: Iterable[Completion]) -> None:
        write_atomic(self._path, "".join(map(_line, completions)))


def _line(completion: Completion) -> str:
    return json.dumps(asdict(completion)) + "\n"
