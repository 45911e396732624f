"""Averaging: workers train on disjoint parts of every step without communication; their weights are averaged at the end.

Federated averaging with a single round, for links that are too slow for other strategies: https://arxiv.org/abs/1602.05629. A worker is a
host with DDP inside. Every worker has its own checkpoints and its own step.

LoRA adapters are averaged by their updates. The mean of the factors A and of the factors B would not be the mean of the products B A.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.common.errors import UserError
from trainer.common.lazy import LazyModule
from trainer.data.shares import share
from trainer.strategy.base import Rows, Strategy
from trainer.strategy.ddp import DDP
from trainer.strategy.plan import StrategyPlan
from trainer.strategy.replicas import Replicas

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

    from trainer.config import RunSpec
    from trainer.costs.cost import Layout, State
    from trainer.distributed.world import World
    from trainer.method.module_with_loss import ModelWithLoss
    from trainer.model_files.model_shape import Shape
else:
    torch, dist = LazyModule("torch"), LazyModule("torch.distributed")

_STOP_INTERVAL = 1.0  # seconds between two checks for a stop request of another worker
_STOP = "averaging/stop"


class AveragingPlan(StrategyPlan):
    """The plan of averaging. The defaults apply: no communication within a step."""

    def strategy_class(self, spec: RunSpec) -> type[Strategy]:
        return Averaging

    def outside_step(self, spec: RunSpec, shape: Shape, layout: Layout, state: State) -> int:
        """The averaged adapter has the adapters of all workers; gradients and the optimizer's moments are freed before."""
        workers = -(-len(layout.processes) // spec.replica_hosts)
        # The new adapter, its largest layer once more in transit, and the worker's own adapter.
        return state.base + state.adapters * (workers + 1) if spec.lora_r else 0


PLAN = AveragingPlan()


class Averaging(DDP):
    def __init__(self, spec: RunSpec, world: World, module: ModelWithLoss) -> None:
        from trainer.models.adapters import lora_factors

        self.workers = Replicas.find(spec, world)
        replica_group = world.subgroup(self.workers.ranks, spec.collective_timeout)
        super().__init__(spec, world, module, replica_group)
        self.all, self.world = world.with_untimed_group(), replica_group
        self._checked = 0.0
        for factors in lora_factors(module.model) if spec.lora_r and len(self.workers) > 1 else ():
            # No matrices that can be concatenated, as those of convolutions in groups and of stacked experts.
            if len(factors.a) != factors.b.shape[1] or getattr(factors.layer, "num_experts", 1) > 1:
                kind = type(factors.layer.get_base_layer()).__name__
                raise UserError(
                    f"strategy: averaging cannot average the adapter of a grouped layer ({kind}): remove it from lora_targets"
                )

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
        weight = totals["trained_tokens"] / tokens
        # Gradients and moments are freed before the averaged adapter, which can be as large, is allocated.
        self.module = self.plain  # DDP holds the buckets of gradients
        self.optimizer.zero_grad(set_to_none=True)
        self.optimizer.state.clear()
        if self.spec.lora_r and len(self.workers) > 1:
            adapter = self._average_updates(weight)
        else:
            adapter = {}
            for parameter in self.trained.values():
                self._sum_of_workers(parameter.data.mul_(weight))
        # Taken from one rank: processors of different types may round differently.
        average = self.all.gather(evaluate())[0]
        summed = {name: sum(part[name] for part, _ in parts) for name in ("tokens", "trained_tokens", "samples")}
        for name in ("loss_first", "loss_last"):
            summed[name] = sum(part[name] * part["trained_tokens"] for part, _ in parts) / tokens
        seconds = max(part["seconds"] for part, _ in parts)
        return {
            **summed,
            "seconds": seconds,
            "tokens_per_second": summed["tokens"] / seconds if seconds else 0.0,
            "world_size": self.all.size,
            "eval_loss": average,
            **adapter,
            "parts": [
                {"ranks": ranks, "trained_tokens": part["trained_tokens"], "eval_loss": eval_loss}
                for ranks, (part, eval_loss) in zip(self.workers.ranks, parts, strict=True)
            ],
        }

    def _sum_of_workers(self, value: torch.Tensor) -> None:
        """Sum a tensor over workers, in place. All ranks of a worker hold equal values: only the first one contributes."""
        if self.world.rank:
            value.zero_()
        if self.all.size > 1:
            dist.all_reduce(value)

    def _average_updates(self, weight: float) -> dict[str, Any]:
        """Replace the adapter by the weighted mean of all workers' updates; return the fields of the result on it.

        The factors of all workers are concatenated as peft's add_weighted_adapter does with combination_type="cat", but
        layer by layer, so that no more than the result and one layer are in memory.
        """
        from trainer.models.adapters import concatenate, lora_factors, truncate

        limit, rank, error, norm = self.spec.averaging_rank, 0, 0.0, 0.0
        for factors in lora_factors(self.plain.model):
            mine = (factors.a * (weight * factors.scaling), factors.b)
            # Every worker fills its own place, and adds zeros to the places of the others.
            shared = [value.new_zeros(len(self.workers), *value.shape) for value in mine]
            for value, own in zip(shared, mine, strict=True):
                value[self.workers.mine] = own
                self._sum_of_workers(value)
            a, b = concatenate(list(zip(*shared, strict=True)))
            if limit and limit < len(a):
                a, b, lost, total = truncate(a, b, limit)
                error, norm = error + lost, norm + total
                for value in (a, b):  # processors of different types round differently
                    dist.broadcast(value, 0)
            factors.replace(a, b)
            rank = len(a)
        for config in self.plain.model.peft_config.values():  # type: ignore[operator, union-attr]
            config.r = config.lora_alpha = rank
        found: dict[str, Any] = {"adapter_rank": rank}
        if norm:
            found["averaging_error"] = math.sqrt(error / norm)
        if self.all.rank == 0:
            share = f", {100 * found['averaging_error']:.2g} % from the exact mean" if norm else ", the exact mean"
            print(
                f"averaging: the adapter of {len(self.workers)} workers has rank {rank} (lora_r {self.spec.lora_r}){share}"
            )
        return found

    def save(self, folder: Path) -> None:
        super().save(folder)
        (folder / "worker.json").write_text(json.dumps(self._place()), encoding="utf-8")

    def _place(self) -> dict[str, int]:
        return {"worker": self.workers.mine, "workers": len(self.workers)}

    def load(self, folder: Path) -> None:
        """Restore the state that `save` wrote.

        Raises UserError: the checkpoint is that of another worker. Some samples would be trained on twice, others never.
        """
        kept, now = json.loads((folder / "worker.json").read_text(encoding="utf-8")), self._place()
        if kept != now:
            raise UserError(
                f"strategy: averaging: the checkpoint of this host is that of worker {kept['worker'] + 1} of {kept['workers']}, but "
                f"the host is now worker {now['worker'] + 1} of {now['workers']}: resume on the original hosts, in their order"
            )
        super().load(folder)
