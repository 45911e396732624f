"""Several runs in one YAML file: values for all of them, a grid of values, and runs with values of their own.

model: ./my-model          # for all runs
priority: low
grid:                      # one run for each combination
  lr: [1e-4, 3e-4]
  seed: [1, 2]
runs:                      # or runs one by one, each of which may have a grid, too
  - run: baseline
  - run: large
    after: baseline        # a run, or all runs of a grid
    lora_r: 64
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from trainer.common.errors import UserError
from trainer.common.formats import printable, quoted
from trainer.config import read_yaml
from trainer.config.aliases import field_of
from trainyard.queue.request import MAX_RUNS, is_run_name

GRID, RUNS = "grid", "runs"
MAX_NAME = 64
_DIGITS = 6  # of a digest in a name
_OUTSIDE = re.compile(r"[^A-Za-z0-9._+-]+")


class SweepRun(NamedTuple):
    """One run of a sweep: its values, and the name of its grid, for which `after` may wait; empty for none."""

    values: dict[str, Any]
    grid: str = ""


def read_sweep(path: Path, given: Mapping[str, Any]) -> list[SweepRun]:
    """Return the values of every run of the file, each with a unique name as `run`.

    `given`: values for all runs, which take precedence over those of the file. Raises UserError: the file cannot be
    read, a run is not a mapping, two runs have the same name or the same values, a value is given twice, or there are
    more than MAX_RUNS runs.
    """
    return expand(read_yaml(path, "file"), given, path.name, path.stem)


def expand(document: Mapping[str, Any], given: Mapping[str, Any], source: str, stem: str) -> list[SweepRun]:
    """Return the runs of a sweep, see `read_sweep`. `source`: its name; `stem`: start of names that it does not give."""
    found: list[tuple[SweepRun, str, bool]] = []
    fields = {field_of(name) for name in given}
    for entry, number in _entries(document, source):
        grid = _grid(entry.pop(GRID, None), source)
        for name in (*entry, *grid):
            if field_of(name) in fields and (name in grid or name == "run"):
                raise UserError(f"{source}: {printable(name, 80)} is in the file and given: set it in one place")
        label = str(given.get("run") or entry.get("run") or stem)
        base = label if "run" in entry or number is None else f"{label}-{number}"
        fixed = {**_without(entry, given), **given}
        for chosen in itertools.product(*grid.values()):  # the last name changes fastest
            combination = dict(zip(grid, chosen, strict=True))
            values = {**fixed, **combination}
            run = SweepRun(values, _clean(base) if combination and is_run_name(_clean(base)) else "")
            # A name lists the values, such as `-lr1e-4-seed2`.
            words = [_OUTSIDE.sub("-", f"{name}{_word(value)}").strip("-.") for name, value in combination.items()]
            found.append((run, "-".join([base, *words]), bool(combination) or "run" not in values))
            if len(found) > MAX_RUNS:
                raise UserError(f"{source}: it stands for more than {MAX_RUNS} runs: split it")
    return _named(found, source)


def _entries(document: Mapping[str, Any], source: str) -> Iterator[tuple[dict[str, Any], int | None]]:
    """Yield the values of each run before its grid, and its number among the runs that the file lists."""
    common = {name: value for name, value in document.items() if name != RUNS}
    listed = document.get(RUNS)
    if listed is None:
        yield common, None
        return
    if not isinstance(listed, list) or not listed:
        raise UserError(f"{source}: {RUNS}: expected a list of runs, each with names and values")
    for number, entry in enumerate(listed, 1):
        if not isinstance(entry, Mapping):
            raise UserError(f"{source}: run {number} is {quoted(entry)}: expected names and values, as `- lr: 1e-4`")
        values = {str(name): value for name, value in entry.items()}
        if RUNS in values:
            raise UserError(f"{source}: run {number} has {RUNS}: it cannot be nested")
        grids = {GRID: {**_grid(common.get(GRID), source), **_grid(values.get(GRID), source)}}
        yield {**_without(common, values), **values, **grids}, number


def _without(values: Mapping[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values whose fields `others` do not set, under whatever name."""
    fields = {field_of(name) for name in others}
    return {name: value for name, value in values.items() if field_of(name) not in fields}


