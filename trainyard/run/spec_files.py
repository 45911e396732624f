"""What a run needs on the controller: a checked dataset, a model folder and the archive of the trainer."""

from __future__ import annotations

import hashlib
import importlib.metadata
import itertools
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from trainer.config import EMBEDDED_DATASET, FIELDS, OBSERVATORY, TINY, RunSpec
from trainer.config.dataset_source import DatasetSource, with_paths
from trainer.config.run_name import file_stem
from trainer.data.files import all_files, data_suffix, is_hub_id
from trainer.data.samples import check_source
from trainer.data.shapes import Sample
from trainer.errors import UserError
from trainer.files import sha256_file
from trainer.inputs import host_path, path_kind, user_path
from trainer.script import check_script
from trainyard import front_end
from trainyard.docs_dataset import write_dataset
from trainyard.remote.digests import Digests
from trainyard.run.file_entries import file_entry, folder_entry
from trainyard.run.host_files import HostAccess, HostFiles, describe_files
from trainyard.run.hub import fetch_on_controller, fetch_on_host, is_offline
from trainyard.run.model_files import TINY_NEEDS_DATASET, check_names, model_entries, model_settings
from trainyard.run.teacher_host import access_for
from trainyard.run.trainer_archive import trainer_archive

Report = Callable[[str], None]

DATASETS = Path(__file__).parents[1] / "datasets"  # that are part of trainyard
_MAX_NAMES = 10_000  # files of a folder that a suggestion considers


@dataclass(frozen=True)
class PreparedRun:
    """A run spec with a name, and the files that every host needs.

    Attributes:
        run: name of the run.
        spec: every field of the run spec, and `rows_per_step`.
        files: for each file or folder its `kind` (dataset, model, teacher, script, trainer), `src` on the controller, `dest` below the
            host's data directory, `sha256` by relative name, `digest` of all of it, `bytes` to copy, and `sizes` by relative name. A dataset has its
            place among those of the spec, `source`. What the hosts have already has no `src`, and its path there as
            `on_hosts`. What a host fetched from the hub has no `src`, and the host as `fetched_by`. Both have the text of a model's config.json as `config`.
        origin: names of model and dataset in the spec, and their checksums, for the model card.
        data: the totals of the samples, as those of DataReport; empty if only the hosts can count them.
    """

    run: str
    spec: dict[str, Any]
    files: list[dict[str, Any]]
    origin: dict[str, str]
    data: dict[str, Any] = field(default_factory=dict)

    @property
    def base_model(self) -> str:
        """What loads the model on the controller: its hub id, or its folder; empty if only the hosts have it."""
        name = self.origin.get("model", "")
        if is_hub_id(name):
            return name
        return next((str(entry["src"] or "") for entry in self.files if entry["kind"] == "model"), "")

    @property
    def has_dataset(self) -> bool:
        """Whether the hosts find every dataset in their store; otherwise each host fetches one from the hub."""
        if self.spec["script"] and self.spec["dataset"] == EMBEDDED_DATASET:
            return True  # a script reads a dataset only if one is set
        staged = sum(entry["kind"] == "dataset" for entry in self.files)
        listed = self.spec["dataset"]
        return staged == (1 if isinstance(listed, str) else len(listed))

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as plain data."""
        return asdict(self)


def spec_of(fields: dict[str, Any]) -> RunSpec:
    """Return the run spec of a prepared run's `spec`, which has more names than the schema."""
    return RunSpec.model_validate({name: value for name, value in fields.items() if name in FIELDS})


