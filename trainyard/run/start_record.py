"""What a run was started with, kept on the controller, so that it can be started again without repeating its options.

The hosts have the spec too. A host must not name files of the controller, and a spec names files.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.config import EMBEDDED_DATASET, OBSERVATORY, SMOLLM2, TINY, RunSpec, make_spec
from trainer.config.dataset_source import with_paths
from trainer.errors import UserError
from trainer.files import write_atomic
from trainer.inputs import path_kind, user_path
from trainyard.run.options import LaunchOptions
from trainyard.run.spec_files import PreparedRun

# Those that may hold secrets, or that were only for this start.
NOT_KEPT = {"run_env", "spec", "limit", "render_only", "render_to", "master_port", "follow"}
_NAMES = {"", TINY, SMOLLM2, EMBEDDED_DATASET, OBSERVATORY}  # that are never paths


@dataclass(frozen=True)
class StartRecord:
    """How a run was started from this controller.

    Attributes:
        spec: spec of the run, with its name.
        launch: the launch options that differ from the defaults, without secrets.
        hosts: their names.
        variables: names of the environment variables of `run_env`, whose values are not kept.
    """

    spec: RunSpec
    launch: Mapping[str, Any]
    hosts: tuple[str, ...]
    variables: tuple[str, ...] = ()

    def options(self, inventory: LaunchOptions) -> LaunchOptions:
        """Return the launch options of the start on top of those of the inventory."""
        return LaunchOptions.model_validate(inventory.model_dump() | dict(self.launch))


def keep_start(home: Path, prepared: PreparedRun, options: LaunchOptions, hosts: Iterable[str]) -> None:
    """Write down the start of a run below the project's folder. A disk that is full does not stop the run."""
    launch = options.model_dump(mode="json", exclude_defaults=True, exclude=NOT_KEPT)
    record = {"spec": prepared.spec, "launch": launch, "hosts": list(hosts), "folder": str(Path.cwd())}
    record["variables"] = sorted(options.run_env)
    path = _path(home, prepared.run)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, json.dumps(record, indent=1), 0o600)
    except OSError:
        return


def has_start(home: Path, run: str) -> bool:
    """Return whether the start of a run is known."""
    return _path(home, run).is_file()


def read_start(home: Path, run: str) -> StartRecord:
    """Return how a run was started. Raises UserError if that is not known."""
    path = _path(home, run)
    try:
        record = json.loads(path.read_bytes())
        values = {name: value for name, value in record["spec"].items() if name in RunSpec.model_fields}
        spec, folder = make_spec(values, str(path)), Path(record["folder"])
        launch = {name: value for name, value in record["launch"].items() if name not in NOT_KEPT}
        names, variables = (tuple(map(str, record.get(name, ()))) for name in ("hosts", "variables"))
        return StartRecord(_in_folder(spec, folder), launch, names, variables)
    except FileNotFoundError:
        raise UserError(
            f"run {run} was not started from this project folder: start it again with trainyard train SPEC --run {run}"
        ) from None
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        raise UserError(
            f"run {run}: cannot read {path}: start it again with trainyard train SPEC --run {run}"
        ) from None


def _path(home: Path, run: str) -> Path:
    return home / ".trainyard" / "starts" / f"{run}.json"


def _in_folder(spec: RunSpec, folder: Path) -> RunSpec:
    """Return the spec with relative paths as they were meant in `folder`, the current one of the start."""
    if folder == Path.cwd():
        return spec

    def found(name: str) -> str:
        path = folder / user_path(name, "path")
        return name if name in _NAMES or not path_kind(path) else str(path)

    dataset = with_paths(spec.model_dump(mode="json")["dataset"], [found(source.path) for source in spec.sources])
    values = spec.model_dump(mode="json") | {"dataset": dataset}
    values |= {name: found(str(values[name])) for name in ("model", "teacher", "script") if values[name]}
    return make_spec(values, "the start")
