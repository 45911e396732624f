"""What a run needs on the controller: a checked dataset, a model folder and the archive of the trainer."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path

from trainer.common.errors import UserError
from trainer.common.files import sha256_file
from trainer.common.inputs import host_path, path_kind, user_path
from trainer.config import FORMER_DATASET, OBSERVATORY, TINY, RunSpec
from trainer.config.dataset_source import DatasetSource, with_paths
from trainer.config.methods import METHODS, Data
from trainer.config.run_name import file_stem
from trainer.data.data_report import DataReport
from trainer.data.dataset_files import all_files, data_suffix, is_hub_dataset, is_hub_id
from trainer.data.samples import NO_FORMER_DATASET, check_source
from trainer.data.shapes import Sample
from trainer.loop.script import check_script
from trainer.rewards.reward_file import check_reward_file
from trainyard import front_end
from trainyard.remote.digests import Digests
from trainyard.run.prepare.host_files import HostAccess, HostFiles, describe_files
from trainyard.run.prepare.hub import fetch_on_controller, fetch_on_host, is_offline
from trainyard.run.prepare.model_files import (
    TINY_NEEDS_DATASET,
    check_names,
    fit_to_models,
    model_entries,
    model_settings,
)
from trainyard.run.types import Files, PreparedRun, Report, StagedFile
from trainyard.wire.trainer_archive import trainer_archive

DATASETS = Path(__file__).parents[2] / "datasets"  # that are part of trainyard
_MAX_NAMES = 10_000  # files of a folder that a suggestion considers


def prepare(spec: RunSpec, work: Path, report: Report, access: HostAccess | None = None) -> PreparedRun:
    """Check the dataset and the model, create or fetch what is missing, and list what every host needs.

    `work`: folder on the controller for created files and caches. `report`: receives a line for each step that takes
    long. `access`: to the hosts, for what they have already (`host:/path`) or fetch from the hub. Raises UserError: the
    dataset or the model is missing or damaged.
    """
    digests = Digests(work / "digests.json")
    on_hosts = files_on_hosts(spec, access)
    read: dict[int, list[Sample]] = {}
    files = dataset_entries(spec, on_hosts, access, digests, work, report, read)
    identity: dict[str, object] = {}
    if files:
        names = [source.path for source in spec.sources]
        for file in files:
            names[file.source] = file.digest
        identity["dataset"] = with_paths(spec.dataset, names)
    datasets = [Path(file.src) for file in files if file.src]
    complete = len(datasets) == len(spec.sources)
    models = model_entries(spec, datasets if complete else [], on_hosts, access, digests, work, report)
    files += models
    if models and not spec.script:
        spec = fit_to_models(spec, models)
    data = _check_data(spec, files, datasets if complete else [], work, read)
    identity |= {file.kind: file.digest for file in models}
    if spec.script:
        files.append(script_entry(check_script(spec.script)))
        identity["script"] = files[-1].digest
    for place, name in enumerate(spec.reward_files):
        file = script_entry(check_reward_file(name), "reward")
        files.append(dataclasses.replace(file, source=place))
    if rewards := [file.digest for file in files if file.kind == "reward"]:
        identity["reward"] = spec.with_reward_files(rewards).reward
    digests.keep()
    files.append(trainer_file(work))
    known = {f"{file.kind}_sha256": file.digest for file in models}
    if len(spec.sources) == 1 and files[0].kind == "dataset":
        known["dataset_sha256"] = files[0].digest
    origin = {**model_settings(spec), "dataset": spec.dataset_name}
    if not spec.run:
        # The name depends on the contents of model and dataset, not on their paths on this controller.
        stem = RunSpec.named(spec).run.rpartition("-")[0]
        spec = spec.model_copy(update={"run": f"{stem}-{spec.model_copy(update=identity).digest()}"})
    return PreparedRun(spec, files, origin | known, data)


def trainer_file(work: Path) -> StagedFile:
    """Return the archive of the trainer, which is made in the folder `work` if it is not there."""
    archive = trainer_archive(work)
    digest = sha256_file(archive)
    return StagedFile.of(archive, f"store/trainers/{digest[:16]}.zip", {"": digest}, "trainer")


def _check_data(
    spec: RunSpec, files: Files, datasets: Sequence[Path], work: Path, read: Mapping[int, list[Sample]]
) -> DataReport | None:
    """Return the totals of the samples of a run; None if it has none, or if the controller lacks the model or a dataset.

    `files`: datasets and models. `datasets`: those on the controller, if it has all of them. `read`: the samples of
    datasets that were just read, by their place. Raises UserError: the run cannot train on them.
    """
    model = next((file.src for file in files if file.kind == "model"), "")
    if spec.fake_data or spec.script or not datasets or not model:
        return None
    # It imports numpy, which a program that only follows runs does not need.
    from trainyard.run.prepare.data_check import check_data

    digest = " ".join(file.digest for file in files if file.kind == "dataset")
    spec = spec.with_dataset_paths(list(map(str, datasets)))
    samples = [sample for place in sorted(read) for sample in read[place]] if len(read) == len(datasets) else None
    return check_data(spec, Path(model), digest, work, samples)


def dataset_entries(
    spec: RunSpec,
    on_hosts: Mapping[str, HostFiles],
    access: HostAccess | None,
    digests: Digests,
    work: Path,
    report: Report,
    read: dict[int, list[Sample]],
) -> Files:
    """Return the datasets that the hosts find in their store.

    `read`: receives the samples of datasets that are read for the first time, by their place. Raises UserError: a
    dataset is missing or damaged.
    """
    files = []
    for place, source in enumerate(spec.sources if _needs_dataset(spec) else ()):
        if found := on_hosts.get(_setting(spec, place)):
            files.append(dataclasses.replace(found.entry("dataset"), source=place))
            continue
        one = spec.model_copy(update={"dataset": source.path})
        if path := dataset_file(one):
            file = dataset_entry(path, digests)
            if not spec.script:  # which may read any format
                here = source.model_copy(update={"path": str(path)})
                if samples := _check_samples(here, file.digest, work, METHODS[spec.method].data):
                    read[place] = samples
            files.append(dataclasses.replace(file, source=place))
        elif fetched := hub_dataset(source.path, access, digests, report):
            files.append(dataclasses.replace(fetched, source=place))
    return files


def script_entry(path: Path, kind: str = "script") -> StagedFile:
    """Return a script on the controller, or a file with rewards."""
    digest = sha256_file(path)
    return StagedFile.of(path, f"store/{kind}s/{file_stem(path.stem) or kind}-{digest[:12]}.py", {"": digest}, kind)


def dataset_entry(path: Path, digests: Digests) -> StagedFile:
    """Return a dataset on the controller. Raises UserError."""
    if path_kind(path) == "folder":
        return StagedFile.of_folder(path, "store/datasets/folder", digests, "dataset", all_files(path))
    digest = digests.of(path)
    return StagedFile.of(path, f"store/datasets/{digest[:16]}{data_suffix(path)}", {"": digest}, "dataset")


def _needs_dataset(spec: RunSpec) -> bool:
    """Return whether the run reads a dataset. A script reads one only if it is set."""
    return not spec.fake_data and not (spec.script and spec.dataset == OBSERVATORY)


def _setting(spec: RunSpec, place: int) -> str:
    """Return what a message calls a dataset of the spec."""
    return "dataset" if len(spec.sources) == 1 else f"dataset {place + 1}"


def files_on_hosts(spec: RunSpec, access: HostAccess | None) -> dict[str, HostFiles]:
    """Return the files of the spec that the hosts have already, by setting. Raises UserError."""
    settings = model_settings(spec)
    if _needs_dataset(spec):
        settings |= {_setting(spec, place): source.path for place, source in enumerate(spec.sources)}
    paths = {setting: path for setting, text in settings.items() if (path := host_path(text, setting))}
    if not paths:
        return {}
    if spec.model == TINY and not spec.fake_data and not spec.script:
        raise UserError(TINY_NEEDS_DATASET)
    if access is None:
        raise UserError(f"{', '.join(paths)}: host:/path needs hosts: start the run with {front_end.playbook('train')}")
    found = describe_files(access, paths)
    for setting in model_settings(spec):
        if model := found.get(setting):
            if model.kind != "folder":
                raise UserError(f"{setting}: {model.path} is a file on the hosts: give the folder with config.json")
            remedy = "give a model folder as transformers saves it"
            check_names(model.names, f"{model.path} on the hosts", remedy, setting)
    return found


def hub_dataset(name: str, access: HostAccess | None, digests: Digests, report: Report) -> StagedFile | None:
    """Return a dataset of the hub; None if every host reads its own cache, because nothing may be fetched.

    Raises UserError: neither a host nor the controller can fetch it.
    """
    if is_offline():
        return None
    if access and (file := fetch_on_host("dataset", name, access, report)):
        return file
    folder = fetch_on_controller("dataset", name, report)
    return StagedFile.of_folder(folder, f"store/datasets/{name.replace('/', '--')}", digests, "dataset")


def dataset_file(spec: RunSpec) -> Path | None:
    """Return the dataset's file or folder on the controller; None for a hub id. Raises UserError: the file does not exist."""
    if spec.dataset == OBSERVATORY:
        return DATASETS / f"{OBSERVATORY}.jsonl"
    path = user_path(spec.dataset_name, "dataset")
    kind = path_kind(path)
    if spec.dataset == FORMER_DATASET and not kind:
        raise UserError(NO_FORMER_DATASET)
    if kind == "other":
        raise UserError(f"dataset: {path} is not a regular file: give a file or a folder")
    if kind == "folder" and not all_files(path):
        raise UserError(f"dataset: {path} is an empty folder: give a folder with data files, or a file")
    if not kind:
        # The model tiny needs a file, so a name without an owner is more likely a mistake than a dataset of the hub.
        without_owner = spec.model != TINY and is_hub_dataset(spec.dataset_name) and not _suggest(path)
        if is_hub_id(spec.dataset_name) or without_owner:
            return None
        listed = ", or several in a list such as '[a.jsonl, b.jsonl]'" if "," in spec.dataset_name else ""
        raise UserError(
            f"dataset: no file {path}{_suggest(path)}: give a file, a folder, '{OBSERVATORY}', "
            f"host:/path, or a hub id (org/name){listed}"
        )
    return path.absolute()


def _suggest(path: Path) -> str:
    """Return `` (did you mean 'x'?)`` for a dataset of trainyard or a file beside `path` with nearly its name, or an empty string."""
    folder = path.parent
    try:
        names = [entry.name for entry in itertools.islice(folder.iterdir(), _MAX_NAMES)]
    except OSError:
        names = []
    known = {name: name for name in (OBSERVATORY,)} | {name: str(folder / name) for name in names}
    near = get_close_matches(path.name, known, n=1, cutoff=0.75)
    return f" (did you mean {known[near[0]]!r}?)" if near else ""


def _check_samples(source: DatasetSource, digest: str, work: Path, data: Data) -> list[Sample] | None:
    """Check the records of a dataset, once for each content and way to read it; return them if they are read. Raises UserError."""
    settings = source.model_dump_json(exclude={"path", "weight"}) + f" {data}" * (data != "answers")
    mark = work / "checked" / hashlib.sha256(f"{digest} {settings}".encode()).hexdigest()
    if mark.exists():
        return None
    samples = check_source(source, data=data)
    mark.parent.mkdir(parents=True, exist_ok=True)
    mark.touch()
    return samples
