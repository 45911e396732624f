"""The output of a finished run: the adapter or model, the merged model, the model card and result.json."""

import collections
import importlib.metadata
import itertools
import json
import platform
import re
import socket
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from trainer import __version__
from trainer.common.errors import UserError
from trainer.common.files import atomic_folder, sha256_file, sha256_tree, to_json, write_atomic
from trainer.common.formats import counted
from trainer.config import RunSpec
from trainer.costs.cost import EXPORT_PART
from trainer.data.data_report import DataReport
from trainer.data.dataset_files import HUB_ID
from trainer.method import DEFAULT_METHOD
from trainer.strategy import plan_of

if TYPE_CHECKING:
    import torch

    from trainer.loop.train import Evaluator
    from trainer.loop.training_inputs import TrainingInputs
    from trainer.records.run_state import RunState
    from trainer.records.step_metrics import StepMetrics
    from trainer.records.telemetry import Heartbeat, Recorder
    from trainer.strategy.base import Strategy

_WEIGHTS = "model.safetensors"
_PACKAGES = ("torch", "transformers", "peft", "tokenizers")


def finalize(
    inputs: "TrainingInputs",
    strategy: "Strategy",
    state: "RunState",
    evaluation: "Evaluator",
    recorder: "Recorder",
    heartbeat: "Heartbeat",
    run_dir: Path,
    metrics: "StepMetrics",
    *,
    finished: bool,
) -> dict[str, Any]:
    """Return the result of a run; if it has finished, evaluate the model and write it. Every rank calls it.

    Raises NonFiniteError: the model or its evaluation loss is not finite; DiskError: the disk is full or not writable.
    """
    from trainer.common.finite import require_finite_weights
    from trainer.models.greedy_answers import keep_answers

    spec, world = inputs.spec, strategy.world
    result = _result(inputs, state, evaluation.loss, run_dir, finished=finished)
    if not finished:
        return result
    result["eval_loss"] = evaluation.update(state.step)
    result |= strategy.merge_replicas(state.totals, result["eval_loss"], evaluation)
    require_finite_weights(strategy, state.step)
    if result["eval_loss"] is not None:
        recorder.evaluation(result["eval_loss"], state.step, evaluation.metrics)
    heartbeat("saving")
    hosts = world.gather(socket.gethostname())
    use = metrics.use
    shares = world.gather(use and round(use.at_peak / use.elapsed, 4))
    result["mfu_ranks"] = None if None in shares else shares
    weights = strategy.weights()
    if not world.is_host_leader:
        collections.deque(weights or (), maxlen=0)  # this rank's part in assembling them
    else:
        result |= export_weights(inputs, strategy.model_to_save(), weights, run_dir)
        if spec.merge and spec.lora_r and world.rank == 0:
            result["merged"] = str(merge_adapter(spec, run_dir))
        if weights is None and world.rank == 0:
            kind = "adapter" if spec.lora_r else "model"
            keep_answers(spec, inputs.module.model, run_dir, result[f"{kind}_sha256"])
        write_card(run_dir / ("adapter" if spec.lora_r else "model"), spec, result, hosts, inputs.data)
        write_atomic(run_dir / "result.json", to_json(result, indent=1))
    return result


def _result(
    inputs: "TrainingInputs", state: "RunState", eval_loss: float | None, run_dir: Path, *, finished: bool
) -> dict[str, Any]:
    import torch

    spec, totals = inputs.spec, state.totals
    return {
        "run": spec.run,
        "status": "finished" if finished else "stopped",
        "world_size": state.world_size,
        "strategy": spec.strategy,
        "step": state.step,
        "steps": state.steps,
        "tokens_per_second": totals["tokens"] / totals["seconds"] if totals["seconds"] else 0.0,
        "mfu": totals["mfu_seconds"] / totals["mfu_measured"] if totals["mfu_measured"] else None,
        **{name: value for name, value in totals.items() if not name.startswith("mfu_")},
        "eval_loss": eval_loss,
        "packing": spec.packing,
        "data": inputs.corpus.report.as_dict(),
        "train_samples": inputs.train_samples,
        "adapter": None,
        "tensorboard": str(run_dir / "tensorboard") if "tensorboard" in spec.loggers else None,
        "trainer": __version__,
        "torch": torch.__version__,
    }


