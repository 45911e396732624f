"""DeepSpeed ZeRO: ranks shard the optimizer state (stage 1), and also gradients (stage 2) and weights (stage 3).

https://deepspeed.readthedocs.io/en/latest/zero3.html

None of DeepSpeed's C++ extensions is used, so no host needs a compiler: PyTorch's fused AdamW replaces DeepSpeedCPUAdam, and
the shared-memory all-reduce between CPU ranks of one host is disabled.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.common.errors import UserError
from trainer.common.lazy import LazyModule
from trainer.common.packages import how_to_install
from trainer.costs.cost import (
    PCI_EXPRESS,
    Layout,
    Memory,
    RowStats,
    State,
    activation_bytes,
    gradient_bytes_per_number,
    micro_batches,
    offloaded_step,
    ring_fraction,
)
from trainer.method import DEFAULT_METHOD
from trainer.strategy.base import Batch, Strategy, check_norm
from trainer.strategy.deepspeed_config import accelerate_options, bucket, engine_config, prefetched
from trainer.strategy.deepspeed_file import check_file
from trainer.strategy.full_state_dict import KINDS, MOMENTS, create_moments, persistent_buffers, read_full, write_full
from trainer.strategy.loss_scale import LossScale
from trainer.strategy.plan import StrategyPlan, reject_unshardable

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist
    from torch import nn

    from trainer.config import RunSpec
    from trainer.distributed.world import World
    from trainer.method.module_with_loss import ModelWithLoss
    from trainer.model_files.model_shape import Shape
else:
    torch, dist, nn = LazyModule("torch"), LazyModule("torch.distributed"), LazyModule("torch.nn")

_REUSED = 1e9  # stage3_max_reuse_distance: numbers between two uses of a weight below which it stays gathered
_SMALL = 1e5  # numbers of a parameter below which stage 3 keeps it on every rank
_LINK_EFFICIENCY = 0.7  # fraction of a link that gloo's gathers use
_HOOK_SECONDS = 1.5e-3  # of stage 3, per module and micro-batch


class DeepSpeedPlan(StrategyPlan):
    """The plan of ZeRO. Figures without a source were measured."""

    uniform_dtype = True
    library_bytes = 20 << 20

    def strategy_class(self, spec: RunSpec) -> type[DeepSpeedZeRO]:
        return DeepSpeedZeRO

    def validate(self, spec: RunSpec) -> None:
        if spec.method != DEFAULT_METHOD:
            raise ValueError(
                f"strategy: deepspeed requires method {DEFAULT_METHOD}, got method {spec.method}: set strategy=fsdp, which also "
                "divides the weights"
            )
        reject_unshardable(spec, "strategy", possible=("precision",))
        if spec.deepspeed_offload == "all" and spec.deepspeed_stage < 3:
            raise ValueError(
                f"deepspeed_offload: all requires deepspeed_stage 3, got {spec.deepspeed_stage}: "
                "set deepspeed_offload=optimizer"
            )
        check_file(spec)

    def needs_packages(self, spec: RunSpec) -> dict[str, str]:
        return {"deepspeed": "strategy=deepspeed"}

    def needs_own_gpus(self, spec: RunSpec) -> bool:
        return True

    def sharded_weights(self, spec: RunSpec) -> bool:
        return spec.deepspeed_stage == 3

    def supports_fast_kernels(self, spec: RunSpec) -> bool:
        # Stage 3 takes the model from host memory, where the kernels cannot be tested with packed samples.
        return not self.sharded_weights(spec)

    def host_memory(self, spec: RunSpec, shape: Shape, layout: Layout) -> int:
        state = self.state(spec, shape, layout, cuda=False)
        weights = state.base if spec.deepspeed_offload == "all" else 0
        return weights + (state.optimizer if spec.deepspeed_offload != "none" else 0)

    def offload_seconds(self, spec: RunSpec, shape: Shape, layout: Layout) -> float:
        if spec.deepspeed_offload == "none":
            return 0.0
        own = shape.trained(spec) / layout.world
        seconds = offloaded_step(own)
        if spec.deepspeed_offload == "all":
            copied = 2 * shape.parameters * self.bytes_per_weight(spec) / layout.world
            seconds += copied * micro_batches(spec, layout.world) / PCI_EXPRESS
        return seconds

    def state(self, spec: RunSpec, shape: Shape, layout: Layout, *, cuda: bool) -> State:
        state = super().state(spec, shape, layout, cuda=cuda)
        state = replace(state, optimizer=state.optimizer + shape.trained(spec) * 4)  # a copy of the trained weights
        if self.sharded_weights(spec):
            weight = self.bytes_per_weight(spec)
            # Weights that stay from the forward to the backward pass, and prefetched ones: as received, and assembled.
            gathered = min(state.base, int(_REUSED) * weight) + 2 * prefetched(shape.parameters) * weight
            state = state.sharded(layout.world, gathered)
        else:
            state = replace(
                state,
                optimizer=state.optimizer // layout.world,
                gradients=state.gradients // (layout.world if spec.deepspeed_stage >= 2 else 1),
                buffers=4 * bucket(spec, shape.trained(spec)),
            )
        if not cuda:
            return state
        return replace(
            state,
            optimizer=state.optimizer * (spec.deepspeed_offload == "none"),
            base=state.base * (spec.deepspeed_offload != "all"),
        )

    def memory(self, spec: RunSpec, shape: Shape, layout: Layout, rows: RowStats, *, cuda: bool = False) -> Memory:
        memory = super().memory(spec, shape, layout, rows, cuda=cuda)
        if cuda or self.sharded_weights(spec):
            return memory
        # The optimizer copies a rank's shard of the gradients once or twice, each time into one piece. About a fifth of the
        # memory that activations and logits freed can be reused.
        copies = spec.deepspeed_stage * shape.trained(spec) * 4 // layout.world
        freed = sum(activation_bytes(spec, shape, rows, cuda=cuda))
        return replace(memory, gradients=memory.gradients + max(0, copies - round(freed / 5)))

    def outside_step(self, spec: RunSpec, shape: Shape, layout: Layout, state: State) -> int:
        if not self.sharded_weights(spec):
            return 0
        stored = shape.parameters * self.bytes_per_weight(spec)
        # Gathered weights of different sizes leave gaps in the heap of malloc of about this size.
        fragments = round(0.7 * stored)
        return state.held + state.gathered + state.gradients + fragments

    def comm_bytes(self, spec: RunSpec, shape: Shape, layout: Layout, *, gloo: bool) -> float:
        if layout.world == 1:
            return 0.0
        micro = micro_batches(spec, layout.world)
        # gloo implements reduce-scatter as an all-reduce.
        trained = shape.trained(spec)
        scattered = (2 if gloo else 1) * ring_fraction(layout.world) * trained * gradient_bytes_per_number(spec)
        return self._gathered_bytes(spec, shape, layout, micro) + scattered * (micro if spec.deepspeed_stage > 1 else 1)

    def _gathered_bytes(self, spec: RunSpec, shape: Shape, layout: Layout, micro: int) -> float:
        """Return the bytes of a step that ranks gather: updated weights; in stage 3, weights when they are needed."""
        trained, ring = shape.trained(spec), ring_fraction(layout.world)
        if not self.sharded_weights(spec):
            return ring * trained * 4
        base, small = _persistent(spec, shape)
        every = shape.parameters + (trained if spec.lora_r else 0)
        large = (every - base - (small if spec.lora_r else 0)) * self.bytes_per_weight(spec)
        # A weight that is reused soon stays gathered: in a small model, every weight from the forward to the backward pass.
        again = max(0.0, 1 - _REUSED / 2 / every)
        return ring * (large * (1 + again) * micro + small * 4)

    def accelerate_config(self, spec: RunSpec, processes: Sequence[int]) -> dict[str, Any]:
        return accelerate_options(spec, processes)

    def overhead_seconds(self, spec: RunSpec, shape: Shape, layout: Layout, link: float) -> tuple[float, float]:
        """Stage 3 runs hooks around every module. Unlike in stages 1 and 2, prefetching hides the overhead of gloo's gathers."""
        micro = micro_batches(spec, layout.world)
        if not self.sharded_weights(spec):
            gathered = self._gathered_bytes(spec, shape, layout, micro)
            return 0.0, gathered / link * (1 / _LINK_EFFICIENCY - 1)
        # A matrix with an adapter is four modules: itself, two factors, and their container.
        adapted = len(shape.targets(spec)) if spec.lora_r else 0
        return _HOOK_SECONDS * shape.layers * (len(shape.linear) + 3 * adapted + 6) * micro, 0.0


