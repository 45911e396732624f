"""FSDP2: every rank holds a shard of every layer's weights, gradients and moments, and gathers a layer when it is needed.

https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.distributed.listeners import restrict_listeners
from trainer.errors import DiskError, UserError, disk_failure
from trainer.planner.alternatives import Alternative, Alternatives, gradient_alternatives
from trainer.planner.cost import Layout, State, gradient_bytes_per_number, micro_batches, ring_fraction, root_bytes
from trainer.planner.model_shape import layer_class, shape_of
from trainer.strategy.base import Batch, Strategy, check_norm
from trainer.strategy.full_state_dict import MOMENTS, persistent_buffers, read_full, step_of, write_full
from trainer.strategy.full_state_dict import State as StateDict
from trainer.strategy.lazy import LazyModule
from trainer.strategy.plan import StrategyPlan, reject_generation, reject_unshardable

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch import nn
    from torch.distributed import device_mesh, fsdp, tensor

    from trainer.config import RunSpec
    from trainer.distributed.world import World
    from trainer.model import TokenLoss
    from trainer.planner.model_shape import Shape
else:
    torch, dist, nn = LazyModule("torch"), LazyModule("torch.distributed"), LazyModule("torch.nn")
    dcp, fsdp = LazyModule("torch.distributed.checkpoint"), LazyModule("torch.distributed.fsdp")
    device_mesh, tensor = LazyModule("torch.distributed.device_mesh"), LazyModule("torch.distributed.tensor")

METADATA = ".metadata"  # PyTorch's index of the tensors in a checkpoint's files


def sharded_state(spec: RunSpec, state: State, shape: Shape, shards: int, bytes_per_weight: int) -> State:
    """Return the state of one of `shards` shards, with the weights that FSDP gathers at a time."""
    root = root_bytes(shape, bytes_per_weight)  # freed at the end of the backward pass
    # The current layer and the prefetched one: as received, and assembled.
    gathered = 3 * (state.base - root) // shape.layers
    if keeps_gathered(spec):
        gathered += shape.layers * shape.layer_parameters * _gathered_bytes(spec)
    return state.sharded(shards, root + gathered)


def keeps_gathered(spec: RunSpec) -> bool:
    """Return whether layers stay gathered from the forward to the backward pass: SHARD_GRAD_OP of the first FSDP."""
    return spec.fsdp_shard == "gradients"


def _gathered_bytes(spec: RunSpec) -> int:
    """Return the bytes of one gathered weight of a layer."""
    return 2 if spec.precision == "bf16-mixed" else 4


class FSDPPlan(StrategyPlan):
    """The plan of FSDP2."""

    summary = "every rank holds a shard of the model"
    auto = "exact"
    gain = 1.0
    cost = "every pass sends the weights of all layers"

    def strategy_class(self, spec: RunSpec) -> type[FSDP]:
        return FSDP

    def validate(self, spec: RunSpec) -> None:
        reject_unshardable(spec, "strategy")
        reject_generation(spec, "strategy")

    def sharded_weights(self, spec: RunSpec) -> bool:
        return True

    def alternatives(self, spec: RunSpec) -> list[Alternatives]:
        # Either value may be faster, so both are tried.
        shards = [
            Alternative(),
            *(Alternative({"fsdp_shard": value}) for value in ("all", "gradients", "host") if value != spec.fsdp_shard),
        ]
        return [*super().alternatives(spec), shards, *gradient_alternatives(spec)]

    def runs_on(self, spec: RunSpec, shape: Shape, layout: Layout) -> bool:
        return spec.fsdp_shard != "host" or (len(set(layout.processes)) == 1 and layout.processes[0] > 1)

    def state(self, spec: RunSpec, shape: Shape, layout: Layout, *, cuda: bool) -> State:
        state = super().state(spec, shape, layout, cuda=cuda)
        shards = min(layout.processes) if spec.fsdp_shard == "host" else layout.world
        return sharded_state(spec, state, shape, shards, self.bytes_per_weight(spec))

    def outside_step(self, spec: RunSpec, shape: Shape, layout: Layout, state: State) -> int:
        if spec.lora_r:
            return 0
        # A checkpoint is written from a copy. At the end the first rank of a host assembles the full model.
        return state.held + state.gathered + max(state.weights + state.optimizer, shape.trained(spec) * 4)

    def accelerate_config(self, spec: RunSpec, hosts: int, world: int) -> dict[str, Any]:
        return {
            "distributed_type": "FSDP",
            "fsdp_config": {
                "fsdp_version": 2,
                "fsdp_reshard_after_forward": not keeps_gathered(spec),
                "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
                "fsdp_transformer_layer_cls_to_wrap": layer_class(shape_of(spec).kind),
                "fsdp_activation_checkpointing": spec.gradient_checkpointing,
                "fsdp_cpu_ram_efficient_loading": True,
                "fsdp_offload_params": False,
                "fsdp_state_dict_type": "SHARDED_STATE_DICT",
            },
        }

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
        layers = shape.layers * shape.layer_parameters * weight
        layers += trained * weight if spec.lora_r else 0
        # The forward and the backward pass gather the layers, unless they stay gathered in between, as the root does.
        passes = 1 if keeps_gathered(spec) else 2
        gathered = ring * (passes * layers + root_bytes(shape, self.bytes_per_weight(spec))) * micro
        # gloo implements reduce-scatter as an all-reduce. trainer.strategy.fsdp_exchange replaces it if every rank has a
        # separate host.
        scattered = (2 if gloo and max(layout.processes) > 1 else 1) * ring * trained * number
        return gathered + scattered * (1 if spec.lora_r else micro)


def make_mesh(spec: RunSpec, world: World, replica_group: World | None = None) -> device_mesh.DeviceMesh:
    """Return a mesh of all ranks (one sharded model), or of hosts x ranks of a host (one sharded model per host).

    The mesh of a `replica_group` always has one dimension.

    Raises:
        UserError: one model per host, but the numbers of ranks per host differ.
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


