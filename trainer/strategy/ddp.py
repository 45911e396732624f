"""DistributedDataParallel: every rank has the whole model, gradients are averaged once a step.

https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html
"""

import contextlib
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from trainer.config.run_spec import RunSpec
from trainer.data.order import share
from trainer.distributed.balance import Balance
from trainer.distributed.world import World
from trainer.model import TokenLoss
from trainer.optim import make_optimizer
from trainer.strategy.base import Batch, Rows, Strategy, Update


def bf16_mean(group: dist.ProcessGroup | None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket of gradients with bfloat16 on the wire: half the bytes. torch's own hook refuses gloo.

    Divided before it is sent, as torch's hook does, so that a sum over many ranks does not leave bfloat16's best digits.
    """
    gradient = bucket.buffer()
    small = gradient.div(dist.get_world_size(group)).to(torch.bfloat16)
    work = dist.all_reduce(small, group=group, async_op=True)
    return work.get_future().then(lambda done: gradient.copy_(done.value()[0]))


class DDP(Strategy):
    """Data parallel on any number of ranks, one included."""

    def __init__(self, spec: RunSpec, world: World, module: TokenLoss, crew: World | None = None) -> None:
        """`crew`: the ranks that average gradients, if not all."""
        super().__init__(spec, world, module)
        self.crew = crew or world
        self.trained = {name: p for name, p in module.model.named_parameters() if p.requires_grad}
        self.module: nn.Module = module
        if world.size > 1:
            for parameter in self.trained.values():
                dist.broadcast(parameter.data, 0)
        if self.crew.size > 1:
            self.module = DistributedDataParallel(
                module,
                process_group=self.crew.group,
                device_ids=[world.device] if world.device.type == "cuda" else None,
                gradient_as_bucket_view=True,
                forward_sync_buffers=False,
                # Every rank read the same files: the frozen base need not travel again.
                init_sync=False,
            )
            if spec.gradient_wire == "bf16":
                self.module.register_comm_hook(self.crew.group, bf16_mean)
        self.optimizer = make_optimizer(spec, self.trained.values())
        self.scaler = torch.amp.GradScaler(world.device.type, enabled=spec.precision == "fp16-mixed")
        self.balance = Balance(world.size) if spec.balance == "auto" and world.size > 1 and crew is None else None
        self._fresh = self.crew.size > 1  # no step was taken yet
        self._forwards: list[float | tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def backward(self, batch: Batch, tokens: int, last: bool) -> torch.Tensor:
        silent = isinstance(self.module, DistributedDataParallel) and not last
        with self.module.no_sync() if silent else contextlib.nullcontext():  # type: ignore[operator]
            with self.autocast(), self._timed():
                loss = self.module(*batch)
            # DDP divides the sum over ranks by their number: times it back, so that tokens alone weigh.
            self.scaler.scale(loss * (self.crew.size / max(1, tokens))).backward()
        return loss.detach()

    @contextlib.contextmanager
    def _timed(self) -> Iterator[None]:
        """Time the forward pass. It waits for nobody, unlike the last backward pass, and grows with the rows as that does."""
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
        if any(isinstance(each, tuple) for each in self._forwards):
            torch.cuda.synchronize(self.world.device)
        total = sum(e[0].elapsed_time(e[1]) / 1e3 if isinstance(e, tuple) else e for e in self._forwards)
        self._forwards.clear()
        return total

    def shares(self, rows: int) -> list[int]:
        return self.balance.shares(rows) if self.balance else super().shares(rows)

    def updates(self, step: int, rows: Rows) -> list[Update]:
        shares = self.shares(len(rows))
        self.rows = [len(rows[share(len(rows), shares, rank)]) for rank in range(self.world.size)]
        return super().updates(step, rows)

    def update_shares(self, seconds: list[float]) -> None:
        if self.balance:
            self.balance.learn(seconds, self.rows)

    def step(self, lr: float) -> float:
        self.scaler.unscale_(self.optimizer)
        limit = self.spec.max_grad_norm or float("inf")
        norm = nn.utils.clip_grad_norm_(self.trained.values(), limit)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.scaler.step(self.optimizer)
        self.scaler.update()
        # After the first backward pass DDP lays out new buckets: the old ones must not live on as the gradients' memory.
        # From then on gradients stay where they are, in the buckets.
        self.optimizer.zero_grad(set_to_none=self._fresh)
        self._fresh = False
        return float(norm)

    @torch.no_grad()
    def loss(self, batch: Batch) -> torch.Tensor:
        with self.autocast():
            return self.plain(*batch)

    def whole(self) -> dict[str, torch.Tensor]:
        """Return what is trained, by name."""
        return {name: parameter.detach() for name, parameter in self.trained.items()}

    @torch.no_grad()
    def put(self, values: Mapping[str, torch.Tensor] | None, host: World) -> None:
        """Make it what the first rank of every host says; `host`: the ranks of this one."""
        for name, parameter in self.trained.items():
            if values:
                parameter.copy_(values[name])
            if host.size > 1:
                dist.broadcast(parameter.data, group=host.group, group_src=0)

    def save(self, folder: Path) -> None:
        save_file({name: p.detach().contiguous() for name, p in self.trained.items()}, folder / "trained.safetensors")
        torch.save(
            {
                "optimizer": self.optimizer.state_dict(),
                "scaler": self.scaler.state_dict(),
                "costs": self.balance.costs if self.balance else [],
            },
            folder / "optimizer.pt",
        )

    def load(self, folder: Path) -> None:
        kept = load_file(folder / "trained.safetensors", device=str(self.world.device))
        with torch.no_grad():
            for name, parameter in self.trained.items():
                parameter.copy_(kept[name])
        state = torch.load(folder / "optimizer.pt", map_location=self.world.device, weights_only=True)
        self.optimizer.load_state_dict(state["optimizer"])
        self.scaler.load_state_dict(state["scaler"])
        if self.balance:
            self.balance = Balance(self.world.size, state["costs"])
