"""The trainer against a plain loop over transformers and peft, and against TRL's SFTTrainer: equal losses and weights.

    make bench NAME=agree [ARGS='--model DIR ...']

All sides train on the same samples in the same order, from the same weights and adapter, in 32 bits without dropout, with loss on
the answers of chats of several turns. The trainer runs with gradient accumulation, with packed rows, and on two ranks. The plain
loop never packs. Three small models have random weights; `--model` adds pretrained ones. Exits with 1 if two sides differ by
more than the bound. Takes about 4 minutes, and 10 more with a model of 135 M weights.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

# Before torch. One thread adds numbers in the same order at every run.
os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1")

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from benchmarks.plain_loop import (
    Work,
    initial_model,
    loss_difference,
    recorded_steps,
    train_plain,
    weight_difference,
    write_chats,
)

BOUND = 1e-4
SEQ_LENGTH = 256
STEPS = 20
ROWS = 4  # per step, in micro-batches of 2
# Architectures that differ in what a loss depends on: names of layers, norms of queries and keys, soft-capped logits, positions.
SMALL = ("llama", "qwen3", "gemma2", "gpt2")
# GPT-2 has biases of keys. Their gradient is zero but for rounding, which AdamW makes as large as that of other weights.
FULL = ("llama", "qwen3", "gemma2")
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
    **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0),  # GPT-2 has dropout by default
}
# For tokenizers whose own template marks no answers: TRL and trainer then have the loss on the same tokens.
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{% else %}{{ m['content'] + '<|im_end|>' }}{% endif %}"
    "{{ '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@dataclass(frozen=True)
class Case:
    """One comparison. `fields`: more fields of the run spec; `ranks`: ranks of the trainer."""

    name: str
    work: Work
    fields: dict[str, Any]
    ranks: int = 1


@dataclass(frozen=True)
class Side:
    """What one side trained: the loss of every step, and the folder of its weights."""

    losses: list[float]
    weights: Path


def small_model(kind: str, folder: Path, dataset: Path) -> Path:
    """Write a model of an architecture with random weights, and the tokenizer of the tiny model."""
    from trainer.data.samples import read_samples
    from trainer.data.tiny import make_tiny

    make_tiny(read_samples(dataset), folder, 1)
    (folder / "model.safetensors").unlink()
    words = AutoTokenizer.from_pretrained(folder)
    ids = {"bos_token_id": words.bos_token_id, "eos_token_id": words.eos_token_id, "pad_token_id": words.pad_token_id}
    default = AutoConfig.for_model(kind)
    config = AutoConfig.for_model(
        kind, **{name: value for name, value in SIZES.items() if hasattr(default, name)}, **ids, vocab_size=len(words)
    )
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def marked_model(model: Path, folder: Path) -> Path:
    """Return a folder of links to a model, with a template that marks the answers."""
    words = AutoTokenizer.from_pretrained(model)
    if "generation %}" not in words.get_chat_template():
        words.chat_template = CHATML
    words.save_pretrained(folder)
    for file in model.resolve().iterdir():
        if not (folder / file.name).exists():
            (folder / file.name).symlink_to(file)
    return folder


def spec_file(case: Case, folder: Path) -> Path:
    """Write the run spec of a case; return its file."""
    fields = {"run": "agree", "max_steps": STEPS, "epochs": 100, "eval_split": 0, "checkpoint_interval": 0, "warmup": 0}
    fields |= {"precision": "32-true", "seq_length": SEQ_LENGTH, "total_batch_size": ROWS, "loggers": "none"}
    run_dir_of(folder).mkdir(parents=True)
    file = folder / "spec.yml"
    file.write_text(json.dumps(case.work.fields() | fields | case.fields))
    return file


def run_dir_of(folder: Path) -> Path:
    """Return the run folder of a case in its folder."""
    return folder / "runs/agree"


def train_here(cases: list[Case], folder: Path) -> list[Side]:
    """Train the cases with the trainer, all with one rank in one process; return what it trained.

    Raises:
        SystemExit: a run fails.
    """
    folders = [folder / str(number) for number in range(len(cases))]
    files = [spec_file(case, each) for case, each in zip(cases, folders, strict=True)]
    one_rank = [str(file) for file, case in zip(files, cases, strict=True) if case.ranks == 1]
    _call([sys.executable, "-m", "benchmarks.agree", "--side", "trainyard", *one_rank], "trainyard")
    for file, case in zip(files, cases, strict=True):
        if case.ranks > 1:
            torchrun = ["trainer.distributed.torchrun", "--standalone", f"--nproc-per-node={case.ranks}"]
            where = [f"--run-dir={run_dir_of(file.parent)}", f"--data-dir={file.parent}"]
            _call([sys.executable, "-m", *torchrun, "-m", "trainer", "train", str(file), *where], case.name)
    return [_trained(run_dir_of(each), case) for each, case in zip(folders, cases, strict=True)]


def _trained(run_dir: Path, case: Case) -> Side:
    losses = [json.loads(line)["loss"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return Side(losses, run_dir / ("adapter" if case.work.lora_r else "model"))


def train_specs(files: list[str]) -> None:
    """Run the trainer on spec files. Raises SystemExit if a run fails."""
    from trainer.__main__ import main as trainer

    for file in files:
        if status := trainer(["train", file, f"--data-dir={Path(file).parent}"]):
            raise SystemExit(status)
        torch.distributed.destroy_process_group()


def train_trl(work: Work, out: Path) -> list[float]:
    """Train with TRL's SFTTrainer, write the weights into `out`, and return the loss of every step.

    TRL renders, encodes and masks the chats, which it gets in the recorded order. Its own packing would choose other rows, so the
    samples of a packed row are joined afterwards, in the form of its packing.
    """
    import datasets
    from trl import SFTConfig, SFTTrainer

    datasets.disable_progress_bars()
    rows = [row for step in work.steps for row in step]
    packed = any(len(row) > 1 for row in rows)
    config = SFTConfig(
        output_dir=str(out.with_suffix(".trl")),
        max_steps=len(work.steps),
        per_device_train_batch_size=work.batch_size,
        gradient_accumulation_steps=ROWS // work.batch_size,
        learning_rate=work.lr,
        lr_scheduler_type="cosine",
        weight_decay=work.weight_decay,
        max_grad_norm=work.max_grad_norm,
        seed=work.seed,
        assistant_only_loss=True,
        max_length=None,
        padding_free=packed,
        train_sampling_strategy="sequential",
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    chats = work.chats
    records = datasets.Dataset.from_list([{"messages": chats[index]} for row in rows for index in row])
    words = AutoTokenizer.from_pretrained(work.model)
    trainer = SFTTrainer(model=initial_model(work), args=config, train_dataset=records, processing_class=words)
    if packed:
        samples = iter(trainer.train_dataset)
        trainer.train_dataset = datasets.Dataset.from_list([_joined([next(samples) for _ in row]) for row in rows])
    trainer.train()
    trainer.model.save_pretrained(out)
    return [record["loss"] for record in trainer.state.log_history if "loss" in record]


def _joined(samples: list[dict[str, Any]]) -> dict[str, Any]:
    joined = {name: [value for sample in samples for value in sample[name]] for name in ("input_ids", "labels")}
    return joined | {"seq_lengths": [len(sample["input_ids"]) for sample in samples]}


def _call(command: list[str], name: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{name}:\n{(done.stdout + done.stderr)[-3000:]}")


def train_others(works: list[Work], folder: Path, side: str, python: str) -> dict[Work, Side]:
    """Train the works with the plain loop or TRL in a process of `python`; return what it trained."""
    request, outs = folder / f"{side}.json", [folder / f"{side}-{number}" for number in range(len(works))]
    request.write_text(json.dumps([(asdict(work), str(out)) for work, out in zip(works, outs, strict=True)]))
    _call([python, "-m", "benchmarks.agree", "--side", side, str(request)], side)
    losses = json.loads(request.read_text())
    return {work: Side(each, out) for work, each, out in zip(works, losses, outs, strict=True)}


def serve(side: str, files: list[str]) -> None:
    """Train what the files describe, in this process; replace those of the plain loop and of TRL by the losses."""
    if side == "trainyard":
        train_specs(files)
        return
    train = {"plain": train_plain, "trl": train_trl}[side]
    request = Path(files[0])
    losses = [train(Work(**about), Path(out)) for about, out in json.loads(request.read_text())]
    request.write_text(json.dumps(losses))


def compare(cases: list[Case], folder: Path, trl: str) -> bool:
    """Train every case on all sides and print a row for each pair; return whether all are within the bound."""
    here = train_here(cases, folder)
    works = [
        replace(case.work, steps=recorded_steps(run_dir_of(folder / str(number)))) for number, case in enumerate(cases)
    ]
    # Two ranks have the same order as one: the others train it once.
    distinct = list(dict.fromkeys(works))
    plain = train_others(distinct, folder, "plain", sys.executable)
    theirs = train_others(distinct, folder, "trl", trl)
    print("| case | loss of trainyard, first and last | pair | loss | weights |\n| --- | --- | --- | --- | --- |")
    holds = True
    for case, ours, work in zip(cases, here, works, strict=True):
        about = f"{case.name} | {ours.losses[0]:.3f}, {ours.losses[-1]:.3f}"
        sides = {"trainyard": ours, "plain loop": plain[work], "TRL": theirs[work]}
        for (one, first), (two, second) in itertools.combinations(sides.items(), 2):
            found = loss_difference(first.losses, second.losses), weight_difference(first.weights, second.weights)
            holds = holds and all(value <= BOUND for value in found)  # NaN is not
            print(f"| {about} | {one}, {two} | {found[0]:.1e} | {found[1]:.1e} |")
    return holds


def all_cases(models: dict[str, Path], dataset: Path, lr: float) -> list[Case]:
    """Return the cases of all models."""
    cases = []
    for name, model in models.items():
        lora = Work(str(model), str(dataset), lora_r=8, lr=lr)
        cases += [
            Case(f"{name}, LoRA", lora, {"packing": False}),
            Case(f"{name}, LoRA, packed rows", lora, {"packing": True}),
            Case(f"{name}, LoRA, two ranks", lora, {"packing": False, "strategy": "ddp"}, ranks=2),
        ]
        if name in FULL:
            cases.append(Case(f"{name}, full weights", replace(lora, lora_r=0), {"packing": False}))
    return cases


def main() -> int:
    """Print the table; return 1 if two sides differ by more than the bound."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl", default=sys.executable, help="Python interpreter of an environment with TRL")
    parser.add_argument("--model", action="append", default=[], type=Path, help="folder of a pretrained model")
    parser.add_argument("--small", nargs="*", default=SMALL, help="architectures with random weights")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--side", choices=["trainyard", "plain", "trl"], help=argparse.SUPPRESS)
    parser.add_argument("files", nargs="*", help=argparse.SUPPRESS)
    a = parser.parse_args()
    if a.side:
        serve(a.side, a.files)
        return 0
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        dataset = write_chats(folder / "chats.jsonl", 60)
        models = {kind: small_model(kind, folder / kind, dataset) for kind in a.small}
        models |= {model.resolve().name: marked_model(model, folder / f"model-{i}") for i, model in enumerate(a.model)}
        return 0 if compare(all_cases(models, dataset, a.lr), folder, a.trl) else 1


if __name__ == "__main__":
    sys.exit(main())
