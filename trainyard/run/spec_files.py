"""What a run needs on the controller: a checked dataset, a model folder and the archive of the trainer."""

from __future__ import annotations

import hashlib
import importlib.metadata
import io
import itertools
import shutil
import sys
import zipfile
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from safetensors import safe_open

import trainer
from trainer.config import EMBEDDED_DATASET, TINY, RunSpec
from trainer.config.dataset_source import DatasetSource, with_paths
from trainer.data.files import all_files, data_suffix, is_hub_id
from trainer.data.samples import check_source
from trainer.errors import UserError, first_line
from trainer.files import sha256_file, write_atomic
from trainer.inputs import host_path, path_kind, user_path
from trainyard.docs_dataset import write_dataset
from trainyard.remote.digests import Digests
from trainyard.run.file_entries import file_entry, folder_entry
from trainyard.run.host_files import HostAccess, HostFiles, describe_files
from trainyard.run.hub import fetch_on_controller, fetch_on_host, in_hub_cache, is_offline

Report = Callable[[str], None]

_MODEL_PARTS = (
    (("config.json",), "config.json"),
    (("*.safetensors", "*.bin"), "weights (*.safetensors)"),
    (("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tokenizer_config.json"), "tokenizer"),
)
TINY_NEEDS_DATASET = (
    "model: tiny builds its tokenizer from the dataset, so the dataset must be a file on this machine: "
    "give a model folder, host:/folder, or a hub id (org/name)"
)
_MAX_NAMES = 10_000  # files of a folder that a suggestion considers


