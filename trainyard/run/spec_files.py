"""What a run needs on the controller: a checked dataset, a model folder and the archive of the trainer."""

from __future__ import annotations

import hashlib
import importlib.metadata
import io
import itertools
import os
import shutil
import sys
import zipfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from safetensors import safe_open

import trainer
from trainer.config import EMBEDDED_DATASET, TINY, RunSpec
from trainer.data.samples import Sample, is_hub_id, read_samples
from trainer.errors import UserError, first_line
from trainer.files import sha256_file, write_atomic
from trainer.formats import printable
from trainer.inputs import path_kind, user_path
from trainyard.docs_dataset import write_dataset
from trainyard.remote.receive import Digests

Report = Callable[[str], None]

_MODEL_PARTS = (
    (("config.json",), "config.json"),
    (("*.safetensors", "*.bin"), "weights (*.safetensors)"),
    (("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tokenizer_config.json"), "tokenizer"),
)
_MAX_NAMES = 10_000  # files of a folder that a suggestion considers
_HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.py"]


@dataclass(frozen=True)
class PreparedRun:
    """A run spec with a name, and the files that every host needs.

    Attributes:
        run: name of the run.
        spec: every field of the run spec, and `rows_per_step`.
        files: for each file or folder its `kind` (dataset, model, trainer), `src` on the controller, `dest` below the
            host's data directory, `sha256` by relative name, and `bytes`.
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
        """Whether the controller stages the dataset; otherwise each host fetches it from the hub."""
        return any(entry["kind"] == "dataset" for entry in self.files)

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as plain data."""
        return asdict(self)


def prepare(spec: RunSpec, work: Path, report: Report) -> PreparedRun:
    """Check the dataset and the model, create or fetch what is missing, and list what every host needs.

    Args:
        work: folder on the controller for created files and caches.
        report: receives a line for each step that takes long.

    Raises:
        UserError: the dataset or the model is missing or damaged.
    """
    files: list[dict[str, Any]] = []
    digests = Digests(work / "digests.json")
    identity: dict[str, str] = {}
    dataset = None if spec.fake_data else dataset_file(spec, work, report)
    if dataset:
        digest = digests.of(dataset)
        _check_samples(dataset, digest, work)
        files.append(_entry(dataset, f"store/datasets/{digest[:16]}{dataset.suffix}", {"": digest}, "dataset"))
        identity["dataset"] = digest
    model = model_folder(spec, dataset, work, report)
    contents = {str(file.relative_to(model)): digests.of(file) for file in sorted(model.rglob("*")) if file.is_file()}
    identity["model"] = hashlib.sha256(repr(sorted(contents.items())).encode()).hexdigest()
    name = spec.model.rpartition("/")[2] if is_hub_id(spec.model) else model.name
    files.append(_entry(model, f"store/models/{name}-{identity['model'][:12]}", contents, "model"))
    digests.keep()
    archive = trainer_archive(work)
    digest = sha256_file(archive)
    files.append(_entry(archive, f"store/trainers/{digest[:16]}.zip", {"": digest}, "trainer"))
    origin = {"model": spec.model, "dataset": spec.dataset_name}
    if not spec.run:
        # The name depends on the contents of model and dataset, not on their paths on this controller.
        stem = RunSpec.named(spec).run.rpartition("-")[0]
        spec = spec.model_copy(update={"run": f"{stem}-{spec.model_copy(update=identity).digest()}"})
    return PreparedRun(
        run=spec.run,
        spec=spec.model_dump(mode="json") | {"rows_per_step": spec.rows_per_step},
        files=files,
        origin=origin | {f"{kind}_sha256": digest for kind, digest in identity.items()},
    )


def _entry(source: Path, target: str, digests: dict[str, str], kind: str) -> dict[str, Any]:
    size = sum((source / name if name else source).stat().st_size for name in digests)
    return {"kind": kind, "src": str(source), "dest": target, "sha256": digests, "bytes": size}


