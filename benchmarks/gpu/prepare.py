"""Create the inputs of the checks, and plan their runs: the first program that the driver starts; prints JSON.

    python -m benchmarks.gpu.prepare FOLDER DEVICE RUN...

FOLDER receives dataset.jsonl (the sections of this project's documents), and one folder per model with random weights.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.gpu.cases import CASES, Case, Scale, Size, scale_for
from trainer.config import RunSpec
from trainer.costs.cost import Layout
from trainer.costs.host_memory import BASE, own_memory_mib
from trainer.data.samples import read_samples
from trainer.data.tiny import make_tiny
from trainer.model_files.model_shape import shape_of
from trainer.planner.plan_report import plan, rows_of
from trainer.spec import make_spec
from trainer.strategy import plan_of

TOP = Path(__file__).resolve().parents[2]


def write_dataset(file: Path) -> None:
    """Write the sections of the documents as chats: the heading asks, the section answers."""
    lines = []
    for document in sorted([TOP / "README.md", *(TOP / "docs").glob("*.md")]):
        for section in document.read_text().split("\n## ")[1:]:
            heading, _, text = section.partition("\n")
            for part in text.split("\n\n"):
                messages = [{"role": "user", "content": heading}, {"role": "assistant", "content": part}]
                lines += [json.dumps({"messages": messages})] if part.strip() else []
    file.write_text("\n".join(lines) + "\n")


def write_model(tokenizer: Path, folder: Path, size: Size, device: str) -> None:
    """Write a Llama with random weights of this size, and with the tokenizer of another model."""
    hidden, inner, layers, heads, key_heads, dtype = size
    config = json.loads((tokenizer / "config.json").read_text())
    config |= {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers, "dtype": dtype}
    config |= {"num_attention_heads": heads, "num_key_value_heads": key_heads, "head_dim": hidden // heads}
    ignored = shutil.ignore_patterns("*.safetensors", "config.json")
    shutil.copytree(tokenizer, folder, ignore=ignored, dirs_exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    torch.manual_seed(1)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(folder, local_files_only=True), dtype=getattr(torch, dtype)
        )
    model.save_pretrained(folder)


def run_spec(name: str, case: Case, scale: Scale, folder: Path) -> RunSpec:
    """Return the run spec of a case. Raises UserError if this version of the trainer refuses it."""
    fields = scale.fields(case) | case.fields
    fields |= {"run": name, "model": str(folder / case.size), "dataset": str(folder / "dataset.jsonl")}
    return make_spec(fields, f"the case {name}")


def predict(name: str, case: Case, scale: Scale, folder: Path, device: str) -> dict[str, Any]:
    """Return the predicted memory (MiB) of one process (on a CPU with Python and its libraries), and tokens/s if the case is `planned`."""
    spec = run_spec(name, case, scale, folder)
    rows = rows_of(spec, folder)[0]
    layout = Layout((1,) * max(1, case.ranks))
    # Of rank 0, whose peak the metrics have. Ranks of one machine count as hosts, as those of a pipeline do.
    memory = plan_of(spec).memories(spec, shape_of(spec), layout, rows, cuda=device == "cuda")[0]
    base = 0 if device == "cuda" else BASE
    found: dict[str, Any] = {"memory_mib": memory.total / 2**20 + base, "parts": memory.step}
    if case.planned and not (scale.cpu and name != "lora"):  # a measurement takes seconds on a CPU
        report = plan(spec, [{"host": "here", "processes": 1}], None, fast=False, data_dir=folder)
        found["tokens_per_second"] = report["options"][0]["tokens_per_second"]
    return found


def about(device: str) -> dict[str, Any]:
    """Describe the device and the versions."""
    found: dict[str, Any] = {"torch": torch.__version__, "python": sys.version.split()[0], "cuda": torch.version.cuda}
    found["memory_mib"] = round(own_memory_mib(device))
    if device == "cuda":
        found["device"] = torch.cuda.get_device_name(0)
        found["capability"] = ".".join(map(str, torch.cuda.get_device_capability(0)))
    return found | {"device": found.get("device", "CPU")}


def main(folder: Path, device: str, runs: Sequence[str]) -> None:
    """Create the inputs of these runs, then print the description and the predictions."""
    began = time.perf_counter()
    machine = about(device)
    scale = scale_for(device, machine["memory_mib"])
    dataset, tokenizer = folder / "dataset.jsonl", folder / "tokenizer"
    write_dataset(dataset)
    make_tiny(read_samples(dataset), tokenizer, 1)
    cases = {name: CASES[name] for name in runs if name in CASES}
    for name in {"small", *(case.size for case in cases.values())}:
        write_model(tokenizer, folder / name, scale.sizes[name], device)
    if device == "cuda":
        torch.cuda.empty_cache()
    planned: dict[str, Any] = {}
    for name, case in cases.items():
        try:
            planned[name] = predict(name, case, scale, folder, device)
        except Exception as error:
            planned[name] = {"error": f"{type(error).__name__}: {error}"[:500]}
    print(json.dumps({"machine": machine, "planned": planned, "seconds": time.perf_counter() - began}), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])