def export_weights(
    inputs: "TrainingInputs", model: Any, weights: "Iterable[tuple[str, torch.Tensor]] | None", run_dir: Path
) -> dict[str, Any]:
    """Write the adapter (or the full model) as transformers and peft read it; return its path and digest.

    `model`: the model, with adapters if the spec has them. `weights`: the full trained weights by name, which are read
    once; None if `model` has them. Raises DiskError: the disk is full or not writable.
    """
    from trainer.models.tokenizer_output import add_end_token, add_old_rope_keys, save_ends, save_tokenizer

    spec = inputs.spec
    kind = "adapter" if spec.lora_r else "model"
    final = run_dir / kind
    with atomic_folder(final, kind) as aside:
        # peft would otherwise ask the hub whether the vocabulary was extended; training never extends it.
        options: dict[str, Any] = {"save_embedding_layers": False} if spec.lora_r else {}
        # transformers would otherwise write only on rank 0, as if all hosts shared a disk.
        model.should_save_on_this_rank = lambda _: True  # type: ignore[assignment]
        settings = getattr(model, "generation_config", None)
        if settings is not None and add_end_token(settings, inputs.tokenizer) and spec.lora_r:
            save_ends(settings, aside)  # peft writes no such file
        if weights is None or spec.lora_r:
            options |= {"state_dict": dict(weights)} if weights else {}
            model.save_pretrained(aside, **options)  # type: ignore[operator]
            if not spec.lora_r:
                add_old_rope_keys(aside)
        else:
            save_in_parts(model, weights, aside)
        save_tokenizer(inputs.tokenizer, aside)
    files = sorted(file.name for file in final.glob("*.safetensors"))
    digest = sha256_file(final / files[0]) if len(files) == 1 else sha256_tree(final)
    return {kind: str(final), f"{kind}_sha256": digest}


def save_in_parts(model: Any, weights: "Iterable[tuple[str, torch.Tensor]]", folder: Path) -> None:
    """Write a model from its weights as transformers does, while only one file's weights are in memory.

    `model`: gives the names and the configuration; its own weights are not read.
    """
    from trainer.models.tokenizer_output import add_old_rope_keys

    parts: list[Path] = []
    part: dict[str, torch.Tensor] = {}

    def write() -> None:
        model.save_pretrained(folder, state_dict=part)
        parts.append((folder / _WEIGHTS).rename(folder / f".part-{len(parts)}"))
        part.clear()

    size = 0
    for name, value in weights:
        if part and size + value.nbytes > EXPORT_PART:
            write()
            size = 0
        part[name] = value
        size += value.nbytes
    write()
    add_old_rope_keys(folder)
    if len(parts) == 1:
        parts[0].rename(folder / _WEIGHTS)
        return
    places: dict[str, str] = {}
    total = 0
    for number, path in enumerate(parts, 1):
        name = f"model-{number:05d}-of-{len(parts):05d}.safetensors"
        path.rename(folder / name)
        with (folder / name).open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        header.pop("__metadata__", None)
        places |= dict.fromkeys(header, name)
        total += sum(end - begin for begin, end in (about["data_offsets"] for about in header.values()))
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (folder / f"{_WEIGHTS}.index.json").write_text(json.dumps(index, indent=2), encoding="utf-8")


def merge_adapter(spec: RunSpec, run_dir: Path) -> Path:
    """Merge the adapter into the base model, write the result to `run_dir/merged` and return that folder.

    Both are read from disk again, on the CPU, so the result does not depend on the strategy or the quantization. Only
    one file of the result is in memory at a time. The result is read again, and answers as the base model with the
    adapter does. Raises UserError: the merged weights are not finite or wrong; DiskError: the disk is full or not
    writable.
    """
    from transformers import AutoTokenizer

    from trainer.models.adapter_merge import LogitCheck, merged_dtype, merged_weights, saved_model, weightless
    from trainer.models.tokenizer_output import add_end_token, save_tokenizer

    dtype, tokenizer = merged_dtype(spec), AutoTokenizer.from_pretrained(run_dir / "adapter", trust_remote_code=False)
    with atomic_folder(run_dir / "merged", "merge") as aside:
        adapted = _adapted(spec, run_dir)
        weights = merged_weights(adapted, dtype)
        first = next(weights)  # the configuration says whether weights are tied once the first one is there
        model = weightless(adapted, dtype)
        add_end_token(model.generation_config, tokenizer)
        save_in_parts(model, _finite(spec, itertools.chain([first], weights)), aside)
        del adapted, weights, first
        LogitCheck(_adapted(spec, run_dir), dtype)(saved_model(aside))
        save_tokenizer(tokenizer, aside)
    return run_dir / "merged"


