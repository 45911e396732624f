"""Full state dicts are written and read without all tensors in memory."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from trainer.strategy.full_state_dict import read_full, write_full

SHAPES = {name: torch.Size(shape) for name, shape in {"b": (3, 4), "a.weight": (5,), "c": (), "d": (0, 2)}.items()}


def values() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {name: torch.randn(shape) for name, shape in SHAPES.items()}


def test_what_is_written_is_read(tmp_path: Path) -> None:
    write_full(tmp_path, "trained", SHAPES, iter(values().items()))
    found = read_full(tmp_path, "trained")
    assert found.keys() == SHAPES.keys()
    for name, value in values().items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=0)


def test_other_data_types_and_layouts_are_written_as_contiguous_float32(tmp_path: Path) -> None:
    given = torch.arange(6, dtype=torch.bfloat16).view(3, 2).T
    write_full(tmp_path, "trained", {"w": given.shape}, [("w", given)])
    found = read_full(tmp_path, "trained")["w"]
    assert found.dtype == torch.float32 and torch.equal(found, given.float())


def test_one_tensor_at_a_time_is_in_memory(tmp_path: Path) -> None:
    alive: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
    most = 0

    def assembled() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal most
        for number in range(8):
            value = torch.full((100,), float(number))
            alive.add(value)
            most = max(most, len(alive))
            yield f"w{number}", value

    write_full(tmp_path, "exp_avg", {f"w{number}": torch.Size([100]) for number in range(8)}, assembled())
    assert most <= 2  # the one before is freed when the next one is there
    assert [float(value[-1]) for value in read_full(tmp_path, "exp_avg").values()] == list(range(8))


def test_ranks_without_values_write_nothing(tmp_path: Path) -> None:
    write_full(tmp_path / "absent", "trained", SHAPES, iter(()))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("names", [["b", "c", "d"], ["b", "a.weight", "c"], ["b", "a.weight", "c", "d", "e"]])
def test_other_values_than_announced_are_an_error(names: list[str], tmp_path: Path) -> None:
    found = values() | {"e": torch.zeros(1)}
    with pytest.raises(RuntimeError, match="checkpoint: trained"):
        write_full(tmp_path, "trained", SHAPES, ((name, found[name]) for name in names))