def one_rank_per_host(mesh: device_mesh.DeviceMesh, world: World) -> bool:
    """Return whether every rank of a sharded model has a separate host, and so a separate link. Every rank calls it."""
    hosts = world.gather(world.node_rank)
    group = [hosts[rank] for rank in dist.get_process_group_ranks(mesh.get_group(mesh.ndim - 1))]
    return len(set(group)) == len(group)


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
            raise DiskError(f"checkpoint: {_why(error)}: free disk space and start the run again") from error
        # PyTorch writes it on the first rank only, and every host needs it.
        mine = (self._folder / METADATA).read_bytes() if self._world.rank == 0 else b""
        metadata = self._world.gather_bytes(mine)[0]
        if self._world.is_host_leader:
            (self._folder / METADATA).write_bytes(metadata)


def _why(error: BaseException) -> str:
    """Return which rank failed to write its shard, and why."""
    failures = getattr(error, "failures", {})  # CheckpointException: rank -> (its exception, traceback)
    for rank, failure in failures.items():
        return f"rank {rank} could not write its shard: {disk_failure(failure[0]) or failure[0]}"
    return f"a shard could not be written: {disk_failure(error) or error}"


class FSDP(Strategy):
    """Fully sharded data parallel on any number of ranks."""

    lockstep = True

    def __init__(self, spec: RunSpec, world: World, module: TokenLoss, replica_group: World | None = None) -> None:
        """`replica_group`: the ranks that shard one model, if not all."""
        from trainer.optim import make_optimizer

        super().__init__(spec, replica_group or world, module)
        # Adapters and the state of replicas are saved in full on every host. All other full weights are saved as shards.
        self.sharded_checkpoint = not spec.lora_r and replica_group is None
        self.model: Any = module.model
        for parameter in self.model.parameters() if spec.lora_r else ():
            if parameter.requires_grad:
                fresh = parameter.detach().to(world.device)
                dist.broadcast(fresh, 0)
                parameter.data.copy_(fresh)
        mesh = make_mesh(spec, world, replica_group)
        self._shard(spec, world, mesh)
        self.trained = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        self.optimizer = make_optimizer(spec, self.trained.values())
        if self.sharded_checkpoint:
            # The writer threads communicate during training, so they need a separate group. NCCL does not support their
            # collectives.
            self._group, _ = dist.new_subgroups(mesh.size(mesh.ndim - 1), backend="gloo")
            restrict_listeners()

    def _shard(self, spec: RunSpec, world: World, mesh: device_mesh.DeviceMesh) -> None:
        """Replace the parameters of the model by shards on the ranks of `mesh`."""
        from trainer.model import base_dtype
        from trainer.strategy import fsdp_exchange as exchange

        comm_dtype = torch.bfloat16 if spec.gradient_comm_dtype == "bf16" else torch.float32
        half = torch.bfloat16 if spec.precision == "bf16-mixed" else None
        # autocast would cast the weights of a layer to bfloat16 anyway; gathered in bfloat16 they are half the bytes.
        # Parameters outside of the layers (embeddings, the final norm) stay float32, as under ddp.
        inside = fsdp.MixedPrecisionPolicy(param_dtype=half, reduce_dtype=comm_dtype, cast_forward_inputs=False)
        outside = fsdp.MixedPrecisionPolicy(reduce_dtype=comm_dtype, cast_forward_inputs=False)
        frozen = base_dtype(spec)

        def cast(value: torch.Tensor) -> torch.Tensor:
            if not isinstance(value, tensor.DTensor):  # a buffer
                return value
            return value.to(torch.float32 if value.requires_grad else frozen)

        # Layer by layer, so that no more than one layer is in memory in full or in two data types.
        for block in blocks(self.model):
            reshard = not keeps_gathered(spec)
            fsdp.fully_shard(block, mesh=mesh, mp_policy=inside, reshard_after_forward=reshard)._apply(cast)
        fsdp.fully_shard(self.model, mesh=mesh, mp_policy=outside)._apply(cast)
        if world.device.type == "cpu" and one_rank_per_host(mesh, world):
            for part in self.model.modules():
                if isinstance(part, fsdp.FSDPModule):
                    part.set_custom_all_gather(exchange.AllGather())
                    part.set_custom_reduce_scatter(exchange.ReduceScatter())

    def backward(self, batch: Batch, tokens: int, last: bool) -> torch.Tensor:
        # Full gradients of adapters are small: they are reduced in the last pass of the step only.
        self.model.set_requires_gradient_sync(last or not self.spec.lora_r)
        self.model.set_requires_all_reduce(last)
        with self.autocast():
            loss = self.plain(*batch)
        # FSDP averages over ranks; multiply by world size so that every token has equal weight.
        (loss * (self.world.size / max(1, tokens))).backward()
        return loss.detach()

    def step(self, lr: float) -> float:
        clipped = nn.utils.clip_grad_norm_(self.trained.values(), self.spec.max_grad_norm or float("inf"))
        norm = check_norm(float(clipped.full_tensor() if isinstance(clipped, tensor.DTensor) else clipped))
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad()
        return norm

    def loss(self, batch: Batch) -> torch.Tensor:
        with torch.no_grad(), self.autocast():
            loss: torch.Tensor = self.plain(*batch)
        if keeps_gathered(self.spec):  # no backward pass frees the layers
            for block in blocks(self.model):
                block.reshard()  # type: ignore[operator]
        return loss

    def weights(self) -> dict[str, torch.Tensor]:
        return self._gather_full(self.trained) | persistent_buffers(self.model)

    def full_params(self) -> dict[str, torch.Tensor]:
        """Return the full trained weights by name on the first rank of every host. Every rank calls it."""
        return self._gather_full(self.trained)

    def set_params(self, values: Mapping[str, torch.Tensor] | None, host: World) -> None:
        """Set the trained weights to those of the first rank of every host. `host`: the ranks of this host."""
        self.model.reshard()
        for name, parameter in self.trained.items():
            empty = torch.empty(parameter.shape, dtype=parameter.dtype, device=self.world.device)
            value = values[name].detach().to(self.world.device) if values else empty
            if host.size > 1:
                dist.broadcast(value, group=host.group, group_src=0)
            self._copy_shard(parameter.detach(), value)

    def _copy_shard(self, shard: Any, value: torch.Tensor) -> None:
        """Copy this rank's shard of a full tensor."""
        with torch.no_grad():
            shard.copy_(tensor.distribute_tensor(value, shard.device_mesh, shard.placements, src_data_rank=None))

    def save(self, folder: Path) -> ShardedWriting | None:
        state = self._state()
        if self.sharded_checkpoint:
            writer = dcp.FileSystemWriter(folder, single_file_per_rank=True, sync_files=True)
            writing = dcp.async_save(state, storage_writer=writer, process_group=self._group)
            return ShardedWriting(folder, writing, self.world)  # type: ignore[arg-type]
        for kind, tensors in state.items():
            write_full(folder, kind, self._gather_full(tensors))
        return None

    def load(self, folder: Path) -> None:
        # A forward pass without a backward pass leaves the root gathered, with its weights before this call.
        self.model.reshard()
        step = torch.tensor(float(step_of(folder)))
        for parameter in self.trained.values():
            moments = {kind: torch.zeros_like(parameter) for kind in MOMENTS}
            self.optimizer.state[parameter] = {"step": step.to(self.world.device, copy=True), **moments}
        state = self._state()
        if self.sharded_checkpoint:
            dcp.load(state, storage_reader=dcp.FileSystemReader(folder), no_dist=True)
            return
        for kind, shards in state.items():
            kept = read_full(folder, kind)
            for name, shard in shards.items():
                self._copy_shard(shard, kept[name].to(shard.device))

    def _state(self) -> StateDict:
        """Return this rank's shards of the trained weights and their moments."""
        kept = self.optimizer.state
        moments = {kind: {name: kept[p][kind] for name, p in self.trained.items()} for kind in MOMENTS}
        return {"trained": {name: p.detach() for name, p in self.trained.items()}, **moments}

    def _gather_full(self, tensors: dict[str, Any]) -> dict[str, torch.Tensor]:
        """Assemble full tensors from their shards, one tensor at a time. The first rank of every host keeps them."""
        full = {}
        for name, shard in tensors.items():
            value = (shard.full_tensor() if isinstance(shard, tensor.DTensor) else shard).detach()
            if self.world.is_host_leader:
                full[name] = value.to("cpu", copy=True)
        return full
