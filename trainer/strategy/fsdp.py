"""FSDP2: every rank keeps a part of every block's weights, gradients and moments, and gathers a block when it is its turn.

https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
"""

from collections import Counter
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from trainer.config.run_spec import RunSpec
from trainer.distributed.world import World
from trainer.errors import DiskError, UserError, disk_failure
from trainer.model import TokenLoss, base_dtype
from trainer.optim import make_optimizer
from trainer.strategy import fsdp_exchange as exchange
from trainer.strategy.base import Batch, Strategy
from trainer.strategy.full_state_dict import MOMENTS, State, persistent_buffers, read_whole, step_of, write_whole

METADATA = ".metadata"  # which tensor lies where in a checkpoint's files: torch's name for it


def make_mesh(spec: RunSpec, world: World, crew: World | None = None) -> DeviceMesh:
    """Return the ranks as a line (one model shared by all), or as hosts x ranks of a host (a model on every host).

    Those of a `crew` are always a line.

    Raises:
        UserError: the hosts have unlike numbers of ranks, and each is to hold a model.
    """
    kind = world.device.type
    if crew:
        group = dist.group.WORLD if crew.group is None else crew.group
        return DeviceMesh.from_group(group, kind)
    if spec.fsdp_shard == "all":
        return init_device_mesh(kind, (world.size,))
    ranks = Counter(world.gather(world.node_rank))
    if len(set(ranks.values())) > 1:
        raise UserError(
            f"fsdp_shard: host needs as many ranks on every host, got {', '.join(map(str, ranks.values()))}: "
            "take fsdp_shard=all, or set cluster_processes"
        )
    return init_device_mesh(kind, (len(ranks), world.size // len(ranks)), mesh_dim_names=("hosts", "ranks"))


def a_host_each(mesh: DeviceMesh, world: World) -> bool:
    """Tell whether ranks that share a model have a host each: then no two of them send over one link. Every rank calls it."""
    hosts = world.gather(world.node_rank)
    group = [hosts[rank] for rank in dist.get_process_group_ranks(mesh.get_group(mesh.ndim - 1))]
    return len(set(group)) == len(group)


def blocks(model: nn.Module) -> list[nn.Module]:
    """Return the model's repeated layers, by what transformers says must stay in one piece."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    kinds = set(getattr(base, "_no_split_modules", None) or ())
    return [part for part in base.modules() if type(part).__name__ in kinds]


class Parts:
    """A checkpoint in parts that torch writes in a thread beside the training, from a copy of the state."""

    def __init__(self, folder: Path, writing: Future[Any], world: World) -> None:
        self._folder, self._writing, self._world = folder, writing, world

    def done(self) -> bool:
        return self._writing.done()

    def finish(self) -> None:
        try:
            self._writing.result()
        except Exception as error:
            raise DiskError(f"checkpoint: {_why(error)}: make room and start the run again") from error
        # Only the first rank's host has it, and every host needs it.
        mine = (self._folder / METADATA).read_bytes() if self._world.rank == 0 else b""
        metadata = self._world.gather(mine)[0]
        if self._world.is_host_leader:
            (self._folder / METADATA).write_bytes(metadata)


def _why(error: BaseException) -> str:
    """Say which rank could not write its part, and why."""
    failures = getattr(error, "failures", {})  # CheckpointException: rank -> (its exception, traceback)
    for rank, failure in failures.items():
        return f"rank {rank} could not write its part: {disk_failure(failure[0]) or failure[0]}"
    return f"a part could not be written: {disk_failure(error) or error}"


class FSDP(Strategy):
    """Fully sharded data parallel on any number of ranks."""

    lockstep = True

    def __init__(self, spec: RunSpec, world: World, module: TokenLoss, crew: World | None = None) -> None:
        """`crew`: the ranks that share a model, if not all."""
        super().__init__(spec, crew or world, module)
        # Adapters are small: every host keeps them whole, and so it does where replicas have whole ones anyway. Other full
        # weights are written in parts, by the ranks that own them.
        self.sharded_checkpoint = not spec.lora_r and crew is None
        self.model: Any = module.model
        for parameter in self.model.parameters() if spec.lora_r else ():
            if parameter.requires_grad:
                fresh = parameter.detach().to(world.device)
                dist.broadcast(fresh, 0)
                parameter.data.copy_(fresh)
        mesh = make_mesh(spec, world, crew)
        wire = torch.bfloat16 if spec.gradient_wire == "bf16" else torch.float32
        half = torch.bfloat16 if spec.precision == "bf16-mixed" else None
        # autocast would make bfloat16 of a block's weights anyway; gathered so, they are half the bytes. What is outside
        # of the blocks (embeddings, the last norm) stays float32, as under ddp.
        inside = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=wire, cast_forward_inputs=False)
        outside = MixedPrecisionPolicy(reduce_dtype=wire, cast_forward_inputs=False)
        frozen = base_dtype(spec)

        def cast(tensor: torch.Tensor) -> torch.Tensor:
            if not isinstance(tensor, DTensor):  # a buffer
                return tensor
            return tensor.to(torch.float32 if tensor.requires_grad else frozen)

        # One after the other: no more of the model than a block is here whole, or of two kinds.
        for block in blocks(self.model):
            fully_shard(block, mesh=mesh, mp_policy=inside)._apply(cast)
        fully_shard(self.model, mesh=mesh, mp_policy=outside)._apply(cast)
        if world.device.type == "cpu" and a_host_each(mesh, world):
            for part in self.model.modules():
                if isinstance(part, FSDPModule):
                    part.set_custom_all_gather(exchange.AllGather())
                    part.set_custom_reduce_scatter(exchange.ReduceScatter())
        self.trained = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        self.optimizer = make_optimizer(spec, self.trained.values())
        if self.sharded_checkpoint:
            # Its threads talk beside the training, so not in the training's group; NCCL cannot do what they need.
            self._group, _ = dist.new_subgroups(mesh.size(mesh.ndim - 1), backend="gloo")

    def backward(self, batch: Batch, tokens: int, last: bool) -> torch.Tensor:
        # Whole gradients of adapters are small enough to wait for the step's last pass, those of a whole model are not.
        self.model.set_requires_gradient_sync(last or not self.spec.lora_r)
        self.model.set_requires_all_reduce(last)
        with self.autocast():
            loss = self.plain(*batch)
        # FSDP divides the sum over ranks by their number: times it back, so that tokens alone weigh.
        (loss * (self.world.size / max(1, tokens))).backward()
        return loss.detach()

    def step(self, lr: float) -> float:
        norm = nn.utils.clip_grad_norm_(self.trained.values(), self.spec.max_grad_norm or float("inf"))
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)

    @torch.no_grad()
    def loss(self, batch: Batch) -> torch.Tensor:
        with self.autocast():
            return self.plain(*batch)

    def weights(self) -> dict[str, torch.Tensor]:
        return self._whole(self.trained) | persistent_buffers(self.model)

    def whole(self) -> dict[str, torch.Tensor]:
        """Return what is trained, by name, on the first rank of every host. Every rank calls it."""
        return self._whole(self.trained)

    @torch.no_grad()
    def put(self, values: Mapping[str, torch.Tensor] | None, host: World) -> None:
        """Make it what the first rank of every host says; `host`: the ranks of this one."""
        self.model.reshard()
        for name, parameter in self.trained.items():
            empty = torch.empty(parameter.shape, dtype=parameter.dtype, device=self.world.device)
            value = values[name].detach().to(self.world.device) if values else empty
            if host.size > 1:
                dist.broadcast(value, group=host.group, group_src=0)
            self._fill(parameter.detach(), value)

    def _fill(self, part: Any, value: torch.Tensor) -> None:
        """Copy this rank's part of a whole tensor."""
        part.copy_(distribute_tensor(value, part.device_mesh, part.placements, src_data_rank=None))

    def save(self, folder: Path) -> Parts | None:
        state = self._state()
        if self.sharded_checkpoint:
            writer = FileSystemWriter(folder, single_file_per_rank=True, sync_files=True)
            writing = dcp.async_save(state, storage_writer=writer, process_group=self._group)
            return Parts(folder, writing, self.world)  # type: ignore[arg-type]
        for kind, tensors in state.items():
            write_whole(folder, kind, self._whole(tensors))
        return None

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        # A pass without a backward one leaves what is outside of the blocks gathered: as it was before this.
        self.model.reshard()
        step = torch.tensor(float(step_of(folder)))
        for parameter in self.trained.values():
            moments = {kind: torch.zeros_like(parameter) for kind in MOMENTS}
            self.optimizer.state[parameter] = {"step": step.to(self.world.device, copy=True), **moments}
        state = self._state()
        if self.sharded_checkpoint:
            dcp.load(state, storage_reader=FileSystemReader(folder), no_dist=True)
            return
        for kind, parts in state.items():
            kept = read_whole(folder, kind)
            for name, part in parts.items():
                self._fill(part, kept[name].to(part.device))

    def _state(self) -> State:
        """Return what is trained and its moments, each this rank's part."""
        kept = self.optimizer.state
        moments = {kind: {name: kept[p][kind] for name, p in self.trained.items()} for kind in MOMENTS}
        return {"trained": {name: p.detach() for name, p in self.trained.items()}, **moments}

    def _whole(self, tensors: dict[str, Any]) -> dict[str, torch.Tensor]:
        """Put tensors together from their parts, one after the other; the first rank of every host keeps them."""
        whole = {}
        for name, tensor in tensors.items():
            value = (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()
            if self.world.is_host_leader:
                whole[name] = value.to("cpu", copy=True)
        return whole
