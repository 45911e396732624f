"""FSDP2: every rank holds a shard of every layer's weights, gradients and moments, and gathers a layer when it is needed.

https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.common.errors import DiskError, UserError, disk_failure
from trainer.common.lazy import LazyModule
from trainer.costs.cost import (
    PCI_EXPRESS,
    Layout,
    State,
    exported_bytes,
    full_state,
    gradient_bytes_per_number,
    layer_bytes,
    micro_batches,
    offloaded_step,
    ring_fraction,
    root_bytes,
    scale_bytes,
)
from trainer.model_files.model_shape import layer_class, shape_of
from trainer.strategy.base import Batch, Strategy, check_norm
from trainer.strategy.full_state_dict import MOMENTS, create_moments, persistent_buffers, read_full, write_full
from trainer.strategy.full_state_dict import State as StateDict
from trainer.strategy.loss_scale import LossScale
from trainer.strategy.plan import StrategyPlan, reject_unshardable

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch import nn
    from torch.distributed import device_mesh, fsdp, tensor

    from trainer.config import RunSpec
    from trainer.distributed.world import World
    from trainer.method.module_with_loss import ModelWithLoss
    from trainer.model_files.model_shape import Shape
else:
    torch, dist, nn = LazyModule("torch"), LazyModule("torch.distributed"), LazyModule("torch.nn")
    dcp, fsdp = LazyModule("torch.distributed.checkpoint"), LazyModule("torch.distributed.fsdp")
    device_mesh, tensor = LazyModule("torch.distributed.device_mesh"), LazyModule("torch.distributed.tensor")

METADATA = ".metadata"  # PyTorch's index of the tensors in a checkpoint's files


def sharded_state(spec: RunSpec, state: State, shape: Shape, shards: int, bytes_per_weight: int) -> State:
    """Return the state of one of `shards` shards, with the weights that FSDP gathers at a time."""
    root = root_bytes(shape, bytes_per_weight)  # freed at the end of the backward pass
    scales = shape.layers * scale_bytes(spec, shape)  # complete on every rank
    # The current layer and the prefetched one: as received, and assembled.
    gathered = 3 * (state.base - scales - root) // shape.layers
    if keeps_gathered(spec):
        gathered += shape.layers * _gathered_layer(spec, shape)
    return replace(state, base=state.base - scales).sharded(shards, scales + root + gathered)


def keeps_gathered(spec: RunSpec) -> bool:
    """Return whether layers stay gathered from the forward to the backward pass: SHARD_GRAD_OP of the first FSDP."""
    return spec.fsdp_shard == "gradients"


def tool_options(spec: RunSpec, offload: str) -> dict[str, Any]:
    """Return the options that accelerate and transformers pass to FSDP2. `offload`: the name of that of CPU offload."""
    return {
        "version": 2,
        "reshard_after_forward": not keeps_gathered(spec),
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "transformer_layer_cls_to_wrap": layer_class(shape_of(spec).kind),
        "activation_checkpointing": spec.gradient_checkpointing,
        "cpu_ram_efficient_loading": True,
        offload: spec.fsdp_offload,
        "state_dict_type": "SHARDED_STATE_DICT",
    }


def _gathered_bytes(spec: RunSpec) -> int:
    """Return the bytes of one gathered weight of a layer that is not in 4 bits."""
    if spec.quantize == "nf4":
        return 2 if spec.precision == "bf16-mixed" else 4
    return 4 if spec.precision == "32-true" else 2


def _gathered_layer(spec: RunSpec, shape: Shape) -> int:
    """Return the bytes of the gathered weights of one layer, without adapters."""
    return layer_bytes(spec, shape, _gathered_bytes(spec)) - scale_bytes(spec, shape)


class FSDPPlan(StrategyPlan):
    auto = "exact"

    def strategy_class(self, spec: RunSpec) -> type[FSDP]:
        return FSDP

    def validate(self, spec: RunSpec) -> None:
        reject_unshardable(spec, "strategy", possible=("precision", "quantize", "torch_compile"))
        if spec.quantize == "nf4" and spec.torch_compile:
            raise ValueError(
                "torch_compile: under strategy fsdp no layer in 4 bits can be compiled: set torch_compile=false, or quantize=none"
            )

    def needs_own_gpus(self, spec: RunSpec) -> bool:
        return True

    def sharded_weights(self, spec: RunSpec) -> bool:
        return True

    def load_module(self, spec: RunSpec, world: World) -> ModelWithLoss:
        # The layers are compiled after they were sharded.
        return super().load_module(spec.model_copy(update={"torch_compile": False}), world)

    def runs_on(self, spec: RunSpec, shape: Shape, layout: Layout) -> bool:
        return spec.fsdp_shard != "host" or (len(set(layout.processes)) == 1 and layout.processes[0] > 1)

    def autocast_copies(self, spec: RunSpec, shape: Shape) -> int:
        # Layers are gathered in 16 bits; only the root's weights stay in 32.
        return min(super().autocast_copies(spec, shape), 2 * shape.head_parameters)

    def state(self, spec: RunSpec, shape: Shape, layout: Layout, *, cuda: bool) -> State:
        state = super().state(spec, shape, layout, cuda=cuda)
        shards = min(layout.processes) if spec.fsdp_shard == "host" else layout.world
        state = sharded_state(spec, state, shape, shards, self.bytes_per_weight(spec))
        if not (cuda and spec.fsdp_offload):
            return state
        return State(0, 0, 0, 0, gathered=state.gathered, buffers=state.buffers)

    def host_memory(self, spec: RunSpec, shape: Shape, layout: Layout) -> int:
        return self.state(spec, shape, layout, cuda=False).held if spec.fsdp_offload else 0

    def offload_seconds(self, spec: RunSpec, shape: Shape, layout: Layout) -> float:
        if not spec.fsdp_offload:
            return 0.0
        shards = min(layout.processes) if spec.fsdp_shard == "host" else layout.world
        passes = 1 if keeps_gathered(spec) else 2
        weights = passes * full_state(spec, shape, self.bytes_per_weight(spec)).base / shards
        return weights * micro_batches(spec, layout.world) / PCI_EXPRESS + offloaded_step(shape.trained(spec) / shards)

    def outside_step(self, spec: RunSpec, shape: Shape, layout: Layout, state: State) -> int:
        if spec.lora_r:
            return 0
        # A checkpoint is written from a copy. At the end the first rank of a host assembles the model in parts.
        return state.held + state.gathered + max(state.weights + state.optimizer, exported_bytes(spec, shape))

    def accelerate_config(self, spec: RunSpec, processes: Sequence[int]) -> dict[str, Any]:
        options: dict[str, Any] = {
            "distributed_type": "FSDP",
            "fsdp_config": {f"fsdp_{name}": value for name, value in tool_options(spec, "offload_params").items()},
        }
        if spec.fsdp_shard == "host" and sum(processes) > 1:
            if len(set(processes)) > 1 or processes[0] == 1:
                raise UserError(
                    "config accelerate: fsdp_shard=host requires the same number of processes on every host, at least 2: "
                    "name the hosts in a file of --hosts, or set fsdp_shard=all"
                )
            mesh = {"dp_replicate_size": len(processes), "dp_shard_size": processes[0]}
            options["parallelism_config"] = {f"parallelism_config_{name}": size for name, size in mesh.items()}
        return options

    def comm_bytes(self, spec: RunSpec, shape: Shape, layout: Layout, *, gloo: bool) -> float:
        return self.replica_comm_bytes(spec, shape, layout, micro_batches(spec, layout.world), gloo=gloo)

    def replica_comm_bytes(self, spec: RunSpec, shape: Shape, layout: Layout, micro: int, *, gloo: bool) -> float:
        """Return the bytes that a process sends in a step of `micro` micro-batches within a replica of `layout`."""
        ring, trained = ring_fraction(layout.world), shape.trained(spec)
        number = gradient_bytes_per_number(spec)
        if spec.fsdp_shard == "host":  # hosts exchange only the sums of the shards
            hosts = len(layout.processes)
            return 2 * (hosts - 1) / hosts * trained * number
        weight = _gathered_bytes(spec)
        layers = shape.layers * _gathered_layer(spec, shape)
        layers += trained * weight if spec.lora_r else 0
        # The forward and the backward pass gather the layers, unless they stay gathered in between, as the root does.
        passes = 1 if keeps_gathered(spec) else 2
        gathered = ring * (passes * layers + root_bytes(shape, self.bytes_per_weight(spec))) * micro
        # gloo implements reduce-scatter as an all-reduce.
        scattered = (2 if gloo else 1) * ring * trained * number
        return gathered + scattered * (1 if spec.lora_r else micro)


PLAN = FSDPPlan()


def make_mesh(spec: RunSpec, world: World, replica_group: World | None = None) -> device_mesh.DeviceMesh:
    """Return a mesh of all ranks (one sharded model), or of hosts x ranks of a host (one sharded model per host).

    The mesh of a `replica_group` always has one dimension. Raises UserError: one model per host, but the numbers of
    ranks per host differ.
    """
    kind = world.device.type
    if replica_group:
        group = dist.group.WORLD if replica_group.group is None else replica_group.group
        return device_mesh.DeviceMesh.from_group(group, kind)
    if spec.fsdp_shard != "host":
        return device_mesh.init_device_mesh(kind, (world.size,))
    ranks = Counter(world.gather(world.node_rank))
    if len(set(ranks.values())) > 1:
        raise UserError(
            f"fsdp_shard: host requires the same number of ranks on every host, got {', '.join(map(str, ranks.values()))}: "
            "set fsdp_shard=all, or cluster_processes"
        )
    return device_mesh.init_device_mesh(kind, (len(ranks), world.size // len(ranks)), mesh_dim_names=("hosts", "ranks"))


def blocks(model: nn.Module) -> list[nn.Module]:
    """Return the model's decoder layers, which transformers lists as modules that must not be split."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    kinds = set(getattr(base, "_no_split_modules", None) or ())
    return [part for part in base.modules() if type(part).__name__ in kinds]


