"""Models with a few thousand random weights, their batches, and the comparison of losses and gradients."""

from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from trainer.data.corpus import Corpus
from trainer.data.packing import collate
from trainer.method.module_with_loss import ModelWithLoss
from trainer.strategy import Batch

SMALL = {"vocab_size": 256, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
MODELS: dict[str, dict[str, Any]] = {
    "llama": SMALL | {"intermediate_size": 64, "num_key_value_heads": 2},
    "qwen2": SMALL | {"intermediate_size": 64, "num_key_value_heads": 2},
    "gpt2": {"vocab_size": 256, "n_embd": 32, "n_layer": 2, "n_head": 4},
}


def small_model(kind: str, attention: str = "sdpa", spread: float = 0.02) -> Any:
    torch.manual_seed(3)
    config = AutoConfig.for_model(kind, **MODELS[kind], initializer_range=spread)
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()


def batch(corpus: Corpus, rows: list[list[int]], length: int | None = None) -> Batch:
    return Batch(*map(torch.from_numpy, collate(corpus, rows, pad=2, length=length)))


def loss_and_gradient(model: nn.Module, batches: list[Batch]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    module = ModelWithLoss(model)
    module.zero_grad()
    loss = torch.stack([module(*part) for part in batches]).sum()
    loss.backward()
    return loss.detach(), [p.grad.clone() for p in module.parameters() if p.grad is not None]


def assert_equal_work(
    one: tuple[torch.Tensor, list[torch.Tensor]], two: tuple[torch.Tensor, list[torch.Tensor]]
) -> None:
    assert len(one[1]) == len(two[1]) > 0
    torch.testing.assert_close(one[0], two[0], rtol=1e-6, atol=0)
    for mine, other in zip(one[1], two[1], strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=2e-5 * float(other.abs().max()))
