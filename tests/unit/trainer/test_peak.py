"""MFU: the operations of a step against the profiler, and what a run writes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from trainer_runs import Here, lines
from transformers import AutoConfig, AutoModelForCausalLM

from trainer.method.module_with_loss import ModelWithLoss
from trainer.model_files.model_shape import read_shape
from trainer.models.model import add_lora
from trainer.models.peak import Utilisation, peak_flops
from trainer.spec import make_spec

CPU = torch.device("cpu")
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.mark.parametrize("lora", [0, 8])
def test_operations_are_those_that_torch_counts(lora: int) -> None:
    torch.manual_seed(1)
    config = AutoConfig.for_model("llama", vocab_size=300, **SIZES)
    spec = make_spec({"model": "x", "lora_r": lora}, "here")
    # FlopCounterMode does not know the attention of CPUs: here it is a product of matrices.
    model: Any = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    module = ModelWithLoss(add_lora(spec, model) if lora else model)
    ids = torch.randint(0, 300, (2, 48))
    labels = ids.clone()
    labels[:, :24] = -100
    with FlopCounterMode(display=False) as counter:
        module(ids, torch.arange(48).repeat(2, 1), labels).backward()
    used = Utilisation(spec, read_shape(config.to_diff_dict()), 1.0).seconds(96, 48, 2)
    assert used == pytest.approx(counter.get_total_flops(), rel=0.1)


def test_the_peak_is_that_of_a_product_of_matrices() -> None:
    assert 1e8 < peak_flops("32-true", CPU) < 1e14


def test_a_run_records_its_share_of_the_peak(here: Here) -> None:
    assert here(max_steps=3) == 0, here.err
    records = lines(here.run_dir() / "metrics.jsonl")
    assert all(len(record["mfu"]) == 1 and 0 < record["mfu"][0] < 1.5 for record in records)
    result = here.result()
    shares = [record["mfu"][0] for record in records]
    assert min(shares) <= result["mfu"] <= max(shares)
    assert min(shares[1:]) - 1e-4 <= result["mfu_ranks"][0] <= max(shares[1:]) + 1e-4, "without the first step"
    assert f"({result['mfu']:.0%} of the device's peak)" in here.out
