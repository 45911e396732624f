"""One rank of benchmarks/schedules.py: measure steps of a pipeline under several schedules. `linked_hosts.run_script` starts it with torchrun.

The argument is a JSON object: model (folder), seq, micro (micro-batches per step), batch (rows of a micro-batch), lora_r, schedules,
steps. The last line that rank 0 prints is a JSON object: seconds per step, loss and norm of the gradient by schedule. A process without
torchrun measures the same computation on one host, under the name "one host".
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from peft import LoraConfig, inject_adapter_in_model
from torch import nn
from torch.distributed.pipelining import PipelineStage, schedules
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from trainer.distributed.pipeline_schedule import Neighbours

OWN = "trainyard"
V_SHAPED = ("ScheduleZBVZeroBubble",)  # rank r of n holds chunks r and 2n - 1 - r, not r and n + r
STEPS_BEFORE = 2


class Chunk(nn.Module):
    """Consecutive decoder layers of a Llama model; the first chunk also has the embedding, the last the norm and the head."""

    def __init__(self, model: Any, number: int, count: int) -> None:
        super().__init__()
        decoder, size = model.model, len(model.model.layers) // count
        self.layers = decoder.layers[number * size : (number + 1) * size]
        self.rotary = decoder.rotary_emb
        self.embedding = decoder.embed_tokens if number == 0 else nn.Identity()
        self.head = nn.Sequential(decoder.norm, model.lm_head) if number == count - 1 else nn.Identity()

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(value)
        positions = torch.arange(hidden.shape[1])[None]
        angles = self.rotary(hidden, positions)
        for layer in self.layers:
            hidden = layer(hidden, position_embeddings=angles, position_ids=positions)
        result: torch.Tensor = self.head(hidden)
        return result


def loss_of(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def load(ask: dict[str, Any]) -> Any:
    torch.manual_seed(1)
    model: Any = AutoModelForCausalLM.from_pretrained(ask["model"], dtype=torch.float32)
    # The input embedding apart from the head, as their ranks hold it.
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    if ask["lora_r"]:
        model = inject_adapter_in_model(
            LoraConfig(r=ask["lora_r"], target_modules="all-linear", init_lora_weights=False), model
        )
    return model.train()


def chunks_of(rank: int, ranks: int, each: int, *, v_shaped: bool) -> list[int]:
    """Return the numbers of the chunks of a rank with `each` chunks."""
    if each == 1:
        return [rank]
    return [rank, 2 * ranks - 1 - rank] if v_shaped else [rank + ranks * turn for turn in range(each)]


def own_step(chunk: Chunk, rank: int, ranks: int, micro: int, ask: dict[str, Any]) -> Callable[..., list[torch.Tensor]]:
    """Return a step under trainyard's schedule."""
    world = SimpleNamespace(rank=rank, size=ranks, device=torch.device("cpu"))
    pipelines: Any = SimpleNamespace(stages=world, own=lambda timeout: SimpleNamespace(group=dist.new_group()))
    neighbours = Neighbours(pipelines, torch.float32, torch.float32, 600.0)
    hidden = chunk.layers[0].hidden_size

    def step(ids: torch.Tensor, targets: torch.Tensor) -> list[torch.Tensor]:
        kept: dict[int, tuple[torch.Tensor | None, torch.Tensor]] = {}
        losses: list[torch.Tensor] = []
        rows, answers = ids.chunk(micro), targets.chunk(micro)

        def forward(number: int, received: torch.Tensor | None) -> torch.Tensor:
            output = chunk(rows[number] if received is None else received.requires_grad_())
            if rank == ranks - 1:
                output = loss_of(output, answers[number])
                losses.append(output.detach())
                output = output / micro
            kept[number] = (received, output)
            return output

        def backward(number: int, gradient: torch.Tensor | None) -> torch.Tensor | None:
            received, output = kept.pop(number)
            torch.autograd.backward(output, gradient)
            return None if received is None else received.grad

        neighbours.run([(ask["batch"], ask["seq"], hidden)] * micro, forward, backward)
        return losses

    return step


