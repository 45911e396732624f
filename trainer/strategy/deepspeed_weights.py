"""The weights of ZeRO stage 3: every rank reads only its shard of the model's files.

DeepSpeed's own conversion of a model needs all weights in the memory of every rank, and sends those of rank 0 to all others.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from trainer.distributed.world import World


@torch.no_grad()
def shard(deepspeed: Any, model: nn.Module, config: dict[str, Any], world: World, *, full: bool) -> None:
    """Convert the parameters of a model to those of stage 3, one at a time, in float32. Every rank calls it.

    Args:
        model: equal on all ranks; its weights may be memory-mapped, in any data type.
        config: of the engine.
        full: whether the full weights are trained. Otherwise the trained ones, which come from no file, are taken from rank 0.
    """
    # An empty module enables DeepSpeed's linear layers, which do not keep gathered weights.
    init = deepspeed.zero.Init(module=nn.Module(), config_dict_or_path=config, dtype=torch.float32)
    # The kernel provides memory only for the parts that are written. One buffer for all leaves no gaps between the shards.
    buffer = torch.empty(max(parameter.numel() for parameter in model.parameters()), dtype=torch.float32)
    for parameter in model.parameters():
        if parameter.requires_grad and not full:
            fresh = parameter.to(world.device)
            dist.broadcast(fresh, 0)
            parameter.data = fresh.cpu()
        size = math.ceil(parameter.numel() / world.size)  # the last shard is padded
        start = size * world.rank
        whole = buffer[: parameter.numel()]
        whole[start : start + size] = parameter.view(-1)[start : start + size]
        parameter.data = whole.view(parameter.shape)
        init._convert_to_deepspeed_param(parameter)
        parameter.partition()  # type: ignore[attr-defined]
        parameter.data = torch.empty(0, device=init.local_device)