PLAN = DeepSpeedPlan()


def _persistent(spec: RunSpec, shape: Shape) -> tuple[int, int]:
    """Return how many numbers stage 3 keeps on every rank: of the base model, and of the trained weights.

    stage3_param_persistence_threshold in https://www.deepspeed.ai/docs/config-json/
    """
    small = [matrix.into * matrix.out for matrix in shape.linear if matrix.into * matrix.out < _SMALL]
    base = shape.layers * (sum(small) + shape.other_per_layer) + shape.other
    adapters = [spec.lora_r * side for matrix in shape.targets(spec) for side in (matrix.into, matrix.out)]
    trained = shape.layers * sum(number for number in adapters if number < _SMALL)
    return base, trained if spec.lora_r else base


def import_deepspeed(world: World) -> Any:
    """Import DeepSpeed for this process group. Raises UserError: DeepSpeed is not installed or fails to import."""
    if world.device.type == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"
    for name, value in (("RANK", world.rank), ("LOCAL_RANK", world.local_rank), ("WORLD_SIZE", world.size)):
        os.environ.setdefault(name, str(value))
    try:
        import deepspeed
    except Exception as error:  # DeepSpeed searches for compilers and CUDA at import
        why = str(error).strip().splitlines() or [type(error).__name__]
        raise UserError(
            f"strategy: cannot import deepspeed ({why[0]}): {how_to_install('deepspeed', 'deepspeed')}; or set strategy=fsdp"
        ) from None
    deepspeed.utils.logger.setLevel("WARNING")
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="nccl" if world.device.type == "cuda" else "gloo")
    return deepspeed


