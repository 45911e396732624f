"""Pseudo-gradients in 4 bits: the packed form, and the feedback of what rounding lost."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer.common.errors import UserError
from trainer.costs.cost import Layout
from trainer.model_files.model_shape import shape_of
from trainer.spec import make_spec
from trainer.strategy import plan_of
from trainer.strategy.four_bits import (
    BLOCK,
    BYTES_PER_VALUE,
    pack,
    pack_with_feedback,
    read_residual,
    unpack,
    write_residual,
)

SEEDS, SIZES = st.integers(0, 2**31), st.sampled_from([1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK + 7])


def random_values(seed: int, count: int, exponent: int = 0) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed)) * 10.0**exponent


@given(SEEDS, SIZES, st.integers(-44, 30))
def test_the_error_is_at_most_half_a_step(seed: int, count: int, exponent: int) -> None:
    values = random_values(seed, count, exponent)
    packed = pack(values)
    assert packed.dtype == torch.uint8 and len(packed) == -(-count // BLOCK) * BLOCK * BYTES_PER_VALUE
    found = unpack(packed, count)
    for begin in range(0, count, BLOCK):
        block = values[begin : begin + BLOCK]
        largest = float(block.abs().max())
        # Half a step, and the rounding of the scale. Numbers below the smallest normal one have fewer digits.
        assert float((found[begin : begin + BLOCK] - block).abs().max()) <= largest / 7 * 0.54 + 1e-38


def test_zeros_and_multiples_of_the_scale_are_exact() -> None:
    values = torch.arange(-7.0, 8.0).repeat(40)
    assert torch.equal(unpack(pack(values), len(values)), values)
    assert not unpack(pack(torch.zeros(300)), 300).any()


@given(SEEDS, SIZES)
def test_feedback_loses_nothing(seed: int, count: int) -> None:
    """The sum of what was sent and the residual is the sum of all values, which plain rounding does not reach."""
    residual, sent, wanted = torch.zeros(count), torch.zeros(count), torch.zeros(count)
    for turn in range(20):
        values = random_values(seed + turn, count)
        sent += unpack(pack_with_feedback(values, residual), count)
        wanted += values
    torch.testing.assert_close(sent + residual, wanted, rtol=0, atol=1e-4)
    assert float(residual.abs().max()) <= 1.0


def test_a_residual_belongs_to_its_replica(tmp_path: Path) -> None:
    kept, found = random_values(1, 300), torch.ones(300)
    write_residual(tmp_path, kept, 1, 2)
    read_residual(tmp_path, found, 1, 2)
    assert torch.equal(found, kept)
    for replica, replicas in ((0, 2), (1, 3)):
        read_residual(tmp_path, found, replica, replicas)
        assert not found.any()


def test_planned_bytes_are_at_most_0_0133_of_ddp() -> None:
    spec = make_spec({"model": "tiny", "strategy": "diloco", "local_steps": 10, "diloco_comm_dtype": "int4"}, "here")
    shape, layout = shape_of(spec), Layout((1, 1))
    every_step = spec.model_copy(update={"strategy": "ddp"})
    sent = plan_of(spec).comm_bytes(spec, shape, layout, gloo=True)
    assert 0.0125 <= sent / plan_of(every_step).comm_bytes(every_step, shape, layout, gloo=True) <= 0.0133


def test_four_bits_require_fixed_replicas() -> None:
    fields = {"strategy": "diloco", "diloco_membership": "torchft", "diloco_comm_dtype": "int4"}
    with pytest.raises(UserError, match="int4 requires diloco_membership fixed, got torchft: set"):
        make_spec(fields, "here")
