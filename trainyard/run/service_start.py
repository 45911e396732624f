"""What a run was started with, for a service of the cluster that starts it again without the files of the controller.

The hosts have these files in their stores, under names that contain their digests. So the record has the digests, and never a
path of the controller; the service copies a file only from host to host. The record comes from the controller, not from a host.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from trainer.config import RunSpec
from trainer.errors import UserError
from trainer.files import sha256_file
from trainer.spec import make_spec
from trainyard import front_end
from trainyard.connection import Host
from trainyard.reply_fields import Digest
from trainyard.run.file_entries import file_entry
from trainyard.run.options import LaunchOptions, make_options
from trainyard.run.spec_files import PreparedRun
from trainyard.run.start_record import NOT_KEPT
from trainyard.run.trainer_archive import trainer_archive

LIMIT = 4 << 20  # bytes of a record
CONFIG = "config.json"
_NOT_KEPT = NOT_KEPT | {"collect_to"}  # a folder of the controller


def _is_below(name: str) -> str:
    parts = PurePosixPath(name).parts
    if name.startswith("/") or ".." in parts or "\0" in name or len(name) > 4096:
        raise ValueError("it leaves its folder")
    return name


def _is_stored(name: str) -> str:
    if not name.startswith("store/") or len(PurePosixPath(name).parts) < 3:
        raise ValueError("it is not in the store of a host")
    return _is_below(name)


class _File(BaseModel):
    """A file of PreparedRun that the hosts have."""

    model_config = ConfigDict(extra="forbid")

    kind: Literal["dataset", "model", "teacher", "script"]
    src: Literal[""]
    dest: Annotated[str, AfterValidator(_is_stored)]
    sha256: dict[Annotated[str, AfterValidator(_is_below)], Digest]
    sizes: dict[str, Annotated[int, Field(ge=0)]] = {}
    modes: dict[str, Annotated[int, Field(ge=0, le=0o777)]] = {}
    bytes: Annotated[int, Field(ge=0)]
    digest: Digest
    source: Annotated[int, Field(ge=0)] = 0
    on_hosts: str = ""
    fetched_by: str = ""
    config: str = ""


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid")

    spec: dict[str, Any]
    launch: dict[str, Any]
    files: list[_File]
    origin: dict[str, str]
    env: dict[str, dict[str, str]]


@dataclass(frozen=True)
class ServiceStart:
    """How a run was started, without files of the controller.

    Attributes:
        launch: the launch options that differ from the defaults.
        files: entries of PreparedRun without the trainer, which is that of the service.
        env: environment variables of the ranks, by host, in inventory order. They may be secrets.
    """

    spec: RunSpec
    launch: Mapping[str, Any]
    files: Sequence[Mapping[str, Any]]
    origin: Mapping[str, str]
    env: Mapping[str, Mapping[str, str]]

    def options(self, service: LaunchOptions) -> LaunchOptions:
        """Return the launch options of the start on top of those of the service. Raises UserError."""
        return make_options(service.model_dump() | dict(self.launch))

    def hosts(self, known: Sequence[Host]) -> list[Host]:
        """Return the hosts of the run, with their variables. Raises UserError if the service does not have one of them."""
        here = {host.name: host for host in known}
        if missing := [name for name in self.env if name not in here]:
            raise UserError(
                f"run {self.spec.run} was started on {missing[0]}, which the service does not know: run {front_end.playbook('site')}, or start the "
                "run on the controller"
            )
        return [replace(here[name], env=dict(variables)) for name, variables in self.env.items()]

    def prepared(self, work: Path) -> PreparedRun:
        """Return the prepared run.

        Args:
            work: folder of the service, for the archive of the trainer.
        """
        archive = trainer_archive(work)
        digest = sha256_file(archive)
        trainer = file_entry(archive, f"store/trainers/{digest[:16]}.zip", {"": digest}, "trainer")
        spec = self.spec.model_dump(mode="json") | {"rows_per_step": self.spec.rows_per_step}
        return PreparedRun(self.spec.run, spec, [*map(dict, self.files), trainer], dict(self.origin))


def service_start(
    prepared: PreparedRun, options: LaunchOptions, hosts: Mapping[str, Host], entries: Sequence[Mapping[str, Any]]
) -> str:
    """Return the record of a start. Raises OSError.

    Args:
        hosts: the hosts that the run may use, in inventory order.
        entries: the plan of the start. Each host that it names has the files that it needs.
    """
    head = next((entry["host"] for entry in entries if 0 in entry.get("ranks", ())), entries[0]["host"])
    teaching = str(prepared.spec.get("teacher_host") or "")
    files = []
    for file in prepared.files:
        if file["kind"] != "trainer":
            holder = teaching if teaching and file["kind"] == "teacher" else head
            files.append(_on_hosts(file, holder))
    launch = options.model_dump(mode="json", exclude_defaults=True, exclude=_NOT_KEPT)
    env = {name: {**host.env, **options.run_env} for name, host in hosts.items()}
    values = {name: value for name, value in prepared.spec.items() if name in RunSpec.model_fields}
    return json.dumps({"spec": values, "launch": launch, "files": files, "origin": prepared.origin, "env": env})


def read_service_start(path: Path, run: str) -> ServiceStart:
    """Return the record of a start. Raises UserError if there is none, or if it is not valid."""
    start = f"start it on the controller with trainyard train SPEC --run {run}"
    try:
        if path.stat().st_size > LIMIT:
            raise ValueError("it is too large")
        record = _Record.model_validate_json(path.read_bytes())
        if not record.env or record.spec.get("run") != run:
            raise ValueError("it is that of another run")
        if wrong := sorted(_NOT_KEPT & set(record.launch)):
            raise ValueError(f"it has the launch option {wrong[0]}")
        spec = make_spec(record.spec, f"the start of {run}")
        make_options(record.launch, f"the start of {run}")
    except FileNotFoundError:
        raise UserError(f"run {run}: the service has no record of its start: {start}") from None
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        why = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
        raise UserError(f"run {run}: the record of its start is not valid ({why}): {start}") from None
    except (OSError, ValueError, UserError) as error:
        raise UserError(f"run {run}: the record of its start is not valid ({error}): {start}") from None
    files = [file.model_dump(exclude_defaults=True) | {"src": ""} for file in record.files]
    for file in files:
        if file["kind"] == "dataset":
            file.setdefault("source", 0)
        elif file["kind"] != "script":
            file.setdefault("config", "")
    return ServiceStart(spec, record.launch, files, record.origin, record.env)


def _on_hosts(file: Mapping[str, Any], holder: str) -> dict[str, Any]:
    """Return the entry of a file that the hosts have, as one of a file that a host has fetched.

    Args:
        holder: a host that has the complete file.
    """
    entry = {name: value for name, value in file.items() if name in _File.model_fields}
    if not file["src"]:
        return entry
    source = Path(file["src"])
    found = {name: (source / name if name else source).stat() for name in file["sha256"]}
    entry |= {"sizes": {name: status.st_size for name, status in found.items()}}
    entry |= {"modes": {name: status.st_mode & 0o777 for name, status in found.items()}}
    entry |= {"src": "", "fetched_by": holder}
    if file["kind"] in ("model", "teacher"):
        with contextlib.suppress(FileNotFoundError):  # a tiny model of a script
            entry["config"] = (source / CONFIG).read_text(encoding="utf-8")
    return entry
