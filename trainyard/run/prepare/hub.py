"""Models and datasets of the Hugging Face Hub: one host fetches them, or the controller, and all others receive a copy."""

from __future__ import annotations

import dataclasses
import functools
import os
import re
from pathlib import Path
from typing import Any, Literal

from trainer.common.errors import UserError
from trainer.common.formats import printable
from trainer.model_files.model_name import in_hub_cache
from trainyard import front_end
from trainyard.run.prepare.host_files import CONFIG, HostAccess, HostFiles
from trainyard.run.types import Report, StagedFile
from trainyard.wire.connection import RemoteError
from trainyard.wire.copy_files import NAME, in_time
from trainyard.wire.run_errors import StageError

Kind = Literal["model", "dataset"]

PATTERNS = {"model": ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"], "dataset": []}
WEIGHTS = ["*.bin"]  # of a model that has no *.safetensors
FETCH_LIMIT = 6 * 3600.0  # s for a host to fetch from the hub
ATTEMPTS = 3  # hosts that try
# Variables of run_env that the library reads: where the hub is, how to reach it, and the user's token.
_HUB_VARIABLE = re.compile(r"(?i)(HF_|HUGGING_FACE_)\w+|(https?|all|no)_proxy")


def is_offline() -> bool:
    """Return whether nothing may be fetched: HF_HUB_OFFLINE is set on the controller."""
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")


def fetch_on_host(kind: Kind, name: str, access: HostAccess, report: Report) -> StagedFile | None:
    """Let one host fetch a repository of the hub into its store; return it.

    Returns None if the controller fetches it instead: it is itself a host of the run, nothing may change, or no host
    reaches the hub.
    """
    if access.check or any(not host.login.address for host in access.hosts):
        return None
    report(f"fetching {name} from the hub on {access.hosts[0].name} (once; the other hosts receive it from there)")
    for host in access.hosts[:ATTEMPTS]:
        request = {
            "kind": kind,
            "name": name,
            "patterns": PATTERNS[kind],
            "weights": WEIGHTS if kind == "model" else [],
            "data_dir": host.data_dir,
            "target": _target(kind, name),
            "texts": [CONFIG],
            # Of run_env, and where the controller finds the hub.
            "env": {name: value for name, value in os.environ.items() if name == "HF_ENDPOINT"}
            | {name: value for name, value in access.run_env.items() if _HUB_VARIABLE.fullmatch(name)},
        }
        connection = access.connect(host.name)
        try:
            answer = in_time(connection, functools.partial(connection.call, "hub_fetch", request), FETCH_LIMIT)
            found = HostFiles("", "folder", answer["names"], answer["texts"])
            for part in [part for path in found.names for part in path.split("/")]:
                if not NAME.fullmatch(part):
                    raise RemoteError("sent a name that no file of the hub has")
        except RemoteError as error:
            report(f"{host.name} cannot fetch {name} from the hub: {error}")
            continue
        if answer["unreachable"]:
            why = f"{host.name} cannot reach the hub ({answer['unreachable']})"
            report(f"{why}: using the {kind} that it fetched before")
        return _entry(kind, name, host.name, found)
    return None


def fetch_again(file: StagedFile, name: str, access: HostAccess, report: Report) -> StagedFile:
    """Let another host fetch a model that only a host without a part in the run has; return what it fetched.

    `file`: the model. `name`: its name on the hub. Raises StageError: no host can fetch it, or the hub has other
    contents now.
    """
    lost = file.fetched_by
    found = None if is_offline() else fetch_on_host("model", name, access, report)
    if found is None:
        raise StageError(f"{lost} has the files of {name}, and no other host can fetch them from the hub: start {lost}")
    if found.digest != file.digest:
        raise StageError(
            f"model: {name} on the hub has changed since this run started, and only {lost} has the files: "
            f"start {lost}, or choose another name with {front_end.option('run', 'NAME')}"
        )
    return dataclasses.replace(found, kind=file.kind)


def fetch_on_controller(kind: Kind, name: str, report: Report) -> Path:
    """Return a folder in this machine's hub cache; fetch its missing files. Raises UserError."""
    from huggingface_hub import snapshot_download

    if kind == "dataset" or not in_hub_cache(name):
        report(f"fetching {name} from the hub on the controller (once; the hosts receive it from there)")
    patterns = PATTERNS[kind] or None
    options: dict[str, Any] = {"repo_type": kind, "ignore_patterns": [".*", "*/.*"]}
    try:
        folder = Path(snapshot_download(name, allow_patterns=patterns, **options))
        if patterns and not any(folder.glob("*.safetensors")):
            folder = Path(snapshot_download(name, allow_patterns=[*patterns, *WEIGHTS], **options))
    except Exception as error:  # the library's own classes, those of its HTTP client, OSError
        why = printable((str(error).strip().splitlines() or [""])[-1].strip())
        raise UserError(f"{kind}: cannot fetch {name} from the hub: {why}") from None
    return folder


def _target(kind: Kind, name: str) -> str:
    return f"store/models/{name.rpartition('/')[2]}" if kind == "model" else f"store/datasets/{name.replace('/', '--')}"


def _entry(kind: Kind, name: str, host: str, found: HostFiles) -> StagedFile:
    return StagedFile(
        kind,
        "",
        f"{_target(kind, name)}-{found.digest[:12]}",
        {path: digest for path, (_, digest) in found.names.items()},
        found.digest,
        found.bytes,
        {path: size for path, (size, _) in found.names.items()},
        fetched_by=host,
        config=found.texts.get(CONFIG, ""),
    )
