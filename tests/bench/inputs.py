"""What the benchmarks of the trainer share: the tiny model and the embedded dataset, made once."""

from __future__ import annotations

import sys
from pathlib import Path

from plugins.module_utils.docs_dataset import write_dataset
from trainer.data import read_samples
from trainer.tiny import make_tiny

TOP = Path(__file__).resolve().parents[2]


def made() -> tuple[Path, Path]:
    """Return the tiny model's folder and the embedded dataset's file."""
    folder = TOP / ".trainyard" / "bench"
    dataset, model = folder / "ansible-docs.jsonl", folder / "tiny"
    if not dataset.exists():
        write_dataset(str(Path(sys.executable).with_name("ansible-doc")), dataset)
    if not (model / "config.json").exists():
        make_tiny(read_samples(dataset), model, 1)
    return model, dataset
