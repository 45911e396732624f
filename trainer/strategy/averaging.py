"""Averaging: workers train on disjoint parts of every step without communication; their weights are averaged at the end.

Federated averaging with a single round, for links that are too slow for other strategies: https://arxiv.org/abs/1602.05629. A worker is a
host with DDP inside. Every worker has its own checkpoints and its own step.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.data.shares import share
from trainer.errors import UserError
from trainer.strategy.base import Rows, Strategy
from trainer.strategy.ddp import DDP
from trainer.strategy.lazy import LazyModule
from trainer.strategy.plan import StrategyPlan
from trainer.strategy.replicas import Replicas

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

    from trainer.config import RunSpec
    from trainer.distributed.world import World
    from trainer.model import TokenLoss
else:
    torch, dist = LazyModule("torch"), LazyModule("torch.distributed")

_STOP_INTERVAL = 1.0  # seconds between two checks whether another worker was asked to stop
_STOP = "averaging/stop"


class AveragingPlan(StrategyPlan):
    """The plan of averaging. The defaults apply: no communication within a step."""

    summary = "hosts train independently and are averaged once, at the end"
    has_replicas = True

    def strategy_class(self, spec: RunSpec) -> type[Strategy]:
        return Averaging


class Averaging(DDP):
    """One of several workers."""

    def __init__(self, spec: RunSpec, world: World, module: TokenLoss) -> None:
        self.workers = Replicas.find(spec, world)
        replica_group = world.subgroup(self.workers.ranks, spec.collective_timeout)
        super().__init__(spec, world, module, replica_group)
        self.all, self.world = world.with_untimed_group(), replica_group
        self._checked = 0.0

    def local_rows(self, rows: Rows) -> Rows:
        return rows[share(len(rows), [len(ranks) for ranks in self.workers.ranks], self.workers.mine)]

    def sum(self, values: list[float]) -> list[float]:
        """Sum over the ranks of this worker. A request to stop is passed on to all workers."""
        now, leads = time.monotonic(), self.all.size > 1 and self.world.rank == 0
        if leads and now - self._checked >= _STOP_INTERVAL:
            self._checked = now
            values = [values[0] + self.all.store.check([_STOP]), *values[1:]]
        summed = self.world.sum(values)
        if leads and summed[0]:
            self.all.store.set(_STOP, "1")
        return summed

    def all_finished(self, finished: bool, waiting: Callable[[], bool]) -> bool:
        return not self.all.sum_without_timeout([float(not finished)], waiting)[0]

    def merge_replicas(
        self, totals: dict[str, Any], loss: float | None, evaluate: Callable[[], float | None]
    ) -> dict[str, Any]:
        """Average the workers' weights, weighted by the tokens that each trained on; evaluate workers and average."""
        everyone = self.all.gather((totals, loss))
        parts = [everyone[ranks[0]] for ranks in self.workers.ranks]
        tokens = sum(part["trained_tokens"] for part, _ in parts)
        for parameter in self.trained.values():
            # All ranks of a worker hold equal weights: only the first one contributes.
            weight = totals["trained_tokens"] / tokens if self.world.rank == 0 else 0.0
            parameter.data.mul_(weight)
            if self.all.size > 1:
                dist.all_reduce(parameter.data)
        # Taken from one rank: processors of different types may round differently.
        average = self.all.gather(evaluate())[0]
        summed = {name: sum(part[name] for part, _ in parts) for name in ("tokens", "trained_tokens", "samples")}
        means = {
            name: sum(part[name] * part["trained_tokens"] for part, _ in parts) / tokens
            for name in ("loss_first", "loss_last")
        }
        seconds = max(part["seconds"] for part, _ in parts)
        return {
            **summed,
            **means,
            "seconds": seconds,
            "tokens_per_second": summed["tokens"] / seconds if seconds else 0.0,
            "world_size": self.all.size,
            "eval_loss": average,
            "parts": [
                {"ranks": ranks, "trained_tokens": part["trained_tokens"], "eval_loss": eval_loss}
                for ranks, (part, eval_loss) in zip(self.workers.ranks, parts, strict=True)
            ],
        }

    def save(self, folder: Path) -> None:
        super().save(folder)
        (folder / "worker.json").write_text(json.dumps({"worker": self.workers.mine, "workers": len(self.workers)}))

    def load(self, folder: Path) -> None:
        """Restore the state that `save` wrote.

        Raises:
            UserError: the checkpoint is that of another worker. Some samples would be trained on twice, others never.
        """
        kept = json.loads((folder / "worker.json").read_text())
        now = {"worker": self.workers.mine, "workers": len(self.workers)}
        if kept != now:
            raise UserError(
                f"strategy: averaging: the checkpoint of this host is that of worker {kept['worker'] + 1} of {kept['workers']}, but "
                f"the host is now worker {now['worker'] + 1} of {now['workers']}: resume on the original hosts, in their order"
            )
        super().load(folder)
