"""Settle what a run is, on the controller, before any host is touched. Documented in plugins/modules/run_spec.py."""

from __future__ import annotations

import hashlib
import importlib.metadata
import io
import os
import shutil
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from ansible.utils.display import Display
from ansible.utils.vars import load_extra_vars
from safetensors import safe_open

TOP = Path(__file__).resolve().parents[2]
from trainer.config.run_spec import (
    EMBEDDED_DATASET,
    FIELDS,
    TINY,
    RunSpec,
    from_opendiloco,
    make_spec,
    read_yaml,
    suggest,
)
from trainer.data.samples import is_hub_id, read_samples
from trainer.errors import UserError
from trainer.files import sha256_file, sha256_tree, write_atomic
from trainyard.ansible_adapter import ClusterAction, failure
from trainyard.connection import last_line
from trainyard.docs_dataset import write_dataset
from trainyard.extra_vars import known_variables, unknown
from trainyard.remote.receive import Digests

display = Display()


class ActionModule(ClusterAction):
    def run(self, tmp: Any = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        super().run(tmp, task_vars)
        _, arguments = self.validate_argument_spec({"file": {"type": "str", "default": ""}})
        said = {str(name): value for name, value in load_extra_vars(self._loader).items()}
        try:
            spec = read(arguments["file"], said)
            if not self._task.check_mode:
                return settle(spec, TOP / ".trainyard")
            with tempfile.TemporaryDirectory() as work:  # --check leaves nothing, here either
                return settle(spec, Path(work))
        except UserError as error:
            return failure(str(error))


def read(file: str, said: dict[str, Any]) -> RunSpec:
    """Read the spec from a YAML file, if one is named, and from what was said with -e. Raises UserError."""
    if "_raw_params" in said:
        raise UserError(
            f"-e {said['_raw_params']}: takes NAME=VALUE; a value with blanks is quoted twice: -e 'run=\"a b\"'"
        )
    below, notes = from_opendiloco(read_yaml(Path(file).expanduser()) if file else {})
    said, more = from_opendiloco(said, below)
    strange = unknown(said, FIELDS, known_variables(TOP))
    if strange:
        known = sorted(known_variables(TOP))
        raise UserError("; ".join(f"-e {name}: there is no such name{suggest(name, known)}" for name in strange))
    if file:
        make_spec(below, file)
    for note in notes + more:
        display.display(note)
    over = {name: plain_value(value) for name, value in said.items() if name in FIELDS}
    return make_spec({**below, **over}, "-e")


def plain_value(value: Any) -> Any:
    """Return the value without Ansible's tags: pydantic takes exact types."""
    return str(value) if isinstance(value, str) else value


def settle(spec: RunSpec, work: Path) -> dict[str, Any]:
    """Check, or make, all that the run needs on the controller, and say what has to be on every host."""
    files: list[dict[str, Any]] = []
    named = spec.model_dump()
    digests = Digests(work / "digests.json")
    identity: dict[str, Any] = {}
    dataset = None if spec.fake_data else dataset_file(spec, work)
    if dataset:
        digest = digests.of(dataset)
        check_samples(dataset, digest, work)
        files.append(item(dataset, f"store/datasets/{digest[:16]}{dataset.suffix}", {"": digest}, "dataset"))
        identity["dataset"] = digest
    model = model_folder(spec, dataset, work)
    contents = {str(file.relative_to(model)): digests.of(file) for file in sorted(model.rglob("*")) if file.is_file()}
    whole = hashlib.sha256(repr(sorted(contents.items())).encode()).hexdigest()
    name = spec.model.rpartition("/")[2] if is_hub_id(spec.model) else model.name
    files.append(item(model, f"store/models/{name}-{whole[:12]}", contents, "model"))
    identity["model"] = whole
    digests.keep()
    archive = trainer_archive(work)
    files.append(item(archive, "", {"": sha256_file(archive)}, "trainer"))
    if not spec.run:
        # Named by what the run is made of, not by where that lies here.
        stem = RunSpec.named(spec).run.rpartition("-")[0]
        spec = spec.model_copy(update={"run": f"{stem}-{spec.model_copy(update=identity).digest()}"})
    return {
        "changed": False,
        "run": spec.run,
        "spec": spec.model_dump(mode="json") | {"rows_per_step": spec.rows_per_step},
        "files": files,
        "origin": {"model": named["model"], "dataset": named["dataset"]}
        | {f"{kind}_sha256": digest for kind, digest in identity.items()},
        "bytes": sum(entry["bytes"] for entry in files),
    }


def item(source: Path, target: str, digests: dict[str, str], kind: str) -> dict[str, Any]:
    """Describe a file or folder that has to be on every host: `target` is relative to the host's data dir."""
    size = sum((source / name if name else source).stat().st_size for name in digests)
    return {"kind": kind, "src": str(source), "dest": target, "sha256": digests, "bytes": size}


def dataset_file(spec: RunSpec, work: Path) -> Path | None:
    """Return the dataset's file on the controller, made if it is the embedded one; None for a hub id. Raises UserError."""
    if spec.dataset == EMBEDDED_DATASET:
        path = work / "datasets" / f"{EMBEDDED_DATASET}-{importlib.metadata.version('ansible-core')}.jsonl"
        if not path.exists():
            display.display(f"making the dataset {EMBEDDED_DATASET} out of ansible-doc (once)")
            beside = Path(sys.executable).with_name("ansible-doc")
            program = str(beside) if beside.exists() else shutil.which("ansible-doc") or "ansible-doc"
            try:
                write_dataset(program, path)
            except (OSError, RuntimeError) as error:
                raise UserError(f"dataset: cannot make {EMBEDDED_DATASET}: {error}") from None
        return path
    path = Path(spec.dataset).expanduser()
    if path.is_dir():
        raise UserError(f"dataset: {path} is a folder: give the JSONL file in it")
    if not path.exists():
        if is_hub_id(spec.dataset):
            return None
        near = suggest_file(path)
        raise UserError(
            f"dataset: no file {path}{near}: give a JSONL file, '{EMBEDDED_DATASET}', or a hub id (org/name)"
        )
    return path.absolute()


def suggest_file(path: Path) -> str:
    """Return `` (did you mean 'x'?)`` for a file beside `path` with nearly its name, or an empty string."""
    from difflib import get_close_matches

    folder = path.parent
    near = get_close_matches(
        path.name, [entry.name for entry in folder.iterdir()] if folder.is_dir() else [], n=1, cutoff=0.75
    )
    return f" (did you mean {str(folder / near[0])!r}?)" if near else ""


def check_samples(path: Path, digest: str, work: Path) -> None:
    """Check every line of a dataset once: a file of these contents that was checked before is taken as it is."""
    mark = work / "checked" / digest
    if not mark.exists():
        read_samples(path)
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.touch()


def model_folder(spec: RunSpec, dataset: Path | None, work: Path) -> Path:
    """Return the model's folder on the controller, made if it is tiny, fetched if it is the hub's. Raises UserError."""
    if spec.model == TINY:
        if dataset is None and not spec.fake_data:
            raise UserError(
                "model: tiny makes its tokenizer of the dataset's text, so the dataset has to be a file here"
            )
        return tiny_folder(spec, dataset, work)
    folder = Path(spec.model).expanduser()
    if not folder.exists():
        looks_like_path = spec.model.startswith((".", "/", "~")) or spec.model.count("/") > 1
        if looks_like_path or not (is_hub_id(spec.model) or cached(spec.model)):
            word = "no folder" if looks_like_path else "no such model:"
            raise UserError(
                f"model: {word} {spec.model}{suggest_model(spec.model)}: give 'tiny', a local model folder, or a hub id (org/name)"
            )
        if os.environ.get("HF_HUB_OFFLINE") == "1" and not cached(spec.model):
            raise UserError(
                f"model: {spec.model} is not in the hub's cache here, and HF_HUB_OFFLINE is set: fetch it first"
            )
        folder = from_hub(spec.model)
    if not folder.is_dir():
        raise UserError(f"model: {folder} is a file: give the folder that holds config.json")
    for wanted, what in (
        (("config.json",), "config.json"),
        (("*.safetensors", "*.bin"), "weights (*.safetensors)"),
        (("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tokenizer_config.json"), "tokenizer"),
    ):
        if not any(any(folder.glob(pattern)) for pattern in wanted):
            raise UserError(f"model: {folder} has no {what}: is it a model folder as transformers saves it?")
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, framework="numpy"):
                pass
        except Exception as error:  # the library's own class, or the system's
            raise UserError(f"model: {file} is damaged ({error}): copy it again") from None
    return folder.absolute()


