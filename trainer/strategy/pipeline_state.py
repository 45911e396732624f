"""Checkpoints of a pipeline: by the names of the whole model, so that other ranks can hold other layers after a resume.

With adapters every host writes all trained weights and moments, in the files of FSDP. With full weights every rank writes its
stage, and a resumed run exchanges what its ranks lack.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file

from trainer.common.errors import DiskError, disk_failure, first_line
from trainer.strategy.full_state_dict import KINDS, MOMENTS, create_moments, write_full
from trainer.strategy.pipeline_copies import StageCopies, stage_file

if TYPE_CHECKING:
    from trainer.distributed.world import World
    from trainer.strategy.pipeline_stage import StageLoss

_BUFFER = 16 << 20  # numbers of one broadcast
_PATTERN = "stage-*.safetensors"


def gather(stage: StageLoss, world: World, tensors: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the trained weights of the whole model by name in host memory, from their owners. Every rank iterates.

    Only the first rank of every host receives them. `world`: the ranks of this rank's pipeline. `tensors`: those of
    this rank, by name, in float32.
    """
    weights = stage.trained_weights
    for owner, names in groupby(weights, lambda name: weights[name].owner):
        for part in _parts(list(names), stage):
            sizes = [weights[name].shape.numel() for name in part]
            if world.rank == owner:
                buffer = torch.cat([tensors[name].flatten() for name in part])
            else:
                buffer = torch.empty(sum(sizes), device=world.device)
            if world.size > 1:
                dist.broadcast(buffer, group=world.group, group_src=owner)
            if world.is_host_leader:
                pieces = buffer.split(sizes)
                for name, piece in zip(part, pieces, strict=True):
                    yield name, piece.view(weights[name].shape).to("cpu", copy=True)


def _parts(names: list[str], stage: StageLoss) -> list[list[str]]:
    """Split names into parts whose tensors fit into one buffer."""
    parts: list[list[str]] = [[]]
    size = 0
    for name in names:
        count = stage.trained_weights[name].shape.numel()
        if parts[-1] and size + count > _BUFFER:
            parts.append([])
            size = 0
        parts[-1].append(name)
        size += count
    return parts


def _state(stage: StageLoss, optimizer: torch.optim.Optimizer | None) -> dict[str, dict[str, torch.Tensor]]:
    """Return this rank's trained weights and their moments: {kind: {name: tensor}}."""
    state: dict[str, dict[str, torch.Tensor]] = {"trained": {name: p.detach() for name, p in stage.held.items()}}
    for kind in MOMENTS:
        state[kind] = {name: optimizer.state[p][kind] for name, p in stage.held.items()} if optimizer else {}
    return state


def _set_state(stage: StageLoss, optimizer: torch.optim.Optimizer | None, folder: Path) -> dict[str, dict[str, Any]]:
    """Create the optimizer's state for the step of a checkpoint, and return where to copy its tensors, as `_state` does."""
    if optimizer:
        create_moments(optimizer, stage.held.values(), folder)
    return _state(stage, optimizer)


def save_full(folder: Path, stage: StageLoss, world: World, optimizer: torch.optim.Optimizer | None) -> None:
    """Write all trained weights and their moments on every host. Every rank calls it."""
    shapes = {name: weight.shape for name, weight in stage.trained_weights.items()}
    for kind, tensors in _state(stage, optimizer).items():
        write_full(folder, kind, shapes, gather(stage, world, tensors))


def load_full(folder: Path, stage: StageLoss, world: World, optimizer: torch.optim.Optimizer | None) -> None:
    """Read this rank's part of what `save_full` wrote, for any division of the layers."""
    for kind, tensors in _set_state(stage, optimizer, folder).items():
        with safe_open(folder / f"{kind}.safetensors", "pt") as file:  # type: ignore[no-untyped-call]
            for name, tensor in tensors.items():
                tensor.copy_(file.get_tensor(name))


class StageWriting:
    """The checkpoint of one stage. The file is written before the object is made; `finish` reports the ranks' errors."""

    def __init__(self, world: World, error: str, copies: StageCopies) -> None:
        """`copies`: those of the file on another host, which may not have arrived yet."""
        self._world, self._error, self._copies = world, error, copies

    def done(self) -> bool:
        return self._copies.done()

    def finish(self) -> None:
        self._copies.finish()
        for rank, error in enumerate(self._world.gather(self._error)):
            if error:
                raise DiskError(
                    f"checkpoint: rank {rank} could not write its stage: {error}: free disk space and start the run again"
                )


def save_stage(
    folder: Path, stage: StageLoss, world: World, optimizer: torch.optim.Optimizer | None, copies: StageCopies
) -> StageWriting:
    """Write this rank's trained weights and their moments: `stage-NUMBER.safetensors` with the keys KIND/NAME.

    Every rank calls it. `copies`: sends the file to another host where that is wanted.
    """
    number = world.rank
    own = {
        f"{kind}/{name}": tensor.contiguous()
        for kind, tensors in _state(stage, optimizer).items()
        for name, tensor in tensors.items()
        if stage.trained_weights[name].owner == number
    }
    error, path = "", folder / stage_file(number)
    try:
        save_file(own, path)
    except Exception as failure:  # every rank must reach `finish`
        error = disk_failure(failure) or first_line(failure)
    copies.start(folder, 0 if error else path.stat().st_size)
    return StageWriting(world, error, copies)


def load_stages(folder: Path, stage: StageLoss, world: World, optimizer: torch.optim.Optimizer | None) -> None:
    """Read this rank's part of a state that the ranks of any division wrote with `save_stage`. Every rank calls it.

    The lowest rank that has a missing part sends it to this host.
    """
    places = {
        f"{kind}/{name}": tensor
        for kind, tensors in _set_state(stage, optimizer, folder).items()
        for name, tensor in tensors.items()
    }
    files: dict[str, Path] = {}
    for path in sorted(folder.glob(_PATTERN)):
        with safe_open(path, "pt") as file:  # type: ignore[no-untyped-call]
            files |= dict.fromkeys(file.keys(), path)
    have = [set(keys) for keys in world.gather(sorted(files))]

    def read(key: str) -> torch.Tensor:
        with safe_open(files[key], "pt") as file:  # type: ignore[no-untyped-call]
            tensor: torch.Tensor = file.get_tensor(key)
        return tensor

    # Every rank goes through all tensors in the same order, so that sends and receives match.
    for name, weight in stage.trained_weights.items():
        for key in (f"{kind}/{name}" for kind in KINDS):
            owner = next(rank for rank in range(world.size) if key in have[rank])
            for rank in weight.holders:
                if world.rank == rank and key in files:
                    places[key].copy_(read(key))
                elif key not in have[rank] and world.rank == owner:
                    dist.send(read(key).to(world.device), rank)
                elif key not in have[rank] and world.rank == rank:
                    buffer = torch.empty_like(places[key]).contiguous()
                    dist.recv(buffer, owner)
                    places[key].copy_(buffer)