def _grid(grid: Any, source: str) -> dict[str, list[Any]]:
    """Return the values of each name of a grid. Raises UserError."""
    if grid is None:
        return {}
    if not isinstance(grid, Mapping):
        raise UserError(f"{source}: {GRID}: expected a list of values for each name, as `lr: [1e-4, 3e-4]`")
    for name, values in grid.items():
        shown = printable(name, 80)
        if not isinstance(values, list) or not values:
            raise UserError(f"{source}: {GRID}: {shown} is {quoted(values)}: expected a list of values")
        if name in ("run", "after"):
            raise UserError(f"{source}: {GRID}: {shown} cannot have several values: list the runs under {RUNS}")
        if len({json.dumps(value, sort_keys=True, default=str) for value in values}) < len(values):
            raise UserError(f"{source}: {GRID}: {shown} has the same value twice")
    return {str(name): values for name, values in grid.items()}


def _word(value: Any) -> str:
    """Return a value as text: a path by its last part."""
    if isinstance(value, list | Mapping):
        return _digest(value)
    return str(value).lower() if isinstance(value, bool) else Path(str(value)).name.replace("+", "")


def _named(found: list[tuple[SweepRun, str, bool]], source: str) -> list[SweepRun]:
    """Return the runs with unique names. A name that is derived ends with a digest if it is too long or not unique."""
    names = [_clean(name) if derived else name for _, name, derived in found]
    runs, taken = [], set()
    for (run, _, derived), name in zip(found, names, strict=True):
        own = {key: value for key, value in run.values.items() if key != "run"}
        if derived and (len(name) > MAX_NAME or names.count(name) > 1 or not name):
            name = f"{name[: MAX_NAME - _DIGITS - 1].rstrip('-._') or 'run'}-{_digest(own)}"
        if not is_run_name(name):
            raise UserError(f"{source}: run {quoted(name)}: a name has at most 64 letters, digits, '.', '_' and '-'")
        if name in taken:
            raise UserError(f"{source}: two runs are named {name}, or have the same values: give each its own `run`")
        taken.add(name)
        runs.append(SweepRun({**own, "run": name}, run.grid))
    return runs


def _clean(name: str) -> str:
    """Return a derived name without characters that the name of a run cannot have."""
    return _OUTSIDE.sub("-", name).replace("+", "").strip("-._")


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:_DIGITS]


def in_order(after: Mapping[str, tuple[str, ...]]) -> list[str]:
    """Return the runs so that each one comes after the runs that it waits for; otherwise their order stays.

    `after`: for each run of a batch the runs that it waits for; others than those of the batch do not count. Raises
    UserError: runs wait for each other.
    """
    found: list[str] = []
    left = list(after)
    while left:
        ready = [run for run in left if not set(after[run]) & set(left)]
        if not ready:
            raise UserError(f"after: {', '.join(left[:5])} wait for each other")
        found += ready
        left = [run for run in left if run not in ready]
    return found


def grids_of(runs: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """Return the names of the runs of each grid. `runs`: for each run its name and its grid, empty for none."""
    grids: dict[str, list[str]] = {}
    for run, grid in runs:
        if grid:
            grids.setdefault(grid, []).append(run)
    return grids


def without_grids(names: Iterable[str], grids: Mapping[str, Sequence[str]], runs: Collection[str]) -> tuple[str, ...]:
    """Return names of runs, with all runs of a grid in place of its name; a run of `runs` precedes a grid of its name."""
    known = set(runs)
    return tuple(dict.fromkeys(run for name in names for run in ([name] if name in known else grids.get(name, [name]))))
