"""The trainer against a plain loop over transformers and peft, and against TRL's SFTTrainer: equal losses and weights.

    make bench NAME=agree [ARGS='--small --model DIR']

All sides train on the same samples in the same order, from the same weights and adapter, in 32 bits without dropout, with loss on
the answers of chats of several turns. The trainer runs with gradient accumulation, with packed rows, and on two ranks. The plain
loop never packs. `--model` adds pretrained models to small ones with random weights; `--small` without names leaves these out.
Exits with 1 if two sides differ by more than the bound. Takes 2 minutes, and 8 with a model of 135 M weights.
"""

from __future__ import annotations

import argparse
import contextlib
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
from plain_loop import (
    Work,
    initial_model,
    loss_difference,
    recorded_steps,
    train_plain,
    weight_difference,
    write_chats,
)
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from trainer.__main__ import main as trainer
from trainer.data.samples import read_samples
from trainer.data.tiny import make_tiny

BOUND = 1e-4
STEPS = 20
SEQ_LENGTH = 128  # no chat is truncated: the plain loop does not truncate
# Architectures that differ in what a loss depends on: names of layers, norms of queries and keys, soft-capped logits, positions.
SMALL = ("llama", "qwen3", "gemma2", "gpt2")
# With full weights. Not GPT-2: the gradient of its key biases is zero except for rounding, which AdamW enlarges to whole steps.
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
    if not words.chat_template or "generation %}" not in words.get_chat_template():
        words.chat_template = CHATML
    words.save_pretrained(folder)
    for file in model.resolve().iterdir():
        if not (folder / file.name).exists():
            (folder / file.name).symlink_to(file)
    return folder


def run_dir_of(folder: Path) -> Path:
    """Return the run folder of a case in its folder."""
    return folder / "runs/agree"


def train_here(case: Case, folder: Path) -> tuple[Side, Work]:
    """Train a case with the trainer; return what it trained, and the work with the order that the run recorded.

    Raises:
        SystemExit: the run fails.
    """
    run_dir = folder / "runs/agree"
    run_dir.mkdir(parents=True)
    fields = {"run": "agree", "max_steps": STEPS, "epochs": 100, "eval_split": 0, "checkpoint_interval": 0, "warmup": 0}
    fields |= {"precision": "32-true", "seq_length": SEQ_LENGTH, "total_batch_size": 4, "loggers": "none"}
    (folder / "spec.yml").write_text(json.dumps(case.work.fields() | fields | case.fields))
    command = ["train", str(folder / "spec.yml"), f"--run-dir={run_dir}", f"--data-dir={folder}"]
    if case.ranks > 1:
        torchrun = ["trainer.launch.torchrun", "--standalone", f"--nproc-per-node={case.ranks}"]
        _call([sys.executable, "-m", *torchrun, "-m", "trainer", *command], case.name)
    else:
        # In this process, because imports take longer than the small models.
        with contextlib.redirect_stdout(sys.stderr):
            status = trainer(command)
        if status:
            raise SystemExit(f"{case.name}: the run failed, see above")
        torch.distributed.destroy_process_group()
    losses = [json.loads(line)["loss"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    side = Side(losses, run_dir / ("adapter" if case.work.lora_r else "model"))
    return side, replace(case.work, steps=recorded_steps(run_dir))


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
        gradient_accumulation_steps=len(work.steps[0]) // work.batch_size,
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


def compare(cases: list[Case], folder: Path, trl: str) -> bool:
    """Train every case on all sides and print a row for each pair; return whether all are within the bound."""
    here = [train_here(case, folder / str(number)) for number, case in enumerate(cases)]
    # The steps of two ranks have the samples of those of one: the others train them once.
    works = list(dict.fromkeys(work for _, work in here))
    plain, theirs = ([folder / f"{side}-{number}" for number in range(len(works))] for side in ("plain", "trl"))
    found = {work: Side(train_plain(work, out), out) for work, out in zip(works, plain, strict=True)}
    request = folder / "trl.json"
    request.write_text(json.dumps([(asdict(work), str(out)) for work, out in zip(works, theirs, strict=True)]))
    _call([trl, "-m", "benchmarks.agree", "--serve", str(request)], "TRL")
    answers = zip(works, json.loads(request.read_text()), theirs, strict=True)
    by_trl = {work: Side(losses, out) for work, losses, out in answers}
    print("| case | loss of trainyard, first and last | pair | loss | weights |\n| --- | --- | --- | --- | --- |")
    holds = True
    for case, (ours, work) in zip(cases, here, strict=True):
        sides = {"trainyard": ours, "plain loop": found[work], "TRL": by_trl[work]}
        for (one, first), (two, second) in itertools.combinations(sides.items(), 2):
            differences = loss_difference(first.losses, second.losses), weight_difference(first.weights, second.weights)
            holds = holds and all(value <= BOUND for value in differences)  # false for NaN
            about = f"{case.name} | {ours.losses[0]:.3f}, {ours.losses[-1]:.3f} | {one}, {two}"
            print(f"| {about} | {differences[0]:.1e} | {differences[1]:.1e} |")
    return holds


def serve(request: Path) -> None:
    """Train with TRL what a file lists, and replace the file by the losses."""
    works = [(Work(**work), Path(out)) for work, out in json.loads(request.read_text())]
    request.write_text(json.dumps([train_trl(work, out) for work, out in works]))


def all_cases(models: dict[str, Path], dataset: Path) -> list[Case]:
    """Return the cases of all models."""
    cases = []
    for name, model in models.items():
        # Pretrained models train with the default rate: a larger one makes the rounding of 20 steps grow.
        lora = Work(str(model), str(dataset), lora_r=8, lr=1e-3 if name in SMALL else 2e-4)
        cases += [
            Case(f"{name}, LoRA", lora, {"packing": False}),
            Case(f"{name}, LoRA, packed rows", replace(lora, batch_size=1), {"packing": True, "total_batch_size": 2}),
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
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    a = parser.parse_args()
    if a.serve:
        serve(a.serve)
        return 0
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        dataset = write_chats(folder / "chats.jsonl", 60)
        models = {kind: small_model(kind, folder / kind, dataset) for kind in a.small}
        models |= {model.resolve().name: marked_model(model, folder / f"model-{i}") for i, model in enumerate(a.model)}
        return 0 if compare(all_cases(models, dataset), folder, a.trl) else 1


if __name__ == "__main__":
    sys.exit(main())