class ShardedWriting:
    """A sharded checkpoint that PyTorch writes in a background thread from a copy of the state."""

    def __init__(self, folder: Path, writing: Future[Any], world: World) -> None:
        self._folder, self._writing, self._world = folder, writing, world

    def done(self) -> bool:
        return self._writing.done()

    def finish(self) -> None:
        try:
            self._writing.result()
        except Exception as error:
            failures = getattr(error, "failures", {})  # CheckpointException: rank -> (its exception, traceback)
            rank, (why, *_) = next(iter(failures.items()), (None, (error,)))
            what = "a shard could not be written" if rank is None else f"rank {rank} could not write its shard"
            raise DiskError(
                f"checkpoint: {what}: {disk_failure(why) or why}: free disk space and start the run again"
            ) from error
        # PyTorch writes it on the first rank only, and every host needs it.
        mine = (self._folder / METADATA).read_bytes() if self._world.rank == 0 else b""
        metadata = self._world.gather_bytes(mine)[0]
        if self._world.is_host_leader:
            (self._folder / METADATA).write_bytes(metadata)


class FSDP(Strategy):
    """Fully sharded data parallel on any number of ranks."""

    lockstep = True

    def __init__(self, spec: RunSpec, world: World, module: ModelWithLoss, replica_group: World | None = None) -> None:
        """`replica_group`: the ranks that shard one model, if not all."""
        from trainer.models.optim import make_optimizer

        super().__init__(spec, replica_group or world, module)
        self.world.require_own_gpus("fsdp")
        # Adapters and the state of replicas are saved in full on every host. All other full weights are saved as shards.
        self.sharded_checkpoint = not spec.lora_r and replica_group is None
        self.model: Any = module.model
        for parameter in self.model.parameters() if spec.lora_r else ():
            if parameter.requires_grad:
                fresh = parameter.detach().to(world.device)
                dist.broadcast(fresh, 0)
                parameter.data.copy_(fresh)
        mesh = make_mesh(spec, world, replica_group)
        self._shards = mesh.get_group(mesh.ndim - 1)  # the ranks that together hold one model
        self._shard(spec, world, mesh)
        self.trained = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        self.optimizer = make_optimizer(spec, self.trained.values())
        self.scale = LossScale(enabled=spec.precision == "fp16-mixed")
        if self.sharded_checkpoint:
            # The writer threads communicate during training, so they need a separate group. NCCL does not support their
            # collectives.
            self._group, _ = dist.new_subgroups(mesh.size(mesh.ndim - 1), backend="gloo")

    def _shard(self, spec: RunSpec, world: World, mesh: device_mesh.DeviceMesh) -> None:
        from trainer.models.model import base_dtype
        from trainer.models.quantized import quantize_layers

        comm_dtype = torch.bfloat16 if spec.comm_dtype == "bf16" else torch.float32
        half = {"bf16-mixed": torch.bfloat16, "fp16-mixed": torch.float16}.get(spec.precision)
        # autocast would cast the weights of a layer to 16 bits anyway; gathered in 16 bits they are half the bytes.
        # Parameters outside of the layers (embeddings, the final norm) keep their data type, as under ddp. So do norms and
        # adapters beside packed weights, which have no other one.
        half = None if spec.quantize == "nf4" else half
        inside = fsdp.MixedPrecisionPolicy(param_dtype=half, reduce_dtype=comm_dtype, cast_forward_inputs=False)
        outside = fsdp.MixedPrecisionPolicy(reduce_dtype=comm_dtype, cast_forward_inputs=False)
        loaded = base_dtype(spec)
        cuda = world.device.type == "cuda"
        offload = fsdp.CPUOffloadPolicy(pin_memory=cuda) if spec.fsdp_offload else fsdp.OffloadPolicy()

        def cast(value: torch.Tensor) -> torch.Tensor:
            if not isinstance(value, tensor.DTensor) or not value.is_floating_point():  # a buffer, or packed
                return value
            return value.to(torch.float32 if value.requires_grad else loaded)

        # Layer by layer, so that no more than one layer is in memory in full or in two data types.
        self._blocks = blocks(self.model)  # sharding changes their types
        for block in self._blocks:
            quantize_layers(block, loaded, world.device)
            reshard = not keeps_gathered(spec)
            fsdp.fully_shard(
                block, mesh=mesh, mp_policy=inside, reshard_after_forward=reshard, offload_policy=offload
            )._apply(cast)
        quantize_layers(self.model, loaded, world.device)
        fsdp.fully_shard(self.model, mesh=mesh, mp_policy=outside, offload_policy=offload)._apply(cast)
        for block in self._blocks if spec.torch_compile else ():
            # Without the hooks that gather and free its weights, which are not part of `forward`.
            block.forward = torch.compile(block.forward)  # type: ignore[method-assign]

    def backward(self, batch: Batch, total: float, last: bool) -> torch.Tensor:
        # Full gradients of adapters are small: they are reduced in the last pass of the step only.
        self.model.set_requires_gradient_sync(last or not self.spec.lora_r)
        self.model.set_requires_all_reduce(last)
        with self.autocast():
            loss = self.plain(*batch)
        # FSDP averages over ranks; multiply by world size so that every token, or sample, has equal weight.
        (loss * (self.world.size * self.scale.value / max(1, total))).backward()
        return loss.detach()

    def step(self, lr: float) -> float:
        norm = self._clip()
        if not self.scale.update(norm):
            self.optimizer.zero_grad()
            return check_norm(norm) if self.scale.exhausted else norm
        check_norm(norm)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad()
        return norm

    def _clip(self) -> float:
        """Clip the gradients, and return their norm before that, without the factor of the loss."""
        parameters, limit = list(self.trained.values()), self.spec.max_grad_norm or float("inf")
        if not self.scale.enabled and not self.spec.fsdp_offload:
            clipped = nn.utils.clip_grad_norm_(parameters, limit)
            return float(clipped.full_tensor() if isinstance(clipped, tensor.DTensor) else clipped)
        # Offloaded gradients are in host memory, where NCCL cannot add up their norms.
        found = [p.grad for p in parameters if p.grad is not None]
        gradients = [grad.to_local() if isinstance(grad, tensor.DTensor) else grad for grad in found]
        if self.scale.enabled:
            torch._foreach_mul_(gradients, 1 / self.scale.value)
        own = nn.utils.get_total_norm(gradients) if gradients else torch.zeros(())
        total = own.to(self.world.device, torch.float64).square()
        if dist.get_world_size(self._shards) > 1:
            dist.all_reduce(total, group=self._shards)
        norm = math.sqrt(float(total))
        if norm > limit:
            torch._foreach_mul_(gradients, limit / (norm + 1e-6))
        return norm

    def loss(self, batch: Batch) -> torch.Tensor:
        with torch.no_grad(), self.autocast():
            loss: torch.Tensor = self.plain(*batch)
        if keeps_gathered(self.spec):  # no backward pass frees the layers
            self._free_layers()
        return loss

    def _free_layers(self) -> None:
        for block in self._blocks:
            block.reshard()  # type: ignore[operator]

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._full(self.trained)
        yield from persistent_buffers(self.model).items()

    def full_params(self) -> dict[str, torch.Tensor]:
        """Return the full trained weights by name on the first rank of every host. Every rank calls it."""
        return dict(self._full(self.trained))

    def set_params(self, values: Mapping[str, torch.Tensor] | None, host: World) -> None:
        """Set the trained weights to those of the first rank of every host. `host`: the ranks of this host."""
        self.model.reshard()
        self._free_layers()
        for name, parameter in self.trained.items():
            empty = torch.empty(parameter.shape, dtype=parameter.dtype, device=self.world.device)
            value = values[name].detach().to(self.world.device) if values else empty
            if host.size > 1:
                dist.broadcast(value, group=host.group, group_src=0)
            self._copy_shard(parameter.detach(), value)

    def _copy_shard(self, shard: Any, value: torch.Tensor) -> None:
        with torch.no_grad():
            own = tensor.distribute_tensor(value, shard.device_mesh, shard.placements, src_data_rank=None)
            shard.to_local().copy_(own.to_local())

    def save(self, folder: Path) -> ShardedWriting | None:
        state = self._state()
        if self.world.is_host_leader:
            self.scale.save(folder)
        if self.sharded_checkpoint:
            writer = dcp.FileSystemWriter(folder, single_file_per_rank=True, sync_files=True)
            writing = dcp.async_save(state, storage_writer=writer, process_group=self._group)
            return ShardedWriting(folder, writing, self.world)  # type: ignore[arg-type]
        for kind, tensors in state.items():
            write_full(folder, kind, {name: shard.shape for name, shard in tensors.items()}, self._full(tensors))
        return None

    def load(self, folder: Path) -> None:
        # A forward pass without a backward pass leaves the root gathered, and with fsdp_shard=gradients the layers, with their
        # weights before this call.
        self.model.reshard()
        self._free_layers()
        self.scale.load(folder)
        create_moments(self.optimizer, self.trained.values(), folder)
        state = self._state()
        if self.sharded_checkpoint:
            dcp.load(state, storage_reader=dcp.FileSystemReader(folder), no_dist=True)
            return
        for kind, shards in state.items():
            kept = read_full(folder, kind)
            for name, shard in shards.items():
                self._copy_shard(shard, kept[name].to(self.world.device))

    def _state(self) -> StateDict:
        kept = self.optimizer.state
        moments = {kind: {name: kept[p][kind] for name, p in self.trained.items()} for kind in MOMENTS}
        return {"trained": {name: p.detach() for name, p in self.trained.items()}, **moments}

    def _full(self, tensors: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
        """Assemble full tensors from their shards, one at a time. Only the first rank of every host receives them."""
        for name, shard in tensors.items():
            value = shard.to(self.world.device).full_tensor() if isinstance(shard, tensor.DTensor) else shard
            if self.world.is_host_leader:
                yield name, value.detach().to("cpu", copy=True)
