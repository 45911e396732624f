"""Whether packed rows give the loss and the gradient of separate rows, per attention kernel and precision; prints JSON.

    python -m benchmarks.gpu.packing MODEL DEVICE

The reference computes one sample per row, with the same kernel. Differences are relative to the largest gradient.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import sys
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from trainer.method.module_with_loss import ModelWithLoss
from trainer.models.model import isolates_packed_samples

LENGTHS = (61, 130, 17, 48)  # tokens of the samples that share a row


def loss_and_gradient(module: ModelWithLoss, rows: list[list[torch.Tensor]]) -> tuple[float, torch.Tensor]:
    """Return the summed loss of rows of samples, and the gradient of all weights in one float32 vector."""
    module.zero_grad()
    total = 0.0
    for row in rows:
        ids = torch.cat(row)[None]
        positions = torch.cat([torch.arange(len(sample), device=ids.device) for sample in row])[None]
        labels = torch.where(positions == 0, -100, ids)  # the first token of a sample has no predecessor
        loss = module(ids, positions, labels)
        loss.backward()
        total += float(loss.detach())
    return total, torch.cat([p.grad.float().flatten() for p in module.parameters() if p.grad is not None])


def difference(folder: str, device: torch.device, kernel: str, dtype: torch.dtype) -> dict[str, Any]:
    """Compare one packed row with one row per sample."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation=kernel).to(device).eval()
    vocabulary = model.config.vocab_size
    generator = torch.Generator().manual_seed(1)
    samples = [torch.randint(3, vocabulary, (length,), generator=generator).to(device) for length in LENGTHS]
    module = ModelWithLoss(model)
    half = torch.autocast(device.type, dtype) if dtype != torch.float32 else contextlib.nullcontext()
    with half:
        isolated = isolates_packed_samples(model, vocabulary)
        one, packed = loss_and_gradient(module, [samples])
        many, separate = loss_and_gradient(module, [[sample] for sample in samples])
    return {
        "isolated": isolated,
        "loss": abs(one - many) / abs(many),
        "gradient": float((packed - separate).norm() / separate.norm()),
    }


def main(folder: str, device: torch.device) -> None:
    """Compare every kernel that this machine has."""
    cases = {"sdpa, float32": ("sdpa", torch.float32), "sdpa, bfloat16": ("sdpa", torch.bfloat16)}
    missing = ""
    if device.type == "cuda" and importlib.util.find_spec("flash_attn"):
        cases["flash attention, bfloat16"] = ("flash_attention_2", torch.bfloat16)
    else:
        missing = "flash_attn is not installed" if device.type == "cuda" else "flash attention needs CUDA"
    found = {name: difference(folder, device, *case) for name, case in cases.items()}
    print(json.dumps({"packing": found, "missing": missing}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], torch.device(sys.argv[2]))