def _adapted(spec: RunSpec, run_dir: Path) -> Any:
    """Return the base model of a run with its adapter. Raises UserError."""
    import torch

    from trainer.models.adapter_merge import adapted_model, merged_dtype

    dtype, pipeline = merged_dtype(spec), plan_of(spec).pipeline_hosts(spec) is not None
    # What no host holds in memory stays on the disk; float32 logits of a 16-bit base would be those of rounding.
    return adapted_model(spec, run_dir / "adapter", "auto" if pipeline or dtype != torch.float32 else dtype)


def _finite(spec: RunSpec, weights: "Iterable[tuple[str, torch.Tensor]]") -> "Iterator[tuple[str, torch.Tensor]]":
    """Yield the merged weights. Raises UserError if one is not finite."""
    from trainer.common.finite import all_finite

    for name, value in weights:
        if not all_finite([value]):
            raise UserError(
                f"merge: the weights of {spec.model} with the adapter overflow: decrease lr (now {spec.lr:g}) or lora_alpha, "
                "and set another run name with run="
            )
        yield name, value


def read_origin(run_dir: Path) -> dict[str, str]:
    """Return the user's names of model and dataset, and their checksums; the spec has their paths in the store.

    It is empty for a run that train.yml did not start.
    """
    file = run_dir / "origin.json"
    origin: dict[str, str] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    return origin


def write_card(folder: Path, spec: RunSpec, result: dict[str, Any], hosts: list[str], data: str) -> None:
    """Write the model card `folder/README.md`: front matter for the hub, then the origin of the weights.

    The card may be published: of paths it has the last name, and no names of hosts. `hosts`: host name of every rank,
    in rank order. `data`: digest of the encoded samples.
    """
    origin = read_origin(folder.parent)
    model, dataset = origin.get("model", spec.model), origin.get("dataset", spec.dataset_name)
    front = _front_matter(spec, model, dataset)
    model, dataset = (_FOLDERS.sub("", name) for name in (model, dataset))
    versions = {"python": platform.python_version(), "trainyard": __version__}
    versions |= {name: importlib.metadata.version(name) for name in _PACKAGES}
    eval_loss = "none" if result["eval_loss"] is None else f"{result['eval_loss']:.4f}"
    facts = {
        "base model": f"{model}{checksum(origin.get('model_sha256'))}",
        "dataset": f"{dataset}{checksum(origin.get('dataset_sha256'))}",
        "samples as encoded": f"sha256 {data}",
        "data": DataReport.of(result["data"]).line(),
        "steps": f"{result['step']} of {result['steps']}, {result['samples']} samples, {result['tokens']} tokens",
        "loss": f"{result['loss_first']:.4f} -> {result['loss_last']:.4f}, held out: {eval_loss}",
        **({"rank of the adapter": str(rank)} if (rank := result.get("adapter_rank")) else {}),
        "ranks": f"{len(hosts)} on {counted(len(set(hosts)), 'host')} (strategy {spec.strategy})",
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
    }
    shown = _FOLDERS.sub("", spec.to_yaml())
    rows = "\n".join(f"| {name} | {value} |" for name, value in facts.items())
    text = (
        f"---\n{yaml.safe_dump(front, sort_keys=False)}---\n\n"
        f"# {spec.run}\n\nTrained with trainyard.\n\n"
        f"| | |\n| --- | --- |\n{rows}\n\n## Run spec\n\n```yaml\n{shown}```\n"
    )
    write_atomic(folder / "README.md", text)


_FOLDERS = re.compile(r"(?<![^\s'\"])/(?:[^\s'\",]*/)?")  # of an absolute path


def _front_matter(spec: RunSpec, model: str, dataset: str) -> dict[str, Any]:
    library = "peft" if spec.lora_r else "transformers"
    front: dict[str, Any] = {"library_name": library, "pipeline_tag": "text-generation", "tags": ["trainyard"]}
    if spec.lora_r:
        front["tags"].append("lora")
    if spec.method != DEFAULT_METHOD:
        front["tags"].append(spec.method)
    if HUB_ID.fullmatch(model):
        front |= {"base_model": model, "base_model_relation": "adapter" if spec.lora_r else "finetune"}
    if HUB_ID.fullmatch(dataset):
        front["datasets"] = [dataset]
    return front


def checksum(digest: str | None) -> str:
    return f" (sha256 {digest})" if digest else ""
