"""Find a finished run on the hosts, and copy the description of its model to the controller."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from trainer.common.errors import UserError
from trainer.config.yaml_text import YamlError, parse_yaml
from trainyard import front_end
from trainyard.run.prepare.model_files import read_vocabulary
from trainyard.wire.connection import FanOut, Host, HostConnection, RemoteError
from trainyard.wire.copy_files import copy_artifacts
from trainyard.wire.replies import ReplyError, checked_reply, untrusted_json

_LIMIT = 60.0  # s for a host to read the files of a run
_JSON_FILES = ("*.json", "*.jinja")


@dataclass(frozen=True)
class TrainedRun:
    """A finished run on the host that supplies it."""

    host: Host
    folder: str  # on that host
    kind: str  # adapter or model
    weights: str  # digest
    base: dict[str, Any] = field(default_factory=dict)  # config.json of the base model; empty for a whole model
    base_name: str = ""  # name of the base model's folder
    seq_length: int = 0  # tokens of a row of the training; 0 if it is unknown
    prepend: bool = False  # whether the system message is the beginning of the first question
    model: str = ""  # folder of the base model on that host, as the spec says


def find_run(
    run: str, hosts: Mapping[str, Host], connections: Mapping[str, HostConnection], with_base: bool
) -> TrainedRun:
    """Return the run on the first host that has its result.

    `with_base`: read the configuration of the base model of an adapter. Raises UserError: no host has the run, or its
    files are not valid.
    """
    found = find_copies(run, hosts, connections)[0]
    if not with_base or found.kind != "adapter":
        return found
    base = _base_config(connections[found.host.name], found.model)
    return replace(found, base=base, base_name=Path(found.model).name if base else "")


def find_copies(run: str, hosts: Mapping[str, Host], connections: Mapping[str, HostConnection]) -> list[TrainedRun]:
    """Return the run on every host that has its result with the same weights as the first.

    Raises UserError: no host has the run, or its files are not valid.
    """
    request = {"text": ["result.json", "spec.yml"]}
    folders = {name: f"{host.data_dir}/runs/{run}" for name, host in hosts.items()}
    asked = FanOut(
        {
            name: functools.partial(connections[name].call, "read_files", request | {"run_dir": folder})
            for name, folder in folders.items()
        }
    ).wait(_LIMIT)
    found: list[TrainedRun] = []
    for name in hosts:
        text = asked.answers.get(name, {}).get("text", {})
        if not text.get("result.json") or not text.get("spec.yml"):
            continue
        try:
            result = checked_reply("trained result.json", untrusted_json(text["result.json"]))
            spec = parse_yaml(text["spec.yml"])
            fields = spec if isinstance(spec, dict) else {}
        except (ReplyError, YamlError) as error:
            if found:
                continue
            raise UserError(f"{name}: {folders[name]}: {error}") from None
        kind = next((kind for kind in ("adapter", "model") if result.get(f"{kind}_sha256")), "")
        weights = str(result.get(f"{kind}_sha256"))
        if kind and (not found or found[0].weights == weights):
            length, model = fields.get("seq_length"), fields.get("model")
            row = length if type(length) is int else 0
            prepend = fields.get("system") == "prepend"
            about: dict[str, Any] = {
                "seq_length": row,
                "prepend": prepend,
                "model": model if isinstance(model, str) else "",
            }
            found.append(TrainedRun(hosts[name], folders[name], kind, weights, **about))
    if found:
        return found
    where = "; ".join(f"{name}: {why}" for name, why in asked.errors.items())
    raise UserError(
        f"no host has a finished run {run}{f' ({where})' if where else ''}; {front_end.command('status')} lists the runs"
    )


def _base_config(connection: HostConnection, folder: str) -> dict[str, Any]:
    """Return config.json of the base model of a run, which its host has. Empty if it is not readable, or not of a model.

    Code of a rank can write the spec, and put links in folders of runs.
    """
    if not folder.startswith("/"):
        return {}
    try:
        runs = f"{connection.host.data_dir}/runs"
        name = f"{folder}/config.json".removeprefix(f"{runs}/")
        root, name = (folder, "config.json") if name.startswith("/") else (runs, name)
        reply = connection.call("read_files", {"folder": root, "text": [name]})
        config = untrusted_json(reply["text"].get(name) or "{}")
    except (RemoteError, ReplyError):
        return {}
    return config if isinstance(config, dict) and isinstance(config.get("model_type"), str) else {}


def copy_files(run: TrainedRun, connection: HostConnection, folder: Path) -> Path:
    """Copy the tokenizer's files, and the adapter, to the controller; return their folder. Raises UserError."""
    patterns = [f"{run.kind}/{pattern}" for pattern in _JSON_FILES]
    patterns += ["adapter/adapter_model.safetensors"] if run.kind == "adapter" else []
    try:
        copy_artifacts(connection, run.folder, folder, patterns)
    except (RemoteError, OSError) as error:
        raise UserError(f"{run.host.name}: {error}") from None
    return folder / run.kind


def read_tokens(folder: Path) -> list[str]:
    """Return the tokens of a tokenizer by id; empty if there is no tokenizer.json that lists them all."""
    try:
        ids = {int(number): str(token) for token, number in (read_vocabulary(folder) or {}).items()}
    except (TypeError, ValueError, OverflowError):
        return []
    return [ids[number] for number in range(len(ids))] if set(ids) == set(range(len(ids))) else []
