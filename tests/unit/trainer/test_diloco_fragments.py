"""DiLoCo with fragments: their division, the outer steps compared with the formula, errors, and the plan."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer.common.errors import NonFiniteError, UserError
from trainer.config import RunSpec
from trainer.costs.cost import Layout, RowStats
from trainer.distributed.world import World
from trainer.method.module_with_loss import ModelWithLoss
from trainer.model_files.model_shape import shape_of
from trainer.models.model import load_model
from trainer.spec import make_spec
from trainer.strategy import make_strategy, plan_of
from trainer.strategy.diloco_fragments import DiLoCoFragments, divide

FIELDS = {"strategy": "diloco", "local_steps": 6, "diloco_fragments": 3, "diloco_delay": 2, "diloco_comm_dtype": "32"}


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=60), st.integers(1, 12))
def test_fragments_are_consecutive_and_of_about_the_same_size(sizes: list[int], count: int) -> None:
    groups = divide(sizes, count)
    assert [index for group in groups for index in group] == list(range(len(sizes)))
    assert len(groups) <= count and all(groups)
    for group in groups:
        assert sum(sizes[index] for index in group) <= sum(sizes) / count + max(sizes)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"diloco_membership": "torchft"}, "diloco_fragments: 3 requires diloco_membership fixed, got torchft: set"),
        ({"replica_strategy": "fsdp"}, "diloco_fragments: 3 requires replica_strategy ddp, got fsdp: set"),
        ({"diloco_delay": 3}, "3 fragments in 6 local_steps allow 2 steps at most, got 3: set fewer"),
    ],
)
def test_errors(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        make_spec(FIELDS | fields, "here")


def test_a_run_without_fragments_keeps_its_name() -> None:
    assert (
        make_spec({"strategy": "diloco"}, "").digest()
        == make_spec({"strategy": "diloco", "diloco_delay": 1}, "").digest()
    )
    assert make_spec(FIELDS, "").digest() != make_spec(FIELDS | {"diloco_fragments": 2}, "").digest()


def test_the_delay_hides_communication() -> None:
    spec = make_spec(FIELDS | {"model": "tiny", "local_steps": 10, "diloco_fragments": 5, "diloco_delay": 2}, "here")
    shape, layout, rows = shape_of(spec), Layout((1, 1)), RowStats(1, 64, 32)

    def exposed(communication: float, **fields: Any) -> float:
        changed = spec.model_copy(update=fields)
        return plan_of(changed).step_seconds(changed, shape, layout, rows, 1.0, 0.0, communication)[1]

    compute = plan_of(spec).step_seconds(spec, shape, layout, rows, 1.0, 0.0, 0.0)[0]
    assert exposed(0.9 * compute) == 0.0, "two steps hide a fragment of two steps' communication"
    assert exposed(1.5 * compute) == pytest.approx(0.5 * compute)
    assert exposed(0.9 * compute, diloco_delay=1) == pytest.approx(0.4 * compute)
    assert exposed(0.9 * compute, diloco_fragments=1) == pytest.approx(0.9 * compute)


@pytest.fixture
def make(model_folder: Path) -> Iterator[Any]:
    """Return a function that makes the strategy of a run of 20 steps in this process."""

    def started(**fields: Any) -> DiLoCoFragments:
        if not torch.distributed.is_initialized():
            worlds.append(World.join(60))
        spec: RunSpec = make_spec(
            FIELDS | {"model": str(model_folder), "lora_r": 4, "seq_length": 64, "schedule": "constant"} | fields, ""
        )
        torch.manual_seed(1)
        strategy = make_strategy(spec, worlds[0], ModelWithLoss(load_model(spec, torch.device("cpu"))))
        assert isinstance(strategy, DiLoCoFragments)
        strategy.weigh = len
        strategy.join("", 20, Path(), dict, lambda: False)
        return strategy

    worlds: list[World] = []
    yield started
    torch.distributed.destroy_process_group()


def train(strategy: DiLoCoFragments, step: int) -> None:
    """Run step number `step` (from 0) with a change of the weights that depends on it, in place of an inner step."""
    strategy.updates(step, [[0]])
    for place, value in enumerate(strategy.inside.full_params().values()):
        value += torch.randn(value.shape, generator=torch.Generator().manual_seed(97 * step + place)) * 1e-2
    if strategy.is_sync_step(step + 1) or step == 19:
        strategy.sync(lambda: False, [])


def reference(values: list[torch.Tensor], fragment: list[int], mixing: float, momentum: float) -> list[torch.Tensor]:
    """Return the weights after 20 steps by the formula of the paper. `fragment`: that of each tensor."""
    outer, local = [v.clone() for v in values], [v.clone() for v in values]
    velocity = [torch.zeros_like(v) for v in values]
    sent: dict[int, dict[int, torch.Tensor]] = {}  # the step at which a fragment is applied -> its pseudo-gradients

    def apply(gradients: dict[int, torch.Tensor], mixing: float) -> None:
        for place, gradient in gradients.items():
            velocity[place] = momentum * velocity[place] + gradient
            outer[place] = outer[place] - 0.7 * (gradient + momentum * velocity[place])
            local[place] = mixing * local[place] + (1 - mixing) * outer[place]

    for step in range(20):
        if step in sent:
            apply(sent.pop(step), mixing)
        for number in range(3):
            # The rounds have 6 steps, and the last one begins at step 18.
            if step % 6 == 2 * number and 0 < step < 18:
                sent[step + 2] = {p: outer[p] - local[p] for p, mine in enumerate(fragment) if mine == number}
        for place, value in enumerate(local):
            value += torch.randn(value.shape, generator=torch.Generator().manual_seed(97 * step + place)) * 1e-2
    assert not sent
    apply({place: outer[place] - local[place] for place in range(len(local))}, 0.0)
    return local


@pytest.mark.parametrize("mixing", [0.0, 0.5])
def test_outer_steps_follow_the_formula(make: Any, mixing: float) -> None:
    strategy = make(diloco_mixing=mixing, warmup=0)
    initial = [value.clone() for value in strategy.inside.full_params().values()]
    fragment = [number for number, names in enumerate(strategy.fragments) for _ in names]
    assert set(fragment) == {0, 1, 2}
    for step in range(20):
        train(strategy, step)
    wanted = reference(initial, fragment, mixing, 0.9 * 6 / 20)
    for found, outer, value in zip(
        strategy.inside.full_params().values(), strategy.outer.values(), wanted, strict=True
    ):
        torch.testing.assert_close(found, value, rtol=0, atol=1e-6)
        assert torch.equal(found, outer), "the end of a run has the outer weights"


def test_evaluation_uses_the_outer_weights(make: Any) -> None:
    strategy = make()
    for step in range(12):
        train(strategy, step)
    before = [value.clone() for value in strategy.inside.full_params().values()]
    assert not all(map(torch.equal, before, strategy.outer.values()))
    with strategy.synchronized():
        assert all(map(torch.equal, strategy.inside.full_params().values(), strategy.outer.values()))
    assert all(map(torch.equal, strategy.inside.full_params().values(), before))


@pytest.mark.parametrize("dtype", ["32", "bf16", "int4"])
@pytest.mark.parametrize("value", ["nan", "inf"])
def test_weights_that_are_not_finite_end_the_run(make: Any, dtype: str, value: str) -> None:
    strategy = make(diloco_comm_dtype=dtype)
    for step in range(8):
        train(strategy, step)
    with torch.no_grad():
        strategy.inside.trained[strategy.fragments[1][0]].view(-1)[0] = float(value)
    train(strategy, 8)  # sends fragment 1
    train(strategy, 9)
    with pytest.raises(NonFiniteError, match="weights are not finite"):
        train(strategy, 10)


@pytest.mark.parametrize("dtype", ["bf16", "int4"])
def test_a_resumed_run_is_bit_equal(make: Any, tmp_path: Path, dtype: str) -> None:
    straight, resumed = make(diloco_comm_dtype=dtype), make(diloco_comm_dtype=dtype)
    for step in range(12):
        train(straight, step)
    straight.save(tmp_path)
    resumed.load(tmp_path)
    for step in range(12, 20):
        train(straight, step)
        train(resumed, step)
    assert all(map(torch.equal, straight.outer.values(), resumed.outer.values()))
    assert torch.equal(straight.residual, resumed.residual)
    assert len(straight.residual) == 0 or straight.residual.any()
