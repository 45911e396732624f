"""DeepSpeed's ZeRO: ranks share out the optimizer's state (1), the gradients too (2), the weights too (3).

https://deepspeed.readthedocs.io/en/latest/zero3.html

Nothing of DeepSpeed's own C++ is used, so no host needs a compiler and no first step waits for one: torch's fused AdamW
does what DeepSpeedCPUAdam does, and the shared-memory all-reduce between CPU ranks of one host is left out.
"""

import functools
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainer.config.run_spec import RunSpec
from trainer.distributed.world import World
from trainer.errors import UserError
from trainer.model import TokenLoss
from trainer.optim import make_optimizer
from trainer.planner.cost import bucket, prefetched
from trainer.strategy.base import Batch, Strategy
from trainer.strategy.full_state_dict import KINDS, MOMENTS, persistent_buffers, read_whole, step_of, write_whole

_NEVER = 2**62  # steps between DeepSpeed's own progress lines


def import_deepspeed(world: World) -> Any:
    """Import DeepSpeed for this process group.

    Raises:
        UserError: it is not installed, or cannot be used here.
    """
    if world.device.type == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"
    for name, value in (("RANK", world.rank), ("LOCAL_RANK", world.local_rank), ("WORLD_SIZE", world.size)):
        os.environ.setdefault(name, str(value))
    try:
        import deepspeed
    except Exception as error:  # it looks for compilers and CUDA while it is imported
        why = str(error).strip().splitlines() or [type(error).__name__]
        raise UserError(
            f"strategy: deepspeed cannot be had ({why[0]}): pip install 'trainyard[deepspeed]', or strategy=fsdp"
        ) from None
    deepspeed.utils.logger.setLevel("WARNING")
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="nccl" if world.device.type == "cuda" else "gloo")
    return deepspeed


def configuration(spec: RunSpec, trained: int, parameters: int) -> dict[str, Any]:
    """Return DeepSpeed's form of the spec: https://www.deepspeed.ai/docs/config-json/

    Args:
        trained: how many numbers are.
        parameters: how many numbers the model has.
    """
    zero: dict[str, Any] = {
        "stage": spec.deepspeed_stage,
        "reduce_bucket_size": bucket(trained),
        "allgather_bucket_size": bucket(trained),
    }
    if spec.deepspeed_stage == 3:
        zero["stage3_prefetch_bucket_size"] = prefetched(parameters)
    if spec.deepspeed_offload != "none":
        zero["offload_optimizer"] = {"device": "cpu"}
    if spec.deepspeed_offload == "all":
        zero["offload_param"] = {"device": "cpu"}
    return {
        "train_micro_batch_size_per_gpu": spec.batch_size,
        # The loop says which micro-batch is a step's last.
        "gradient_accumulation_steps": 1,
        "gradient_clipping": spec.max_grad_norm,
        "zero_optimization": zero,
        "zero_force_ds_cpu_optimizer": False,
        "communication_data_type": "bf16" if spec.gradient_wire == "bf16" else "fp32",
        "steps_per_print": _NEVER,
    }


class Cast(nn.Module):
    """A module under autocast from within: the engine turns off one that was entered around it."""

    def __init__(self, inner: nn.Module, autocast: Callable[[], AbstractContextManager[Any]]) -> None:
        super().__init__()
        self.inner, self._autocast = inner, autocast

    def forward(self, *batch: torch.Tensor) -> torch.Tensor:
        with self._autocast():
            loss: torch.Tensor = self.inner(*batch)
        return loss


