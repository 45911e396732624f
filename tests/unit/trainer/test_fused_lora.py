"""Adapters in fewer passes: the results and the gradients are those of peft's layer."""

import copy
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import Linear
from torch import nn

from trainer.models.fused_lora import fuse_adapters


class Pair(nn.Module):
    """Two layers, one with a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(12, 20), nn.Linear(20, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.nn.functional.silu(self.first(x)))


def adapted(dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    """Return a model with adapters that are not zero."""
    torch.manual_seed(2)
    config = LoraConfig(r=4, lora_alpha=10, target_modules=["first", "second"], **options)  # a scale of 2.5
    model: Any = get_peft_model(Pair().to(dtype), config)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data.normal_(0, 0.3)
    return model


def run(model: Any, *, half: bool = False) -> list[torch.Tensor]:
    """Return the output, and the gradients of the input and of the adapters."""
    torch.manual_seed(3)
    x = torch.randn(2, 5, 12, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=half):
        out = model(x.to(torch.bfloat16) if half else x)
    out.float().square().sum().backward()
    assert x.grad is not None
    return [out.detach().float(), x.grad, *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def test_the_results_are_those_of_peft() -> None:
    plain = adapted()
    fused = copy.deepcopy(plain)
    fuse_adapters(fused)
    kinds = [type(module).__name__ for module in fused.modules() if isinstance(module, Linear)]
    assert kinds == ["FusedLinear", "FusedLinear"]
    expected = run(plain)
    assert len(expected) == 2 + 4
    for one, other in zip(run(fused), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("half", [False, True])
def test_the_results_on_weights_in_4_bits_are_those_of_peft(half: bool) -> None:
    bnb = pytest.importorskip("bitsandbytes")
    torch.manual_seed(2)
    dtype = torch.bfloat16 if half else torch.float32
    layer = bnb.nn.Linear4bit(128, 64, bias=True, compute_dtype=dtype, quant_type="nf4")
    layer.load_state_dict({"weight": torch.randn(64, 128) * 0.1, "bias": torch.randn(64)})
    config = LoraConfig(r=4, lora_alpha=10, target_modules=["0"])
    model: Any = nn.Sequential(layer.to("cpu").to(dtype))
    model.is_loaded_in_4bit = True  # as transformers says of a model
    plain: Any = get_peft_model(model, config)
    plain.base_model.model[0].lora_B["default"].weight.data.normal_(0, 0.3)
    fused = copy.deepcopy(plain)
    fuse_adapters(fused)
    assert type(fused.base_model.model[0]).__name__ == "FusedLinear4bit"
    found = []
    for each in (fused, plain):
        torch.manual_seed(3)
        x = torch.randn(2, 5, 128, dtype=dtype, requires_grad=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            out = each(x)
        assert out.dtype == dtype
        out.float().square().sum().backward()
        trained = [parameter.grad for parameter in each.parameters() if parameter.requires_grad]
        found.append([out.detach(), x.grad, *trained])
    assert len(found[0]) == 4
    for one, other in zip(*found, strict=True):
        assert (one - other).float().norm() < (1e-2 if half else 1e-6) * other.float().norm()


def test_in_bfloat16_fewer_roundings_are_closer_to_float32() -> None:
    plain = adapted(torch.bfloat16)
    fused, exact = copy.deepcopy(plain), copy.deepcopy(plain).float()
    fuse_adapters(fused)
    wanted = run(exact)
    distances = [
        [float((one - other).norm()) for one, other in zip(run(each, half=True), wanted, strict=True)]
        for each in (fused, plain)
    ]
    assert all(found < 2e-2 * float(other.norm()) for found, other in zip(distances[0], wanted, strict=True))
    torch.manual_seed(4)
    x = torch.randn(200, 12).to(torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        mine, theirs = (each(x).float() for each in (fused, plain))
    reference = exact(x.float())
    assert (mine - reference).norm() < 0.95 * (theirs - reference).norm()


@pytest.mark.parametrize("case", ["disabled", "two", "dropout", "bias", "dora", "merged", "other dtype"])
def test_what_is_not_a_plain_adapter_is_left_to_peft(case: str) -> None:
    options = {"dropout": {"lora_dropout": 0.5}, "bias": {"lora_bias": True}, "dora": {"use_dora": True}}.get(case, {})
    plain = adapted(torch.bfloat16 if case == "other dtype" else torch.float32, **options)
    if case == "two":
        plain.add_adapter("more", LoraConfig(r=2, target_modules=["first"]))
        plain.base_model.set_adapter(["default", "more"])
    if case == "merged":
        plain.merge_adapter()
    if case == "disabled":
        plain.base_model.disable_adapter_layers()
    fused = copy.deepcopy(plain)
    fuse_adapters(fused)
    torch.manual_seed(4)
    x = torch.randn(3, 12)
    if case == "other dtype":
        x = x.to(torch.bfloat16)
    found = []
    for model in (fused, plain):
        torch.manual_seed(5)
        found.append(model(x))
    assert torch.equal(*found)
