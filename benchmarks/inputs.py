"""What the benchmarks of the trainer share: models and the embedded dataset, made once."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

from trainer.data.samples import read_samples
from trainer.data.tiny import make_tiny
from trainyard.docs_dataset import write_dataset

TOP = Path(__file__).resolve().parents[1]


def made() -> tuple[Path, Path]:
    """Return the tiny model's folder and the embedded dataset's file."""
    folder = TOP / ".trainyard" / "bench"
    dataset, model = folder / "ansible-docs.jsonl", folder / "tiny"
    if not dataset.exists():
        write_dataset(str(Path(sys.executable).with_name("ansible-doc")), dataset)
    if not (model / "config.json").exists():
        make_tiny(read_samples(dataset), model, 1)
    return model, dataset


# hidden_size, intermediate_size and layers of Llamas with the tiny model's tokenizer, by their weights in millions.
SIZES = {"7m": (320, 864, 4), "26m": (512, 1376, 8), "58m": (768, 2048, 8)}


def model_of(size: str) -> Path:
    """Return the folder of a model of random weights: `tiny`, or a name in SIZES."""
    tiny, _ = made()
    folder = tiny.with_name(size)
    if not (folder / "config.json").exists():
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        hidden, inner, layers = SIZES[size]
        said = json.loads((tiny / "config.json").read_text())
        said |= {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers, "head_dim": 64}
        said |= {"num_attention_heads": hidden // 64, "num_key_value_heads": 1 if hidden % 128 else 2}
        shutil.copytree(tiny, folder, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
        torch.manual_seed(1)
        (folder / "said.json").write_text(json.dumps(said))
        AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder / "said.json")).save_pretrained(folder)
    return folder
