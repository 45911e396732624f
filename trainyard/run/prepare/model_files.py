"""The models of a run, its student and its teacher: what the controller checks, creates or fetches."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from safetensors import safe_open

from trainer.common.errors import UserError, first_line
from trainer.common.inputs import path_kind, read_regular, user_path
from trainer.config import SMOLLM2, TINY, RunSpec
from trainer.data.dataset_files import is_hub_id
from trainer.model_files.adapter_folder import ADAPTER_CONFIG, adapter_error, refuse_adapter
from trainer.model_files.model_name import check_model_name, in_hub_cache
from trainer.model_files.model_shape import fit_to_model, read_shape
from trainyard.remote.digests import Digests
from trainyard.run.prepare.host_files import HostAccess, HostFiles
from trainyard.run.prepare.hub import fetch_again, fetch_on_controller, fetch_on_host, is_offline
from trainyard.run.types import Files, Report, StagedFile

_MODEL_PARTS = (
    (("config.json",), "config.json"),
    (("*.safetensors", "*.bin"), "weights (*.safetensors)"),
    (("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tokenizer_config.json"), "tokenizer"),
)
TINY_NEEDS_DATASET = (
    "model: tiny builds its tokenizer from the dataset, so the dataset must be a file on this machine: "
    "give a model folder, host:/folder, or a hub id (org/name)"
)
_MAX_CONFIG = 16 * 1024 * 1024  # bytes of a config.json
_MAX_TOKENIZER = 256 * 1024 * 1024  # bytes of a tokenizer.json


def model_settings(spec: RunSpec) -> dict[str, str]:
    """Return the models of a spec by the field that names them: the student, and the teacher if it has one.

    A script has a model only if one is set.
    """
    if spec.script and spec.model == TINY:
        return {}
    return {"model": spec.model} | ({"teacher": spec.teacher} if spec.teacher else {})


def model_entries(
    spec: RunSpec,
    datasets: Sequence[Path],
    on_hosts: dict[str, HostFiles],
    access: HostAccess | None,
    digests: Digests,
    work: Path,
    report: Report,
) -> Files:
    """Return the student and the teacher.

    `datasets`: those on the controller, if it has all of them. `on_hosts`: data that the hosts have already, by
    setting. Raises UserError: a model is missing or damaged, or the two have different vocabularies.
    """
    files: Files = []
    for setting, name in model_settings(spec).items():
        if found := on_hosts.get(setting):
            file = found.entry("model")
        elif fetched := hub_model(name, setting, access, report):
            file = fetched
        else:
            folder = model_folder(spec, datasets, work, report, setting)
            stem = name.rpartition("/")[2] if is_hub_id(name) else folder.name
            file = StagedFile.of_folder(folder, f"store/models/{stem}", digests, "model")
        if file.dest in [other.dest for other in files]:
            file = replace(file, bytes=0)  # a model that teaches itself is copied once
        files.append(replace(file, kind=setting))
    check_vocabularies(spec, [Path(file.src) for file in files if file.src])
    return files


def fit_to_models(spec: RunSpec, files: Files) -> RunSpec:
    """Return the spec as `fit_to_model` does, after a check of `lora_targets` as far as the controller knows the layers of the model.

    `files`: the models. Raises UserError: the run cannot train the model so. The ranks check the rest.
    """
    configs = {file.kind: config_of(Path(file.src), file.config) for file in files if file.src or file.config}
    try:
        shape = read_shape(configs.get("model", {}))
    except UserError:  # of a kind that the planner does not know, or damaged
        pass
    else:
        shape.check_targets(spec)
    return fit_to_model(spec, configs)


def config_of(folder: Path, text: str | bytes = "") -> Any:
    """Return the config.json of a model, from its `text` if there is one; empty if it cannot be read."""
    try:
        return json.loads(text or read_regular(folder / "config.json", _MAX_CONFIG))
    except (OSError, ValueError, RecursionError):
        return {}


def check_vocabularies(spec: RunSpec, folders: Sequence[Path]) -> None:
    """Compare the vocabularies of student and teacher as far as the controller can read them. The ranks compare them fully.

    `folders`: folders of both models; with fewer there is nothing to compare. Raises UserError: they differ.
    """
    found = [read_vocabulary(folder) for folder in folders]
    if len(found) == 2 and None not in found and found[0] != found[1]:
        raise UserError(
            f"teacher: {spec.teacher} has another vocabulary than {spec.model}: choose a teacher with the tokenizer of the model"
        )


def read_vocabulary(folder: Path) -> dict[str, Any] | None:
    """Return {token: id} of the tokenizer.json of a model; None if it has none of the usual form. The ids are unchecked."""
    try:
        parsed = json.loads(read_regular(folder / "tokenizer.json", _MAX_TOKENIZER))
        added = {token["content"]: token["id"] for token in parsed.get("added_tokens") or []}
        known = parsed["model"]["vocab"]
        return dict(known) | added if isinstance(known, dict) else None
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None


def special_tokens(folder: Path) -> set[str]:
    """Return the texts of the special tokens in the tokenizer.json of a model; none if it has none of the usual form."""
    try:
        added = json.loads(read_regular(folder / "tokenizer.json", _MAX_TOKENIZER)).get("added_tokens") or []
        return {str(token["content"]) for token in added if token.get("special") and token["content"]}
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return set()


def check_names(names: Collection[str], where: str, remedy: str, setting: str) -> None:
    """Check by the names of its files that a folder holds config, weights and tokenizer, and no adapter. Raises UserError."""
    if ADAPTER_CONFIG in names:
        raise adapter_error(setting, where)
    for patterns, what in _MODEL_PARTS:
        if not any(fnmatchcase(name, pattern) for name in names for pattern in patterns if "/" not in name):
            raise UserError(f"{setting}: {where} has no {what}: {remedy}")


def hub_model(name: str, setting: str, access: HostAccess | None, report: Report) -> StagedFile | None:
    """Return a model that one host fetches from the hub; None if it is found or fetched elsewhere."""
    if access is None or is_offline() or not is_hub_id(name) or in_hub_cache(name):
        return None
    if file := fetch_on_host("model", name, access, report):
        check_names(file.sha256, f"{name} on the hub", "choose a model in the format of transformers", setting)
    return file


def fetch_models_again(files: Files, spec: RunSpec, access: HostAccess, report: Report) -> Files:
    """Return the files of a run, of which models of the hub that only another host has are fetched by one of these hosts.

    `access`: the hosts that take part, in rank order. Raises StageError: no host can fetch a model, or the hub has
    other contents now.
    """
    present = {host.name for host in access.hosts}
    return [
        fetch_again(file, spec.model, access, report)
        if file.kind == "model" and file.fetched_by not in {"", *present} and is_hub_id(spec.model)
        else file
        for file in files
    ]


def model_folder(spec: RunSpec, datasets: Sequence[Path], work: Path, report: Report, setting: str = "model") -> Path:
    """Return the model's folder on the controller; create the tiny model, or fetch smollm2 or a model from the hub, once.

    `datasets`: the datasets on the controller, if it has all of them. `setting`: the field that names the model. Raises
    UserError: the model does not exist or is damaged.
    """
    name = model_settings(spec)[setting]
    if name == TINY:
        if not datasets and not spec.fake_data:
            raise UserError(TINY_NEEDS_DATASET)
        from trainer.data.tiny import tiny_folder

        return tiny_folder(spec.with_dataset_paths(list(map(str, datasets))) if datasets else spec, work, report)
    if name == SMOLLM2:
        from trainyard.run.prepare.smollm2 import smollm2_folder

        return smollm2_folder(work, report)
    folder = user_path(name, setting)
    if not path_kind(folder):
        check_model_name(name, setting)
        if is_offline() and not in_hub_cache(name):
            raise UserError(f"{setting}: {name} is not in the hub cache here and HF_HUB_OFFLINE is set: fetch it first")
        folder = fetch_on_controller("model", name, report)
    _check_model(folder, setting)
    return folder.absolute()


def _check_model(folder: Path, setting: str) -> None:
    """Check that a folder holds config, readable weights and tokenizer, and no adapter. Raises UserError."""
    if path_kind(folder) != "folder":
        raise UserError(f"{setting}: {folder} is a file: give the folder that holds config.json")
    refuse_adapter(str(folder), setting)
    for patterns, what in _MODEL_PARTS:
        if not any(path_kind(file) == "file" for pattern in patterns for file in folder.glob(pattern)):
            raise UserError(f"{setting}: {folder} has no {what}: give a model folder as transformers saves it")
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, framework="numpy"):
                pass
        except Exception as error:  # the library's own class, or OSError
            raise UserError(f"{setting}: {file} is damaged ({first_line(error)}): copy it again") from None