def with_autocast(strategy: Strategy, module: nn.Module) -> nn.Module:
    """Wrap a module so that it enters autocast by itself: the engine disables autocast that is entered around it."""

    class Autocast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = module

        def forward(self, *batch: Any) -> torch.Tensor:
            with strategy.autocast():
                loss: torch.Tensor = self.inner(*batch)
            return loss

    return Autocast()


def _shard(deepspeed: Any, model: nn.Module, config: dict[str, Any], world: World, *, full: bool) -> None:
    """Convert the parameters of a model to those of stage 3, one at a time, in float32. Every rank calls it.

    Every rank reads only its shard of the model's files. DeepSpeed's own conversion needs all weights in the memory of
    every rank, and sends those of rank 0 to all others. `model`: equal on all ranks; its weights may be memory-mapped,
    in any data type. `config`: of the engine. `full`: whether the full weights are trained. Otherwise the trained ones,
    which come from no file, are taken from rank 0.
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


class DeepSpeedZeRO(Strategy):
    lockstep = True

    def __init__(self, spec: RunSpec, world: World, module: ModelWithLoss) -> None:
        super().__init__(spec, world, module)
        world.require_own_gpus("deepspeed")
        self.deepspeed = import_deepspeed(world)
        self.trained = {name: p for name, p in module.model.named_parameters() if p.requires_grad}
        self.scale = LossScale(enabled=spec.precision == "fp16-mixed")

    @functools.cached_property
    def engine(self) -> Any:
        """Create the engine on first use. It copies the weights, so `load` restores them first."""
        from trainer.models.optim import make_optimizer

        optimizer = make_optimizer(self.spec, self.trained.values())
        numbers = [sum(p.numel() for p in each) for each in (self.trained.values(), self.plain.parameters())]
        config = engine_config(self.spec, *numbers)
        if self._sharded_weights:
            with torch.no_grad():
                _shard(self.deepspeed, self.plain, config, self.world, full=not self.spec.lora_r)
        engine, *_ = self.deepspeed.initialize(
            model=with_autocast(self, self.plain), optimizer=optimizer, config=config, dist_init_required=False
        )
        self._use_scale(engine)
        return engine

    def _use_scale(self, engine: Any) -> None:
        """Let the engine multiply losses by the factor, and divide gradients by it. It has one of its own only for weights in fp16."""
        if self.scale.enabled:
            engine.optimizer.loss_scale = self.scale.value

    def backward(self, batch: Batch, total: float, last: bool) -> torch.Tensor:
        self.engine.set_gradient_accumulation_boundary(last)
        loss = self.engine(*batch)
        # DeepSpeed averages over ranks; multiply by world size so that every token, or sample, has equal weight.
        self.engine.backward(loss * (self.world.size / max(1, total)))
        if not last:
            self.engine.step()  # only advances the micro-batch counter
        return loss.detach()

    def step(self, lr: float) -> float:
        for group in self.engine.optimizer.param_groups:
            group["lr"] = lr
        self.engine.step()  # changes nothing if the norm is not finite
        norm = float(self.engine.get_global_grad_norm())
        taken = self.scale.update(norm)
        self._use_scale(self.engine)
        return norm if not taken and not self.scale.exhausted else check_norm(norm)

    def loss(self, batch: Batch) -> torch.Tensor:
        with torch.no_grad():
            return self.engine(*batch)

    def weights_finite(self) -> bool:
        if not self._sharded_weights:
            return super().weights_finite()
        from trainer.common.finite import all_finite

        return all_finite(self.engine.optimizer.fp32_partitioned_groups_flat)

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._full("trained")
        yield from persistent_buffers(self.plain.model).items()

    def save(self, folder: Path) -> None:
        if self.world.is_host_leader:
            self.scale.save(folder)
        shapes = {name: getattr(p, "ds_shape", p.shape) for name, p in self.trained.items()}  # stage 3 hides the shape
        for kind in KINDS:
            write_full(folder, kind, shapes, self._full(kind))

    def load(self, folder: Path) -> None:
        self.scale.load(folder)
        kept = read_full(folder, "trained")
        with torch.no_grad():
            for name, parameter in self.trained.items():
                if self._sharded_weights:
                    parameter.data = kept[name]  # the engine reads only its shard
                else:
                    parameter.copy_(kept[name])
        optimizer = self.engine.optimizer
        shards = "fp32_partitioned_groups_flat" if self._sharded_weights else "single_partition_of_fp32_groups"
        create_moments(optimizer.optimizer, getattr(optimizer, shards), folder)
        if not self._sharded_weights:
            optimizer._lazy_init_hp_params_optimizer_state()
        for kind in MOMENTS:
            kept = read_full(folder, kind)
            for name, parameter in self.trained.items():
                self._set(parameter, kept[name], kind)

    @property
    def _sharded_weights(self) -> bool:
        """Return whether weights are also sharded. DeepSpeed implements stage 3 separately."""
        return self.spec.deepspeed_stage == 3

    def _set(self, parameter: Any, value: torch.Tensor, kind: str) -> None:
        utils = self.deepspeed.utils
        if not self._sharded_weights:
            utils.safe_set_full_optimizer_state(parameter, value, kind)  # copies only this rank's part
            return
        # Shards have equal sizes, the last one is padded. DeepSpeed's setter for full tensors ignores the padding.
        size = parameter.ds_tensor.numel()
        own = value.view(-1)[size * self.world.rank :][:size]
        shard = torch.zeros(size)
        shard[: own.numel()] = own
        utils.safe_set_local_optimizer_state(parameter, shard, kind)

    def _full(self, kind: str) -> Iterator[tuple[str, torch.Tensor]]:
        """Assemble the trained weights, or one of their moments, one at a time. Only the first rank of every host receives them."""
        utils = self.deepspeed.utils
        if kind in MOMENTS and not self._sharded_weights:
            # DeepSpeed links the moments of all parameter groups at the first step of the first group, when other groups have none.
            self.engine.optimizer._hp_optimizer_states_linked = False
            self.engine.optimizer._lazy_init_hp_params_optimizer_state()
        for name, parameter in self.trained.items():
            if kind == "trained":
                value = utils.safe_get_full_fp32_param(parameter)
            else:
                value = utils.safe_get_full_optimizer_state(parameter, kind)
            if self.world.is_host_leader:
                yield name, value.detach().to("cpu", copy=True)
