"""The learning rate schedule, and the parameters with weight decay."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from trainer.models.optim import learning_rate, make_optimizer
from trainer.spec import make_spec


def curve(steps: int, **fields: Any) -> list[float]:
    spec = make_spec({"model": "m", "lr": 1.0} | fields, "")
    return [learning_rate(spec, step, steps) for step in range(steps)]


@pytest.mark.parametrize("warmup", [10, 0.1], ids=["steps", "share"])
def test_warmup_then_decay(warmup: float) -> None:
    cosine, linear, flat = (curve(100, warmup=warmup, schedule=name) for name in ("cosine", "linear", "constant"))
    for values in (cosine, linear, flat):
        assert values[:10] == pytest.approx([0.1 * (step + 1) for step in range(10)])
    assert flat[9:] == [1.0] * 91
    assert linear[9:] == pytest.approx([1 - place / 91 for place in range(91)])
    assert cosine[54] == pytest.approx(0.5, abs=0.02), "half of the peak"
    assert 0 < cosine[-1] < linear[-1] < 0.02


@given(
    st.integers(1, 300),
    st.sampled_from(["cosine", "linear", "constant"]),
    st.floats(0, 0.999) | st.integers(0, 400).map(float),
)
def test_the_rate_is_positive_and_never_above_the_peak(steps: int, schedule: str, warmup: float) -> None:
    values = curve(steps, schedule=schedule, warmup=warmup)
    assert all(0 < value <= 1 + 1e-12 for value in values)
    peak = values.index(max(values))
    assert values[:peak] == sorted(values[:peak])
    assert values[peak:] == sorted(values[peak:], reverse=True)


def test_weight_decay_applies_to_trained_matrices() -> None:
    part = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4))
    part[2].requires_grad_(False)
    optimizer = make_optimizer(make_spec({"weight_decay": 0.1}, ""), part.parameters())
    assert [(len(group["params"]), group["weight_decay"]) for group in optimizer.param_groups] == [(1, 0.1), (3, 0.0)]


def test_decay_applies_without_a_gradient() -> None:
    part = nn.Linear(2, 2)
    before = part.weight.detach().clone(), part.bias.detach().clone()
    optimizer = make_optimizer(make_spec({"weight_decay": 0.5, "lr": 0.1}, ""), part.parameters())
    for parameter in part.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    assert torch.allclose(part.weight, before[0] * 0.95)
    assert torch.equal(part.bias, before[1])
