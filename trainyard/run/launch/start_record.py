"""What a run was started with, so that it can be started again without repeating its options.

The controller keeps a record below the project's folder, without the values of variables, which may be secrets. The hosts have the
spec too, but a host must not name files of the controller, and a spec names files.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from trainer.common.errors import UserError
from trainer.common.files import write_atomic
from trainer.common.inputs import path_kind, user_path
from trainer.config import OBSERVATORY, SMOLLM2, TINY, RunSpec
from trainyard.run.launch_options import LaunchOptions, make_options
from trainyard.run.types import MODELS, PreparedRun, StartRecord, plain, read

# Launch options that may hold secrets, or that were only for this start.
NOT_KEPT = {"run_env", "spec", "limit", "render_only", "render_to", "master_port", "follow", "notify", "hook"}
NOT_KEPT |= {"push", "push_as"}
_NAMES = {"", TINY, SMOLLM2, OBSERVATORY}  # that are never paths


def keep_start(home: Path, prepared: PreparedRun, options: LaunchOptions, hosts: Iterable[str]) -> None:
    """Write down the start of a run below the project's folder. A disk that is full does not stop the run."""
    record = StartRecord(
        spec=prepared.spec,
        launch=options.model_dump(mode="json", exclude_defaults=True, exclude=NOT_KEPT),
        hosts=list(hosts),
        folder=str(Path.cwd()),
        variables=sorted(options.run_env),
    )
    path = _path(home, prepared.run)
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, json.dumps(plain(record), indent=1), 0o600)


def has_start(home: Path, run: str) -> bool:
    """Return whether the start of a run is known."""
    return _path(home, run).is_file()


def read_start(home: Path, run: str) -> StartRecord:
    """Return how a run was started. Raises UserError if that is not known."""
    path = _path(home, run)
    try:
        record = read(StartRecord, json.loads(path.read_bytes()))
        launch = {name: value for name, value in record.launch.items() if name not in NOT_KEPT}
        return replace(record, spec=_in_folder(record.spec, Path(record.folder)), launch=launch)
    except FileNotFoundError:
        why = f"run {run} was not started from this project folder"
    except (OSError, ValueError, RecursionError):
        why = f"run {run}: cannot read {path}"
    raise UserError(f"{why}: start it again with trainyard train SPEC --run {run}")


def options_of(record: StartRecord, base: LaunchOptions) -> LaunchOptions:
    """Return the launch options of the start on top of those of an inventory. Raises UserError."""
    return make_options(base.model_dump() | record.launch, f"the start of {record.spec.run}")


def _path(home: Path, run: str) -> Path:
    return home / ".trainyard" / "starts" / f"{run}.json"


def _in_folder(spec: RunSpec, folder: Path) -> RunSpec:
    """Return the spec with relative paths as they were meant in `folder`, the current one of the start."""
    if folder == Path.cwd():
        return spec

    def found(name: str) -> str:
        path = folder / user_path(name, "path")
        return name if name in _NAMES or not path_kind(path) else str(path)

    changed = {name: found(getattr(spec, name)) for name in (*MODELS, "script")}
    spec = spec.model_copy(update=changed).with_reward_files([found(name) for name in spec.reward_files])
    return spec.with_dataset_paths([found(source.path) for source in spec.sources])