def suggest_model(name: str) -> str:
    """Return `` (did you mean 'tiny'?)`` for a name that is nearly it."""
    from difflib import get_close_matches

    return f" (did you mean {TINY!r}?)" if get_close_matches(name, [TINY]) else ""


def from_hub(name: str) -> Path:
    """Return the model's folder in the hub's cache here, fetched if need be: once, and not by every host. Raises UserError."""
    from huggingface_hub import snapshot_download

    what = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.py"]
    if not cached(name):
        display.display(f"fetching {name} from the hub (once; the hosts get it from here)")
    try:
        folder = Path(snapshot_download(name, allow_patterns=what))
        if not any(folder.glob("*.safetensors")):
            folder = Path(snapshot_download(name, allow_patterns=[*what, "*.bin"]))
    except Exception as error:  # the library's own classes, requests', the system's
        raise UserError(f"model: cannot have {name} from the hub: {last_line(str(error))}") from None
    return folder


def cached(name: str) -> bool:
    """Tell whether the hub's cache on the controller holds this model."""
    home = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
    hub = Path(os.environ.get("HF_HUB_CACHE", home / "hub"))
    return any((hub / f"models--{name.replace('/', '--')}" / "snapshots").glob("*/config.json"))


def tiny_folder(spec: RunSpec, dataset: Path | None, work: Path) -> Path:
    """Return the folder of the tiny model for this dataset and seed, made once."""
    from trainer.data.tiny import make_tiny

    source = sha256_file(dataset)[:12] if dataset else "fake"
    recipe = sha256_tree(TOP / "trainer" / "data" / "tiny.py")[:6]
    folder = work / "models" / f"tiny-{source}-{spec.seed}-{recipe}"
    if not folder.exists():
        display.display(
            "making the model tiny: a few million random weights, a tokenizer trained on the dataset (once)"
        )
        folder.parent.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(dir=folder.parent))
        make_tiny(read_samples(dataset) if dataset else [], aside, spec.seed)
        aside.chmod(0o755)
        try:
            aside.rename(folder)
        except OSError:  # a run that started beside this one was quicker, with the same files
            shutil.rmtree(aside)
    return folder


def trainer_archive(work: Path) -> Path:
    """Return the trainer as one zip file; the same sources give the same bytes, so it travels only when it changed."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted((TOP / "trainer").rglob("*.py")):
            entry = zipfile.ZipInfo(str(path.relative_to(TOP)), date_time=(1980, 1, 1, 0, 0, 0))
            entry.external_attr = 0o644 << 16
            archive.writestr(entry, path.read_bytes(), zipfile.ZIP_DEFLATED)
    target = work / "stage" / f"trainer-{hashlib.sha256(buffer.getvalue()).hexdigest()[:16]}.zip"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(target, buffer.getvalue())
    return target
