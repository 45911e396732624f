"""Show on the controller what a run trains on."""

from __future__ import annotations

from pathlib import Path

from trainer.common.errors import UserError
from trainer.common.inputs import host_path, path_kind, user_path
from trainer.config import RunSpec
from trainer.data.encode import Encoder
from trainer.data.samples import samples_of
from trainer.data.show import View, check_shown, show
from trainer.data.text_tokenizer import TextTokenizer
from trainer.model_files.model_shape import fit_to_model
from trainyard.run.prepare.hub import fetch_on_controller, is_offline
from trainyard.run.prepare.model_files import config_of, model_folder
from trainyard.run.prepare.spec_files import dataset_file
from trainyard.run.types import Report

_ELSEWHERE = "run the command `data` of the trainer on a host"


def show_data(spec: RunSpec, samples: int | None, as_json: bool, work: Path, report: Report) -> None:
    """Print what a run trains on, as `python -m trainer data` does on a host.

    Args:
        samples: number of samples; None for the default.
        as_json: see View.
        work: folder for created files.
        report: receives lines about what is created or fetched.

    Raises UserError: a dataset or the model is not on this machine, or a run would refuse a sample.
    """
    view = View.of(samples, as_json)
    check_shown(spec)
    for setting, text in (("model", spec.model), *(("dataset", source.path) for source in spec.sources)):
        if host_path(text, setting):
            raise UserError(f"{setting}: {text} is on the hosts: copy it to this machine, or {_ELSEWHERE}")
    spec = spec.with_dataset_paths([_dataset(spec, source.path, work, report) for source in spec.sources])
    folder = model_folder(spec, [Path(source.path) for source in spec.sources], work, report)
    tokenizer = TextTokenizer.read(folder)
    if tokenizer is None:
        raise UserError(
            f"model: {folder} has no tokenizer.json, or special tokens that only transformers knows: {_ELSEWHERE}"
        )
    spec = fit_to_model(spec, {"model": config_of(folder)})
    show(samples_of(spec), Encoder.of(spec, tokenizer), view)


def _dataset(spec: RunSpec, path: str, work: Path, report: Report) -> str:
    """Return the path of a dataset on this machine, as the user wrote it if it has one. Raises UserError."""
    found = dataset_file(spec.model_copy(update={"dataset": path}))
    if found and path_kind(given := user_path(path, "dataset")):
        return str(given)
    if not found and not is_offline():
        found = fetch_on_controller("dataset", path, report)
    return str(found or path)