def dataset_file(spec: RunSpec, work: Path, report: Report) -> Path | None:
    """Return the dataset's file on the controller, or None for a hub id. The embedded dataset is created once.

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
    if kind == "folder":
        raise UserError(f"dataset: {path} is a folder: give the JSONL file in it")
    if kind == "other":
        raise UserError(f"dataset: {path} is not a regular file: give a JSONL file")
    if not kind:
        if is_hub_id(spec.dataset_name):
            return None
        raise UserError(
            f"dataset: no file {path}{_suggest_file(path)}: give a JSONL file, '{EMBEDDED_DATASET}', or a hub id (org/name)"
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


def _check_samples(path: Path, digest: str, work: Path) -> None:
    """Check every line of a dataset, once for each content. Raises UserError."""
    mark = work / "checked" / digest
    if not mark.exists():
        read_samples(path)
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.touch()


def model_folder(spec: RunSpec, dataset: Path | None, work: Path, report: Report) -> Path:
    """Return the model's folder on the controller; create the tiny model, or fetch a model from the hub, once.

    Raises:
        UserError: the model does not exist or is damaged.
    """
    if spec.model == TINY:
        if dataset is None and not spec.fake_data:
            raise UserError(
                "model: tiny builds its tokenizer from the dataset, so the dataset must be a file on this machine"
            )
        return _tiny_folder(spec, dataset, work, report)
    folder = user_path(spec.model, "model")
    if not path_kind(folder):
        looks_like_path = spec.model.startswith((".", "/", "~")) or spec.model.count("/") > 1
        if looks_like_path or not (is_hub_id(spec.model) or in_hub_cache(spec.model)):
            what = "no folder" if looks_like_path else "no such model:"
            near = f" (did you mean {TINY!r}?)" if get_close_matches(spec.model, [TINY]) else ""
            raise UserError(
                f"model: {what} {spec.model}{near}: give 'tiny', a local model folder, or a hub id (org/name)"
            )
        if os.environ.get("HF_HUB_OFFLINE") == "1" and not in_hub_cache(spec.model):
            raise UserError(
                f"model: {spec.model} is not in this machine's hub cache and HF_HUB_OFFLINE is set: fetch it first"
            )
        folder = _fetch_from_hub(spec.model, report)
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


def _fetch_from_hub(name: str, report: Report) -> Path:
    """Return the model's folder in this machine's hub cache; fetch it if it is not there. Raises UserError."""
    from huggingface_hub import snapshot_download

    if not in_hub_cache(name):
        report(f"fetching {name} from the hub (once; the hosts receive it from this machine)")
    try:
        folder = Path(snapshot_download(name, allow_patterns=_HUB_FILES))
        if not any(folder.glob("*.safetensors")):
            folder = Path(snapshot_download(name, allow_patterns=[*_HUB_FILES, "*.bin"]))
    except Exception as error:  # the library's own classes, requests', OSError
        why = printable((str(error).strip().splitlines() or [""])[-1].strip())
        raise UserError(f"model: cannot fetch {name} from the hub: {why}") from None
    return folder


def in_hub_cache(name: str) -> bool:
    """Return whether this machine's hub cache holds a model."""
    home = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
    hub = Path(os.environ.get("HF_HUB_CACHE", home / "hub"))
    return any((hub / f"models--{name.replace('/', '--')}" / "snapshots").glob("*/config.json"))


def _tiny_folder(spec: RunSpec, dataset: Path | None, work: Path, report: Report) -> Path:
    """Return the folder of the tiny model for this dataset and seed, created once."""
    from trainer.data.tiny import ensure_tiny_model

    def samples() -> list[Sample]:
        if dataset is None:
            return []
        report("creating the model tiny: random weights and a tokenizer trained on the dataset (once)")
        return list(read_samples(dataset))

    return ensure_tiny_model(work, dataset, spec.seed, samples)


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