def prepare(spec: RunSpec, work: Path, report: Report, access: HostAccess | None = None) -> PreparedRun:
    """Check the dataset and the model, create or fetch what is missing, and list what every host needs.

    Args:
        work: folder on the controller for created files and caches.
        report: receives a line for each step that takes long.
        access: to the hosts, for what they have already (`host:/path`) or fetch from the hub.

    Raises:
        UserError: the dataset or the model is missing or damaged.
    """
    digests = Digests(work / "digests.json")
    on_hosts = files_on_hosts(spec, access)
    read: dict[int, list[Sample]] = {}
    files = dataset_entries(spec, on_hosts, access, digests, work, report, read)
    identity: dict[str, Any] = {}
    if files:
        names = [source.path for source in spec.sources]
        for entry in files:
            names[entry["source"]] = entry["digest"]
        identity["dataset"] = with_paths(spec.dataset, names)
    datasets = [Path(entry["src"]) for entry in files if entry["src"]]
    complete = len(datasets) == len(spec.sources)
    models = model_entries(spec, datasets if complete else [], on_hosts, access, digests, work, report)
    files += models
    data = _check_data(spec, files, datasets if complete else [], work, read)
    identity |= {entry["kind"]: entry["digest"] for entry in models}
    if spec.script:
        files.append(script_entry(check_script(spec.script)))
        identity["script"] = files[-1]["digest"]
    digests.keep()
    archive = trainer_archive(work)
    digest = sha256_file(archive)
    files.append(file_entry(archive, f"store/trainers/{digest[:16]}.zip", {"": digest}, "trainer"))
    known = {f"{entry['kind']}_sha256": entry["digest"] for entry in models}
    if len(spec.sources) == 1 and files[0]["kind"] == "dataset":
        known["dataset_sha256"] = files[0]["digest"]
    origin = {**model_settings(spec), "dataset": spec.dataset_name}
    if not spec.run:
        # The name depends on the contents of model and dataset, not on their paths on this controller.
        stem = RunSpec.named(spec).run.rpartition("-")[0]
        spec = spec.model_copy(update={"run": f"{stem}-{spec.model_copy(update=identity).digest()}"})
    return PreparedRun(
        run=spec.run,
        spec=spec.model_dump(mode="json") | {"rows_per_step": spec.rows_per_step},
        files=files,
        origin=origin | known,
        data=data,
    )


def _check_data(
    spec: RunSpec,
    files: Sequence[dict[str, Any]],
    datasets: Sequence[Path],
    work: Path,
    read: Mapping[int, list[Sample]],
) -> dict[str, Any]:
    """Return the totals of the samples of a run; empty if it has none, or if the controller lacks the model or a dataset.

    Args:
        files: the entries of datasets and models.
        datasets: those on the controller, if it has all of them.
        read: the samples of datasets that were just read, by their place.

    Raises:
        UserError: the run cannot train on them.
    """
    model = next((entry["src"] for entry in files if entry["kind"] == "model"), "")
    if spec.fake_data or spec.script or not datasets or not model:
        return {}
    from trainyard.run.data_check import (
        check_data,  # imports numpy, which a program that only follows runs does not need
    )

    digest = " ".join(entry["digest"] for entry in files if entry["kind"] == "dataset")
    spec = spec.with_dataset_paths(list(map(str, datasets)))
    samples = [sample for place in sorted(read) for sample in read[place]] if len(read) == len(datasets) else None
    found = check_data(spec, Path(model), digest, work, samples)
    return found.as_dict() if found else {}


def dataset_entries(
    spec: RunSpec,
    on_hosts: Mapping[str, HostFiles],
    access: HostAccess | None,
    digests: Digests,
    work: Path,
    report: Report,
    read: dict[int, list[Sample]],
) -> list[dict[str, Any]]:
    """Return the entries of the datasets that the hosts find in their store, with the place of each as `source`.

    Args:
        read: receives the samples of datasets that are read for the first time, by their place.

    Raises:
        UserError: a dataset is missing or damaged.
    """
    entries = []
    for place, source in enumerate(spec.sources if _needs_dataset(spec) else ()):
        if found := on_hosts.get(_setting(spec, place)):
            entries.append(found.entry("dataset") | {"source": place})
            continue
        one = spec.model_copy(update={"dataset": source.path})
        if path := dataset_file(one, work, report):
            entry = dataset_entry(path, digests)
            if not spec.script:  # which may read any format
                here = source.model_copy(update={"path": str(path)})
                if samples := _check_samples(here, entry["digest"], work, spec.needs_logprobs):
                    read[place] = samples
            entries.append(entry | {"source": place})
        elif fetched := hub_dataset(source.path, access and access_for(access, spec, "dataset"), digests, report):
            entries.append(fetched | {"source": place})
    return entries


def script_entry(path: Path) -> dict[str, Any]:
    """Return the entry of a script on the controller."""
    digest = sha256_file(path)
    return file_entry(
        path, f"store/scripts/{file_stem(path.stem) or 'script'}-{digest[:12]}.py", {"": digest}, "script"
    )


def dataset_entry(path: Path, digests: Digests) -> dict[str, Any]:
    """Return the entry of a dataset on the controller. Raises UserError."""
    if path_kind(path) == "folder":
        return folder_entry(path, "store/datasets/folder", digests, "dataset", all_files(path))
    digest = digests.of(path)
    return file_entry(path, f"store/datasets/{digest[:16]}{data_suffix(path)}", {"": digest}, "dataset")


