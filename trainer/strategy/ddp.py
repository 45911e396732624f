"""DistributedDataParallel: every rank holds the full model, and gradients are averaged once per step.

https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.common.errors import UserError
from trainer.common.lazy import LazyModule
from trainer.costs.cost import Layout, State, gradient_bytes_per_number, micro_batches, ring_fraction
from trainer.data.shares import share
from trainer.distributed.balance import Balance
from trainer.strategy.base import Batch, Rows, Strategy, Update, check_norm
from trainer.strategy.loss_scale import MIN_SCALE
from trainer.strategy.plan import StrategyPlan

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

# Bytes of gradients in the first bucket, and in every further one (bucket_cap_mb).
_BUCKETS = (2**20, 25 * 2**20)


def gradient_copies(spec: RunSpec, ranks: int, world: int) -> int:
    """Return how many copies of the gradients DDP holds on each of `ranks` ranks that share gradients.

    In the second step DDP rebuilds its buckets, while micro-batches before the last accumulate gradients beside them.
    """
    return 2 if ranks > 1 and micro_batches(spec, world) > 1 else 1


class DDPPlan(StrategyPlan):
    auto = "exact"
    shares_rows_by_speed = True

    def strategy_class(self, spec: RunSpec) -> type[DDP]:
        return DDP

    def accelerate_config(self, spec: RunSpec, processes: Sequence[int]) -> dict[str, Any]:
        return {}

    def state(self, spec: RunSpec, shape: Shape, layout: Layout, *, cuda: bool) -> State:
        state = super().state(spec, shape, layout, cuda=cuda)
        copies = gradient_copies(spec, layout.world, layout.world)
        half = spec.comm_dtype == "bf16" and layout.world > 1
        return replace(state, gradients=state.gradients * copies, buffers=shape.trained(spec) * 2 if half else 0)

    def comm_bytes(self, spec: RunSpec, shape: Shape, layout: Layout, *, gloo: bool) -> float:
        return self.replica_comm_bytes(spec, shape, layout, micro_batches(spec, layout.world), gloo=gloo)

    def replica_comm_bytes(self, spec: RunSpec, shape: Shape, layout: Layout, micro: int, *, gloo: bool) -> float:
        """Return the bytes that a process sends in a step of `micro` micro-batches within a replica of `layout`."""
        return 2 * ring_fraction(layout.world) * shape.trained(spec) * gradient_bytes_per_number(spec)

    def exposed_seconds(self, spec: RunSpec, shape: Shape, communication: float, micro_batch: float) -> float:
        """DDP sends a bucket of gradients while the backward pass computes the next one."""
        passes = 3 - bool(spec.lora_r) + spec.gradient_checkpointing
        backward = micro_batch * (passes - 1) / passes
        gradients = shape.trained(spec) * 4
        ready, sent = 0, 0.0  # bytes of gradients that are computed, and the second at which they are sent
        while ready < gradients:
            size = min(_BUCKETS[ready > 0], gradients - ready)
            ready += size
            sent = max(sent, backward * ready / gradients) + communication * size / gradients
        return max(0.0, sent - backward)


PLAN = DDPPlan()


def bf16_mean(group: dist.ProcessGroup | None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket of gradients in bfloat16, half the bytes of float32. PyTorch's own hook does not support gloo.

    The gradient is divided before the all-reduce, as in PyTorch's hook, so that a sum over many ranks keeps its precision.
    """
    gradient = bucket.buffer()
    small = gradient.div(dist.get_world_size(group)).to(torch.bfloat16)
    work = dist.all_reduce(small, group=group, async_op=True)
    return work.get_future().then(lambda done: gradient.copy_(done.value()[0]))