def torch_step(
    chunks: list[Chunk], numbers: list[int], count: int, micro: int, name: str
) -> Callable[..., list[torch.Tensor]]:
    """Return a step under a schedule of torch.distributed.pipelining."""
    kind: Any = getattr(schedules, name)
    stages = [
        PipelineStage(chunk, number, count, torch.device("cpu")) for chunk, number in zip(chunks, numbers, strict=True)
    ]
    schedule = kind(stages if issubclass(kind, schedules.PipelineScheduleMulti) else stages[0], micro, loss_fn=loss_of)

    def step(ids: torch.Tensor, targets: torch.Tensor) -> list[torch.Tensor]:
        losses: list[torch.Tensor] = []
        given = {"target": targets, "losses": losses} if count - 1 in numbers else {}
        schedule.step(*([ids] if 0 in numbers else []), **given)
        return losses

    return step


def measure(name: str, ask: dict[str, Any], rank: int, ranks: int) -> dict[str, float]:
    """Run steps under one schedule. Returns seconds per step (median), the mean loss and the norm of the gradient of all ranks."""
    micro, kind = ask["micro"], getattr(schedules, name, None)
    each = 2 if kind and issubclass(kind, schedules.PipelineScheduleMulti) else 1
    model, count = load(ask), each * ranks
    numbers = chunks_of(rank, ranks, each, v_shaped=name in V_SHAPED)
    chunks = [Chunk(model, number, count) for number in numbers]
    del model
    gc.collect()
    make = torch.Generator().manual_seed(2)
    shape = (micro * ask["batch"], ask["seq"] + 1)
    rows = torch.randint(0, 256, shape, generator=make)
    ids, targets = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
    if name == OWN:
        step = own_step(chunks[0], rank, ranks, micro, ask)
    elif ranks == 1:
        step = one_step(chunks[0], micro)
    else:
        step = torch_step(chunks, numbers, count, micro, name)
    trained = [p for chunk in chunks for p in chunk.parameters() if p.requires_grad]
    seconds: list[float] = []
    losses: list[torch.Tensor] = []
    for number in range(STEPS_BEFORE + ask["steps"]):
        for parameter in trained:
            parameter.grad = None
        if ranks > 1:
            dist.barrier()
        start = time.monotonic()
        losses = step(ids, targets)
        if ranks > 1:
            dist.barrier()
        if number >= STEPS_BEFORE:
            seconds.append(time.monotonic() - start)
    found = torch.zeros(2, dtype=torch.float64)
    found[0] = sum(float(loss.detach()) for loss in losses) / micro
    found[1] = sum(float(p.grad.double().square().sum()) for p in trained if p.grad is not None)
    if ranks > 1:
        dist.all_reduce(found)
    return {"seconds": statistics.median(seconds), "loss": float(found[0]), "norm": float(found[1].sqrt())}


def one_step(chunk: Chunk, micro: int) -> Callable[..., list[torch.Tensor]]:
    """Return a step of one process that holds the whole model."""

    def step(ids: torch.Tensor, targets: torch.Tensor) -> list[torch.Tensor]:
        losses = []
        for rows, answers in zip(ids.chunk(micro), targets.chunk(micro), strict=True):
            loss = loss_of(chunk(rows), answers)
            (loss / micro).backward()
            losses.append(loss.detach())
        return losses

    return step


def main() -> None:
    """Measure all schedules, and print the results on rank 0."""
    ask = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if ranks > 1:
        dist.init_process_group("gloo")
    answers = {name: measure(name, ask, rank, ranks) for name in (ask["schedules"] if ranks > 1 else ["one host"])}
    if rank == 0:
        print(json.dumps(answers))
    if ranks > 1:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
