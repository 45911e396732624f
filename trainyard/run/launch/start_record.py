"""What a run was started with, so that it can be started again without repeating its options.

The controller keeps a record below the project's folder, without the values of variables, which may be secrets. The hosts have the
spec too, but a host must not name files of the controller, and a spec names files.

The service of the dashboard has a record that needs no files of the controller: the hosts have these in their stores, under names that
contain their digests. So that record has the digests, and never a path of the controller; the service copies a file only from
host to host. It comes from the controller, not from a host.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath

from pydantic import ValidationError

from trainer.common.errors import UserError
from trainer.common.files import write_atomic
from trainer.common.inputs import path_kind, user_path
from trainer.config import EMBEDDED_DATASET, OBSERVATORY, SMOLLM2, TINY, RunSpec
from trainyard import front_end
from trainyard.run.launch_options import LaunchOptions, make_options
from trainyard.run.prepare.spec_files import trainer_file
from trainyard.run.types import MODELS, PlanEntry, PreparedRun, StagedFile, StartRecord, plain, read
from trainyard.wire.connection import Host

LIMIT = 4 << 20  # bytes of a record for the service
CONFIG = "config.json"
# Launch options that may hold secrets, or that were only for this start.
NOT_KEPT = {
    "run_env",
    "spec",
    "limit",
    "render_only",
    "render_to",
    "master_port",
    "follow",
    "notify",
    "hook",
    "push",
    "push_as",
}
_NOT_IN_SERVICE = NOT_KEPT | {"collect_to"}  # a folder of the controller
_NAMES = {"", TINY, SMOLLM2, EMBEDDED_DATASET, OBSERVATORY}  # that are never paths


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
        raise UserError(
            f"run {run} was not started from this project folder: start it again with trainyard train SPEC --run {run}"
        ) from None
    except (OSError, ValueError, RecursionError):
        raise UserError(
            f"run {run}: cannot read {path}: start it again with trainyard train SPEC --run {run}"
        ) from None


def options_of(record: StartRecord, base: LaunchOptions) -> LaunchOptions:
    """Return the launch options of the start on top of those of an inventory or of the service. Raises UserError."""
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


# The record for the service ----------------------------------------------------------------------------------------------


def service_start(
    prepared: PreparedRun, options: LaunchOptions, hosts: Mapping[str, Host], entries: Sequence[PlanEntry]
) -> str:
    """Return the record of a start for the service. Raises OSError.

    Args:
        hosts: the hosts that the run may use, in inventory order.
        entries: the plan of the start. Each host that it names has the files that it needs.
    """
    head = next((entry.host for entry in entries if 0 in entry.ranks), entries[0].host)
    record = StartRecord(
        spec=prepared.spec,
        launch=options.model_dump(mode="json", exclude_defaults=True, exclude=_NOT_IN_SERVICE),
        files=[_on_hosts(file, head) for file in prepared.files if file.kind != "trainer"],
        origin=prepared.origin,
        env={name: {**host.env, **options.run_env} for name, host in hosts.items()},
    )
    return json.dumps(plain(record))


def read_service_start(path: Path, run: str) -> StartRecord:
    """Return the record of a start for the service. Raises UserError if there is none, or if it is not valid."""
    start = f"start it on the controller with trainyard train SPEC --run {run}"
    try:
        if path.stat().st_size > LIMIT:
            raise ValueError("it is too large")
        record = read(StartRecord, json.loads(path.read_bytes()))
        if not record.env or record.spec.run != run:
            raise ValueError("it is that of another run")
        if wrong := sorted(_NOT_IN_SERVICE & set(record.launch)):
            raise ValueError(f"it has the launch option {wrong[0]}")
        for file in record.files:
            if file.kind not in ("dataset", *MODELS, "script", "reward"):
                raise ValueError(f"files: kind {file.kind} is not one of the hosts")
            if file.src:
                raise ValueError(f"files: src of the {file.kind} is a path of another machine")
            if not file.dest.startswith("store/") or len(PurePosixPath(file.dest).parts) < 3:
                raise ValueError(f"files: dest of the {file.kind} is not in the store of a host")
        options_of(record, LaunchOptions())
    except FileNotFoundError:
        raise UserError(f"run {run}: the service has no record of its start: {start}") from None
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        why = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
        raise UserError(f"run {run}: the record of its start is not valid ({why}): {start}") from None
    except (OSError, ValueError, UserError, RecursionError) as error:
        raise UserError(f"run {run}: the record of its start is not valid ({error}): {start}") from None
    return record


def service_hosts(record: StartRecord, known: Sequence[Host]) -> list[Host]:
    """Return the hosts of the run, with their variables. Raises UserError if the service does not have one of them."""
    here = {host.name: host for host in known}
    if missing := [name for name in record.env if name not in here]:
        raise UserError(
            f"run {record.spec.run} was started on {missing[0]}, which the service does not know: run {front_end.playbook('site')}, or start the "
            "run on the controller"
        )
    return [replace(here[name], env=variables) for name, variables in record.env.items()]


def service_run(record: StartRecord, work: Path) -> PreparedRun:
    """Return the prepared run, with the trainer of the service, whose archive is made in the folder `work`."""
    return PreparedRun(record.spec, [*record.files, trainer_file(work)], record.origin)


def _on_hosts(file: StagedFile, holder: str) -> StagedFile:
    """Return a file that the hosts have, as one that a host has fetched.

    Args:
        holder: a host that has the complete file.
    """
    if not file.src:
        return file
    source, config = Path(file.src), ""
    found = {name: (source / name if name else source).stat() for name in file.sha256}
    if file.kind in MODELS:
        with contextlib.suppress(FileNotFoundError):  # a tiny model of a script
            config = (source / CONFIG).read_text(encoding="utf-8")
    return replace(
        file,
        src="",
        sizes={name: status.st_size for name, status in found.items()},
        modes={name: status.st_mode & 0o777 for name, status in found.items()},
        fetched_by=holder,
        config=config,
    )