class DDP(Strategy):
    """Data parallel training on any number of ranks, including one."""

    def __init__(self, spec: RunSpec, world: World, module: ModelWithLoss, replica_group: World | None = None) -> None:
        """`replica_group`: the ranks that average gradients, if not all."""
        from trainer.models.optim import make_optimizer

        super().__init__(spec, world, module)
        self.replica_group = replica_group or world
        self.trained = {name: p for name, p in module.model.named_parameters() if p.requires_grad}
        self.module: nn.Module = module
        if world.size > 1:
            for parameter in self.trained.values():
                dist.broadcast(parameter.data, 0)
        if self.replica_group.size > 1:
            self.module = nn.parallel.DistributedDataParallel(
                module,
                process_group=self.replica_group.group,
                device_ids=[world.device] if world.device.type == "cuda" else None,
                gradient_as_bucket_view=True,
                # Every rank loads the same files, so the frozen base weights are not broadcast.
                init_sync=False,
                forward_sync_buffers=False,
            )
            if spec.comm_dtype == "bf16":
                # DDP compares the annotations with its types; `from __future__ import annotations` makes them strings.
                bf16_mean.__annotations__["bucket"] = dist.GradBucket
                bf16_mean.__annotations__["return"] = torch.futures.Future[torch.Tensor]
                self.module.register_comm_hook(self.replica_group.group, bf16_mean)
        self.optimizer = make_optimizer(spec, self.trained.values())
        self.scaler = torch.amp.GradScaler(world.device.type, enabled=spec.precision == "fp16-mixed")
        self.balance = (
            Balance(world.size) if spec.balance == "auto" and world.size > 1 and replica_group is None else None
        )
        self._fresh = self.replica_group.size > 1  # no step has run yet
        self._forwards: list[float | tuple[torch.cuda.Event, torch.cuda.Event]] = []
        # The end of the computation of gradients, and of the backward pass, which also waits for the averages.
        self._backwards: list[float | tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._computed: float | torch.cuda.Event = 0.0
        if self.replica_group.size > 1:
            for parameter in self.trained.values():
                parameter.register_post_accumulate_grad_hook(self._note_gradient)

    def backward(self, batch: Batch, total: float, last: bool) -> torch.Tensor:
        skip_reduce = isinstance(self.module, nn.parallel.DistributedDataParallel) and not last
        with self.module.no_sync() if skip_reduce else contextlib.nullcontext():  # type: ignore[operator]
            with self.autocast(), self._timed():
                loss = self.module(*batch)
            # DDP averages over ranks; multiply by world size so that every token, or sample, has equal weight.
            self.scaler.scale(loss * (self.replica_group.size / max(1, total))).backward()
        if self.replica_group.size > 1 and last:
            self._note_averages()
        return loss.detach()

    def _note_gradient(self, parameter: torch.Tensor) -> None:
        """Record when a gradient is computed; that of the last parameter remains."""
        if self.world.device.type != "cuda":
            self._computed = time.perf_counter()
        else:
            if not isinstance(self._computed, torch.cuda.Event):
                self._computed = torch.cuda.Event(enable_timing=True)
            self._computed.record()

    def _note_averages(self) -> None:
        if isinstance(self._computed, torch.cuda.Event):
            ended = torch.cuda.Event(enable_timing=True)
            ended.record()
            self._backwards.append((self._computed, ended))
        elif self._computed:
            self._backwards.append(time.perf_counter() - self._computed)
        self._computed = 0.0

    @contextlib.contextmanager
    def _timed(self) -> Iterator[None]:
        """Time the forward pass. Its time grows with the rows and, unlike the last backward pass, it waits for no other rank."""
        if self.balance is None:
            yield
        elif self.world.device.type == "cuda":
            began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            began.record()
            yield
            ended.record()
            self._forwards.append((began, ended))
        else:
            start = time.perf_counter()
            yield
            self._forwards.append(time.perf_counter() - start)

    def rank_seconds(self) -> float:
        return self._total(self._forwards)

    def comm_seconds(self) -> float:
        return self._total(self._backwards)

    def _total(self, measured: list[float | tuple[torch.cuda.Event, torch.cuda.Event]]) -> float:
        if any(isinstance(each, tuple) for each in measured):
            torch.cuda.synchronize(self.world.device)
        total = sum(e[0].elapsed_time(e[1]) / 1e3 if isinstance(e, tuple) else e for e in measured)
        measured.clear()
        return total

    def shares(self, rows: int) -> list[int]:
        return self.balance.shares(rows) if self.balance else super().shares(rows)

    def updates(self, step: int, rows: Rows) -> list[Update]:
        shares = self.shares(len(rows))
        self.rows = [len(rows[share(len(rows), shares, rank)]) for rank in range(self.world.size)]
        return super().updates(step, rows)

    def update_shares(self, seconds: list[float]) -> None:
        if self.balance:
            self.balance.update(seconds, self.rows)

    def step(self, lr: float) -> float:
        self.scaler.unscale_(self.optimizer)
        limit = self.spec.max_grad_norm or float("inf")
        norm = float(nn.utils.clip_grad_norm_(self.trained.values(), limit))
        if not self.scaler.is_enabled():
            check_norm(norm)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.scaler.step(self.optimizer)
        self.scaler.update()
        if not math.isfinite(norm) and self.scaler.get_scale() < MIN_SCALE:
            check_norm(norm)
        # DDP rebuilds its buckets after the first backward pass. Gradients that are views into the old buckets would keep
        # them alive. From the second step on, gradients stay in the new buckets.
        self.optimizer.zero_grad(set_to_none=self._fresh)
        self._fresh = False
        return norm

    def loss(self, batch: Batch) -> torch.Tensor:
        with torch.no_grad(), self.autocast():
            return self.plain(*batch)

    def full_params(self) -> dict[str, torch.Tensor]:
        return {name: parameter.detach() for name, parameter in self.trained.items()}

    def set_params(self, values: Mapping[str, torch.Tensor] | None, host: World) -> None:
        """Set the trained weights to those of the first rank of every host. `host`: the ranks of this host."""
        with torch.no_grad():
            for name, parameter in self.trained.items():
                if values:
                    parameter.copy_(values[name])
                if host.size > 1:
                    dist.broadcast(parameter.data, group=host.group, group_src=0)

    def save(self, folder: Path) -> None:
        from safetensors.torch import save_file

        save_file({name: p.detach().contiguous() for name, p in self.trained.items()}, folder / "trained.safetensors")
        state = {"optimizer": self.optimizer.state_dict(), "scaler": self.scaler.state_dict()}
        torch.save(state | (self.balance.state() if self.balance else {"costs": []}), folder / "optimizer.pt")

    def load(self, folder: Path) -> None:
        from safetensors.torch import load_file

        kept = load_file(folder / "trained.safetensors", device=str(self.world.device))
        if lost := next((name for name in self.trained if name not in kept), ""):
            raise UserError(
                f"checkpoint: {folder} has no {lost}, which this version trains: set another run name with run="
            )
        with torch.no_grad():
            for name, parameter in self.trained.items():
                parameter.copy_(kept[name])
        state = torch.load(folder / "optimizer.pt", map_location=self.world.device, weights_only=True)
        self.optimizer.load_state_dict(state["optimizer"])
        self.scaler.load_state_dict(state["scaler"])
        if self.balance:
            self.balance = Balance(self.world.size, state)