@dataclass(frozen=True)
class PreparedRun:
    """A run spec with a name, and the files that every host needs.

    Attributes:
        run: name of the run.
        spec: every field of the run spec, and `rows_per_step`.
        files: for each file or folder its `kind` (dataset, model, trainer), `src` on the controller, `dest` below the
            host's data directory, `sha256` by relative name, `digest` of all of it, and `bytes` to copy. A dataset has its
            place among those of the spec, `source`. What the hosts have already has no `src`, and its path there as
            `on_hosts`. What a host fetched from the hub has no `src`, the host as `fetched_by`, and `sizes` by relative
            name. Both have the text of a model's config.json as `config`.
        origin: what the spec calls model and dataset, and their checksums, for the model card.
    """

    run: str
    spec: dict[str, Any]
    files: list[dict[str, Any]]
    origin: dict[str, str]

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(entry["bytes"] for entry in self.files)

    @property
    def has_dataset(self) -> bool:
        """Whether the hosts find every dataset in their store; otherwise each host fetches one from the hub."""
        staged = sum(entry["kind"] == "dataset" for entry in self.files)
        listed = self.spec["dataset"]
        return staged == (1 if isinstance(listed, str) else len(listed))

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as plain data."""
        return asdict(self)


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
    files = dataset_entries(spec, on_hosts, access, digests, work, report)
    identity: dict[str, Any] = {}
    if files:
        names = [source.path for source in spec.sources]
        for entry in files:
            names[entry["source"]] = entry["digest"]
        identity["dataset"] = with_paths(spec.dataset, names)
    if found := on_hosts.get("model"):
        files.append(found.entry("model"))
    elif fetched := hub_model(spec, access, report):
        files.append(fetched)
    else:
        datasets = [Path(entry["src"]) for entry in files if entry["src"]]
        complete = len(datasets) == len(spec.sources)
        model = model_folder(spec, datasets if complete else [], work, report)
        name = spec.model.rpartition("/")[2] if is_hub_id(spec.model) else model.name
        files.append(folder_entry(model, f"store/models/{name}", digests, "model"))
    identity["model"] = files[-1]["digest"]
    digests.keep()
    archive = trainer_archive(work)
    digest = sha256_file(archive)
    files.append(file_entry(archive, f"store/trainers/{digest[:16]}.zip", {"": digest}, "trainer"))
    known = {"model_sha256": identity["model"]}
    if len(spec.sources) == 1 and files[0]["kind"] == "dataset":
        known["dataset_sha256"] = files[0]["digest"]
    origin = {"model": spec.model, "dataset": spec.dataset_name}
    if not spec.run:
        # The name depends on the contents of model and dataset, not on their paths on this controller.
        stem = RunSpec.named(spec).run.rpartition("-")[0]
        spec = spec.model_copy(update={"run": f"{stem}-{spec.model_copy(update=identity).digest()}"})
    return PreparedRun(
        run=spec.run,
        spec=spec.model_dump(mode="json") | {"rows_per_step": spec.rows_per_step},
        files=files,
        origin=origin | known,
    )


def dataset_entries(
    spec: RunSpec,
    on_hosts: Mapping[str, HostFiles],
    access: HostAccess | None,
    digests: Digests,
    work: Path,
    report: Report,
) -> list[dict[str, Any]]:
    """Return the entries of the datasets that the hosts find in their store, with the place of each as `source`.

    Raises:
        UserError: a dataset is missing or damaged.
    """
    entries = []
    for place, source in enumerate(() if spec.fake_data else spec.sources):
        if found := on_hosts.get(_setting(spec, place)):
            entries.append(found.entry("dataset") | {"source": place})
            continue
        one = spec.model_copy(update={"dataset": source.path})
        if path := dataset_file(one, work, report):
            entry = _dataset_entry(path, digests)
            _check_samples(source.model_copy(update={"path": str(path)}), entry["digest"], work)
            entries.append(entry | {"source": place})
        elif fetched := hub_dataset(source.path, access, digests, report):
            entries.append(fetched | {"source": place})
    return entries


def _dataset_entry(path: Path, digests: Digests) -> dict[str, Any]:
    """Return the entry of a dataset on the controller. Raises UserError."""
    if path_kind(path) == "folder":
        return folder_entry(path, "store/datasets/folder", digests, "dataset", all_files(path))
    digest = digests.of(path)
    return file_entry(path, f"store/datasets/{digest[:16]}{data_suffix(path)}", {"": digest}, "dataset")


def _setting(spec: RunSpec, place: int) -> str:
    """Return what a message calls a dataset of the spec."""
    return "dataset" if len(spec.sources) == 1 else f"dataset {place + 1}"


def files_on_hosts(spec: RunSpec, access: HostAccess | None) -> dict[str, HostFiles]:
    """Return the files of the spec that the hosts have already, by setting. Raises UserError."""
    settings = {"model": spec.model}
    if not spec.fake_data:
        settings |= {_setting(spec, place): source.path for place, source in enumerate(spec.sources)}
    paths = {setting: path for setting, text in settings.items() if (path := host_path(text, setting))}
    if not paths:
        return {}
    if spec.model == TINY and not spec.fake_data:
        raise UserError(TINY_NEEDS_DATASET)
    if access is None:
        raise UserError(f"{', '.join(paths)}: host:/path needs hosts: start the run with train.yml")
    found = describe_files(access, paths)
    if model := found.get("model"):
        if model.kind != "folder":
            raise UserError(f"model: {model.path} is a file on the hosts: give the folder that holds config.json")
        _check_names(model.names, f"{model.path} on the hosts", "give a model folder as transformers saves it")
    return found


def _check_names(names: Collection[str], where: str, remedy: str) -> None:
    """Check by the names of its files that a folder holds config, weights and tokenizer. Raises UserError."""
    for patterns, what in _MODEL_PARTS:
        if not any(fnmatchcase(name, pattern) for name in names for pattern in patterns if "/" not in name):
            raise UserError(f"model: {where} has no {what}: {remedy}")


def hub_model(spec: RunSpec, access: HostAccess | None, report: Report) -> dict[str, Any] | None:
    """Return the entry of a model that one host fetches from the hub; None if it is found or fetched elsewhere."""
    name = spec.model
    if access is None or is_offline() or not is_hub_id(name) or in_hub_cache(name):
        return None
    if entry := fetch_on_host("model", name, access, report):
        _check_names(entry["sha256"], f"{name} on the hub", "choose a model in the format of transformers")
    return entry


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
            f"dataset: no file {path}{_suggest_file(path)}: give a file, a folder, '{EMBEDDED_DATASET}', "
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


def _check_samples(source: DatasetSource, digest: str, work: Path) -> None:
    """Check the records of a dataset, once for each content and way to read it. Raises UserError."""
    settings = source.model_dump_json(include={"split", "config", "columns"})
    mark = work / "checked" / hashlib.sha256(f"{digest} {settings}".encode()).hexdigest()
    if not mark.exists():
        check_source(source)
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.touch()


def model_folder(spec: RunSpec, datasets: list[Path], work: Path, report: Report) -> Path:
    """Return the model's folder on the controller; create the tiny model, or fetch a model from the hub, once.

    Args:
        datasets: the datasets on the controller, if it has all of them.

    Raises:
        UserError: the model does not exist or is damaged.
    """
    if spec.model == TINY:
        if not datasets and not spec.fake_data:
            raise UserError(TINY_NEEDS_DATASET)
        from trainer.data.tiny import tiny_folder

        return tiny_folder(spec.with_dataset_paths(list(map(str, datasets))) if datasets else spec, work, report)
    folder = user_path(spec.model, "model")
    if not path_kind(folder):
        looks_like_path = spec.model.startswith((".", "/", "~")) or spec.model.count("/") > 1
        if looks_like_path or not (is_hub_id(spec.model) or in_hub_cache(spec.model)):
            what = "no folder" if looks_like_path else "no such model:"
            near = f" (did you mean {TINY!r}?)" if get_close_matches(spec.model, [TINY]) else ""
            raise UserError(
                f"model: {what} {spec.model}{near}: give 'tiny', a local model folder, or a hub id (org/name)"
            )
        if is_offline() and not in_hub_cache(spec.model):
            raise UserError(
                f"model: {spec.model} is not in this machine's hub cache and HF_HUB_OFFLINE is set: fetch it first"
            )
        folder = fetch_on_controller("model", spec.model, report)
    _check_model(folder)
    return folder.absolute()


def _check_model(folder: Path) -> None:
    """Check that a folder holds config, readable weights and tokenizer. Raises UserError."""
    if path_kind(folder) != "folder":
        raise UserError(f"model: {folder} is a file: give the folder that holds config.json")
    for patterns, what in _MODEL_PARTS:
        if not any(path_kind(file) == "file" for pattern in patterns for file in folder.glob(pattern)):
            raise UserError(f"model: {folder} has no {what}: give a model folder as transformers saves it")
    for file in sorted(folder.glob("*.safetensors")):
        if path_kind(file) != "file":
            raise UserError(f"model: {file} is not a regular file: copy it again")
        try:
            with safe_open(file, framework="numpy"):
                pass
        except Exception as error:  # the library's own class, or OSError
            raise UserError(f"model: {file} is damaged ({first_line(error)}): copy it again") from None


def trainer_archive(work: Path) -> Path:
    """Return the trainer as one zip file. Equal sources give equal bytes, so it is staged only when it changed."""
    package = Path(trainer.__file__).parent
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(package.rglob("*.py")):
            entry = zipfile.ZipInfo(str(path.relative_to(package.parent)), date_time=(1980, 1, 1, 0, 0, 0))
            entry.external_attr = 0o644 << 16
            archive.writestr(entry, path.read_bytes(), zipfile.ZIP_DEFLATED)
    target = work / "stage" / f"trainer-{hashlib.sha256(buffer.getvalue()).hexdigest()[:16]}.zip"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(target, buffer.getvalue())
    return target