def _needs_dataset(spec: RunSpec) -> bool:
    """Return whether the run reads a dataset. A script reads one only if it is set."""
    return not spec.fake_data and not (spec.script and spec.dataset == EMBEDDED_DATASET)


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
    elsewhere = {"teacher"} if spec.teacher_host else set()  # only one host needs it
    found: dict[str, HostFiles] = {}
    for names in (paths.keys() - elsewhere, paths.keys() & elsewhere):
        if names:
            where = access_for(access, spec, next(iter(names)))
            found |= describe_files(where, {setting: paths[setting] for setting in names})
    for setting in model_settings(spec):
        if model := found.get(setting):
            if model.kind != "folder":
                raise UserError(
                    f"{setting}: {model.path} is a file on the hosts: give the folder that holds config.json"
                )
            remedy = "give a model folder as transformers saves it"
            check_names(model.names, f"{model.path} on the hosts", remedy, setting)
    return found


def hub_dataset(name: str, access: HostAccess | None, digests: Digests, report: Report) -> dict[str, Any] | None:
    """Return the entry of a dataset of the hub; None if every host reads its own cache, because nothing may be fetched.

    Raises:
        UserError: neither a host nor the controller can fetch it.
    """
    if is_offline():
        return None
    if access and (entry := fetch_on_host("dataset", name, access, report)):
        return entry
    folder = fetch_on_controller("dataset", name, report)
    return folder_entry(folder, f"store/datasets/{name.replace('/', '--')}", digests, "dataset")


def dataset_file(spec: RunSpec, work: Path, report: Report) -> Path | None:
    """Return the dataset's file or folder on the controller; None for a hub id. The embedded dataset is created once.

    Raises:
        UserError: the file does not exist, or the embedded dataset cannot be created.
    """
    if spec.dataset == EMBEDDED_DATASET:
        path = work / "datasets" / f"{EMBEDDED_DATASET}-{importlib.metadata.version('ansible-core')}.jsonl"
        if not path.exists():
            report(f"creating the dataset {EMBEDDED_DATASET} from ansible-doc (once)")
            beside = Path(sys.executable).with_name("ansible-doc")
            program = str(beside) if beside.exists() else shutil.which("ansible-doc") or "ansible-doc"
            try:
                write_dataset(program, path)
            except (OSError, RuntimeError) as error:
                raise UserError(f"dataset: cannot create {EMBEDDED_DATASET}: {error}") from None
        return path
    if spec.dataset == OBSERVATORY:
        return DATASETS / f"{OBSERVATORY}.jsonl"
    path = user_path(spec.dataset_name, "dataset")
    kind = path_kind(path)
    if kind == "other":
        raise UserError(f"dataset: {path} is not a regular file: give a file or a folder")
    if kind == "folder" and not all_files(path):
        raise UserError(f"dataset: {path} is an empty folder: give a folder with data files, or a file")
    if not kind:
        if is_hub_id(spec.dataset_name):
            return None
        listed = ", or several in a list such as '[a.jsonl, b.jsonl]'" if "," in spec.dataset_name else ""
        raise UserError(
            f"dataset: no file {path}{_suggest_file(path)}: give a file, a folder, '{EMBEDDED_DATASET}', '{OBSERVATORY}', "
            f"host:/path, or a hub id (org/name){listed}"
        )
    return path.absolute()


def _suggest_file(path: Path) -> str:
    """Return `` (did you mean 'x'?)`` for a file beside `path` with nearly its name, or an empty string."""
    folder = path.parent
    try:
        names = [entry.name for entry in itertools.islice(folder.iterdir(), _MAX_NAMES)]
    except OSError:
        names = []
    near = get_close_matches(path.name, names, n=1, cutoff=0.75)
    return f" (did you mean {str(folder / near[0])!r}?)" if near else ""


def _check_samples(source: DatasetSource, digest: str, work: Path, logprobs: bool) -> list[Sample] | None:
    """Check the records of a dataset, once for each content and way to read it; return them if they are read. Raises UserError."""
    settings = source.model_dump_json(exclude={"path", "weight"}) + " logprobs" * logprobs
    mark = work / "checked" / hashlib.sha256(f"{digest} {settings}".encode()).hexdigest()
    if mark.exists():
        return None
    samples = check_source(source, logprobs=logprobs)
    mark.parent.mkdir(parents=True, exist_ok=True)
    mark.touch()
    return samples
