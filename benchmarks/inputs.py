"""Inputs of the trainer benchmarks: models and a dataset, the same on every machine, created once."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

from trainer.data.samples import read_samples
from trainer.data.tiny import make_tiny

TOP = Path(__file__).resolve().parents[1]


def build_inputs() -> tuple[Path, Path]:
    """Return the folder of the tiny model and the file of the dataset; create them if they are missing."""
    folder = TOP / ".trainyard" / "bench"
    dataset, model = folder / "questions.jsonl", folder / "tiny"
    if not dataset.exists():
        write_dataset(dataset)
    if not (model / "config.json").exists():
        make_tiny(read_samples(dataset), model, 1)
    return model, dataset


def write_dataset(file: Path, count: int = 3000) -> None:
    """Write questions and answers of invented words, whose frequencies and lengths are those of a documentation."""
    chance = random.Random(1)
    words = ["".join(chance.choices("aeioulnrstdkmpbg", k=chance.randint(2, 9))) for _ in range(4000)]
    weights = [1 / rank for rank in range(1, len(words) + 1)]

    def text(typical: float) -> str:
        return " ".join(chance.choices(words, weights, k=max(3, round(chance.lognormvariate(0, 0.8) * typical))))

    file.parent.mkdir(parents=True, exist_ok=True)
    records = ({"instruction": text(9), "output": text(20)} for _ in range(count))
    file.write_text("".join(f"{json.dumps(record)}\n" for record in records))


# hidden_size, intermediate_size and layers of Llama models with the tokenizer of the tiny model, by their weights in millions.
SIZES = {"7m": (320, 864, 4), "26m": (512, 1376, 8), "58m": (768, 2048, 8)}


def model_of(size: str) -> Path:
    """Return the folder of a model with random weights: `tiny`, or a name in SIZES. Creates it if it is missing."""
    tiny, _ = build_inputs()
    folder = tiny.with_name(size)
    if not (folder / "config.json").exists():
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        hidden, inner, layers = SIZES[size]
        config = json.loads((tiny / "config.json").read_text())
        config |= {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers, "head_dim": 64}
        config |= {"num_attention_heads": hidden // 64, "num_key_value_heads": 1 if hidden % 128 else 2}
        shutil.copytree(tiny, folder, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
        torch.manual_seed(1)
        (folder / "config.json").write_text(json.dumps(config))
        AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder / "config.json")).save_pretrained(folder)
    return folder
