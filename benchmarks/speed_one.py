"""Timed training runs with trainyard's loop or TRL's SFTTrainer; prints a JSON list. The other benchmarks start this program.

    python benchmarks/speed_one.py trainyard|trl '[{"model": DIR, "dataset": JSONL, "steps": 20, "fields": {...}}]'

Tokens are those of the samples without padding, counted in the same way for both. The first two steps do not count: torch warms up.
Memory is the largest resident set of a process. Under torchrun, tokens are those of all ranks, and `wire_bytes` is the number of
bytes that the devices of this network namespace send per step.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")  # before transformers

import torch

from benchmarks.peak import peak_mib
from trainer.data.samples import read_samples
from trainer.distributed.world import World, leave
from trainer.loop.train import train
from trainer.models.model import lora_config
from trainer.planner.agreement import agree, agree_compile
from trainer.planner.decisions import decide_here
from trainer.records.telemetry import Heartbeat
from trainer.spec import make_spec

WARM = 2  # steps


def sent_bytes() -> int:
    """Return the bytes that all devices of this network namespace have sent."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()[2:]
    return sum(int(line.partition(":")[2].split()[8]) for line in lines)


class Clock:
    """Tokens, seconds, CPU seconds and bytes sent between the end of the warm-up (in steps) and `end` steps before the last one."""

    def __init__(self, warm: int = WARM, end: int = 0) -> None:
        self.warm, self.end = warm, end
        self.tokens: list[int] = []
        self.times: list[tuple[float, float, int]] = []

    def step(self, tokens: int) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.tokens.append(tokens)
        self.times.append((time.perf_counter(), time.process_time(), sent_bytes()))

    def result(self) -> dict[str, Any]:
        last = len(self.times) - self.end
        (began, cpu_began, sent_before), (ended, cpu_ended, sent) = self.times[self.warm - 1], self.times[last - 1]
        tokens = sum(self.tokens[self.warm : last])
        cuda = torch.cuda.is_available()
        return {
            "cuda_mib": torch.cuda.max_memory_allocated() / 2**20 if cuda else None,
            "tokens": tokens,
            "seconds": ended - began,
            "tokens_per_second": tokens / (ended - began),
            "tokens_per_cpu_second": tokens / (cpu_ended - cpu_began),
            "wire_bytes": (sent - sent_before) / (last - self.warm),
            "peak_mib": peak_mib(),
        }


def trainyard(a: dict[str, Any], world: World) -> dict[str, Any]:
    """Run the trainer's loop with evaluation and checkpoints only at the end, as TRL's defaults do."""
    clock = Clock(a.get("warm", WARM), a.get("end", 0))

    class Beat(Heartbeat):
        def __call__(self, status: str, *, force: bool = False, **news: Any) -> None:
            super().__call__(status, force=force, **news)
            if status == "training" and news.get("step", 0) > len(clock.times):
                clock.step(0)

    with tempfile.TemporaryDirectory() as work:
        run_dir = Path(work) / "runs" / "speed"
        run_dir.mkdir(parents=True)
        spec = make_spec(
            {
                "run": "speed",
                "model": a["model"],
                "dataset": a["dataset"],
                "max_steps": a["steps"],
                "epochs": 100,
                "eval_split": 0,
                "checkpoint_interval": 0,
            }
            | a.get("fields", {}),
            "the benchmark",
        )
        spec, _, started = decide_here(spec, run_dir)
        with contextlib.redirect_stdout(sys.stderr):  # where a decision is said
            spec = agree(spec, started, world)
        settle = functools.partial(agree_compile, world=world)
        result = train(spec, run_dir, Path(work), world, Beat(run_dir, world.rank), settle)
        # With local steps the records are written at each sync.
        if world.rank == 0:
            clock.tokens = [json.loads(line)["tokens"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    about = {"loss": result["loss_last"], "eval_loss": result["eval_loss"]}
    peaks = world.gather(peak_mib())
    about |= {"precision": spec.precision, "mfu": result["mfu"]}
    return clock.result() | about | {"peak_mib": max(peaks)}


def trl(a: dict[str, Any]) -> dict[str, Any]:
    """Run TRL's SFTTrainer on the same samples; `fields`: fields of SFTConfig; `dtype`: data type of the base weights."""
    import datasets
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    datasets.disable_progress_bars()
    clock, seen = Clock(), [0]
    tokenizer = AutoTokenizer.from_pretrained(a["model"])
    records = [
        {"prompt": list(sample.messages[:-1]), "completion": list(sample.messages[-1:])}
        for sample in read_samples(Path(a["dataset"]))
    ]

    class Steps(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            clock.step(seen[0])
            seen[0] = 0

    class Counted:
        """Wraps the collator of the trainer, and counts tokens without padding."""

        def __init__(self, inner: Any) -> None:
            self.inner = inner

        def __call__(self, rows: Any) -> Any:
            batch = self.inner(rows)
            mask = batch.get("attention_mask")
            seen[0] += int(mask.sum() if mask is not None else batch["input_ids"].numel())
            return batch

    with tempfile.TemporaryDirectory() as work:
        config = {
            "output_dir": work,
            "max_steps": a["steps"],
            "report_to": "none",
            "disable_tqdm": True,
            "save_strategy": "no",
        } | a.get("fields", {})
        model = AutoModelForCausalLM.from_pretrained(a["model"], dtype=getattr(torch, a.get("dtype", "float32")))
        trainer = SFTTrainer(
            model=model,
            args=SFTConfig(**config),
            train_dataset=datasets.Dataset.from_list(records),
            processing_class=tokenizer,
            peft_config=lora_config(make_spec({"model": a["model"]} | a.get("lora", {}), "the benchmark")),
            callbacks=[Steps()],
        )
        trainer.data_collator = Counted(trainer.data_collator)
        trainer.train()
    return clock.result()


def main(side: str, requests: list[dict[str, Any]]) -> None:
    """Run all requests in this process; rank 0 prints the JSON list of results."""
    world = World.join(600) if side == "trainyard" else None
    answers = [trainyard(about, world) if world else trl(about) for about in requests]
    if world is None or world.rank == 0:
        print(json.dumps(answers), flush=True)
    leave(0)


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
