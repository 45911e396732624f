"""What a run leaves for others to use: the merged model, and the card that says where an adapter came from."""

import importlib.metadata
import json
import platform
from pathlib import Path
from typing import Any

import yaml

from trainer import __version__
from trainer.config import RunSpec
from trainer.data.samples import HUB_ID
from trainer.files import whole_folder, write_atomic

_PACKAGES = ("torch", "transformers", "peft", "tokenizers")


def merge_adapter(spec: RunSpec, run_dir: Path) -> Path:
    """Write base model and adapter as one model into `run_dir/merged`, and return that folder.

    Both are read afresh from disk, on the CPU: so it is the same whatever strategy trained them, and however the base was
    quantized meanwhile.

    Raises:
        DiskError: no room.
    """
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    final = run_dir / "merged"
    dtype = torch.float32 if spec.precision == "32-true" else torch.bfloat16
    base = AutoModelForCausalLM.from_pretrained(spec.model, dtype=dtype)
    model: Any = PeftModel.from_pretrained(base, str(run_dir / "adapter")).merge_and_unload()
    with whole_folder(final, "merge") as aside:
        model.save_pretrained(aside)
        AutoTokenizer.from_pretrained(run_dir / "adapter").save_pretrained(aside)
    return final


def write_card(folder: Path, spec: RunSpec, result: dict[str, Any], hosts: list[str], data: str) -> None:
    """Write `folder/README.md`, the model card: front matter as the hub reads it, then what made these weights.

    Args:
        hosts: host name of every rank, in order.
        data: digest of the encoded samples.
    """
    run_dir = folder.parent
    # What model and dataset were called where the run was ordered; here they are paths in the store.
    origin_file = run_dir / "origin.json"
    origin = json.loads(origin_file.read_text()) if origin_file.exists() else {}
    model, dataset = origin.get("model", spec.model), origin.get("dataset", spec.dataset)
    kind = "peft" if spec.lora_r else "transformers"
    front: dict[str, Any] = {"library_name": kind, "pipeline_tag": "text-generation", "tags": ["trainyard"]}
    if spec.lora_r:
        front["tags"].append("lora")
    if HUB_ID.fullmatch(model):
        front |= {"base_model": model, "base_model_relation": "adapter" if spec.lora_r else "finetune"}
    if HUB_ID.fullmatch(dataset):
        front["datasets"] = [dataset]
    versions = {"python": platform.python_version(), "trainyard": __version__}
    versions |= {name: importlib.metadata.version(name) for name in _PACKAGES}
    eval_loss = "none" if result["eval_loss"] is None else f"{result['eval_loss']:.4f}"
    facts = {
        "base model": f"{model}{checksum(origin.get('model_sha256'))}",
        "dataset": f"{dataset}{checksum(origin.get('dataset_sha256'))}",
        "samples as encoded": f"sha256 {data}",
        "steps": f"{result['step']} of {result['steps']}, {result['samples']} samples, {result['tokens']} tokens",
        "loss": f"{result['loss_first']:.4f} -> {result['loss_last']:.4f}, held out: {eval_loss}",
        "ranks": f"{len(hosts)} on {', '.join(dict.fromkeys(hosts))} (strategy {spec.strategy})",
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
    }
    table = "\n".join(f"| {name} | {value} |" for name, value in facts.items())
    text = (
        f"---\n{yaml.safe_dump(front, sort_keys=False)}---\n\n# {spec.run}\n\nTrained with trainyard.\n\n"
        f"| | |\n| --- | --- |\n{table}\n\n## Run spec\n\n```yaml\n{spec.to_yaml()}```\n"
    )
    write_atomic(folder / "README.md", text)


def checksum(digest: str | None) -> str:
    """Return a digest as it stands beside a name, or nothing."""
    return f" (sha256 {digest})" if digest else ""