class DeepSpeedZeRO(Strategy):
    """DeepSpeed's engine on any number of ranks."""

    lockstep = True

    def __init__(self, spec: RunSpec, world: World, module: TokenLoss) -> None:
        super().__init__(spec, world, module)
        self.deepspeed = import_deepspeed(world)
        self.trained = {name: p for name, p in module.model.named_parameters() if p.requires_grad}

    @functools.cached_property
    def engine(self) -> Any:
        """Hand the module over; it takes the weights as they are now, which is why `load` puts a checkpoint's in before."""
        optimizer = make_optimizer(self.spec, self.trained.values())
        numbers = [sum(p.numel() for p in each) for each in (self.trained.values(), self.plain.parameters())]
        engine, *_ = self.deepspeed.initialize(
            model=Cast(self.plain, self.autocast),
            optimizer=optimizer,
            config=configuration(self.spec, *numbers),
            dist_init_required=False,
        )
        return engine

    def backward(self, batch: Batch, tokens: int, last: bool) -> torch.Tensor:
        self.engine.set_gradient_accumulation_boundary(last)
        loss = self.engine(*batch)
        # DeepSpeed divides the sum over ranks by their number: times it back, so that tokens alone weigh.
        self.engine.backward(loss * (self.world.size / max(1, tokens)))
        if not last:
            self.engine.step()  # moves its count of micro-batches, and nothing else
        return loss.detach()

    def step(self, lr: float) -> float:
        for group in self.engine.optimizer.param_groups:
            group["lr"] = lr
        self.engine.step()
        return float(self.engine.get_global_grad_norm())

    @torch.no_grad()
    def loss(self, batch: Batch) -> torch.Tensor:
        return self.engine(*batch)

    def weights(self) -> dict[str, torch.Tensor]:
        return self._whole("trained") | persistent_buffers(self.plain.model)

    def save(self, folder: Path) -> None:
        for kind in KINDS:
            write_whole(folder, kind, self._whole(kind))

    def load(self, folder: Path) -> None:
        kept = read_whole(folder, "trained")
        with torch.no_grad():
            for name, parameter in self.trained.items():
                parameter.copy_(kept[name])
        optimizer = self.engine.optimizer
        step = torch.tensor(float(step_of(folder)))
        parts = optimizer.fp32_partitioned_groups_flat if self._in_parts else optimizer.single_partition_of_fp32_groups
        for part in parts:
            moments = {kind: torch.zeros_like(part) for kind in MOMENTS}
            optimizer.optimizer.state[part] = {"step": step.to(part.device, copy=True), **moments}
        if not self._in_parts:
            optimizer._lazy_init_hp_params_optimizer_state()
        for kind in MOMENTS:
            kept = read_whole(folder, kind)
            for name, parameter in self.trained.items():
                self._set(parameter, kept[name], kind)

    @property
    def _in_parts(self) -> bool:
        """Tell whether weights are shared out too: DeepSpeed's stage 3 is code of its own."""
        return self.spec.deepspeed_stage == 3

    def _set(self, parameter: Any, value: torch.Tensor, kind: str) -> None:
        utils = self.deepspeed.utils
        if not self._in_parts:
            utils.safe_set_full_optimizer_state(parameter, value.to(self.world.device), kind)
            return
        # Ranks have equal parts, the last one's filled up; DeepSpeed's own setter for the whole forgets that.
        size = parameter.ds_tensor.numel()
        filled = torch.zeros(size * self.world.size)
        filled[: value.numel()] = value.flatten()
        utils.safe_set_local_optimizer_state(parameter, filled[size * self.world.rank :][:size], kind)

    def _whole(self, kind: str) -> dict[str, torch.Tensor]:
        """Put what is trained, or a moment of it, together from its parts; the first rank of every host keeps it."""
        utils, whole = self.deepspeed.utils, {}
        if kind in MOMENTS and not self._in_parts:
            # DeepSpeed finds them for all groups of parameters at the first group's first step: the others have none then.
            self.engine.optimizer._hp_optimizer_states_linked = False
            self.engine.optimizer._lazy_init_hp_params_optimizer_state()
        for name, parameter in self.trained.items():
            if kind == "trained":
                value = utils.safe_get_full_fp32_param(parameter)
            else:
                value = utils.safe_get_full_optimizer_state(parameter, kind)
            if self.world.is_host_leader:
                whole[name] = value.detach().to("cpu", copy=True)
        return whole
