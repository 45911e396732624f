"""Workers train on their own parts of every step and never speak; their adapters are averaged into one at the end.

The poor man's data parallel, for links that carry nothing else (federated averaging with a single round,
https://arxiv.org/abs/1602.05629). A worker is a host, with DDP inside. It keeps checkpoints of its own, and is at a step
of its own.
"""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from trainer.config.run_spec import RunSpec
from trainer.data.order import share
from trainer.distributed.world import World
from trainer.errors import UserError
from trainer.model import TokenLoss
from trainer.strategy.base import Rows
from trainer.strategy.ddp import DDP
from trainer.strategy.replicas import Replicas

_ASK = 1.0  # seconds between two questions whether somebody on another host was asked to stop
_STOP = "averaging/stop"


class Averaging(DDP):
    """One worker among several."""

    def __init__(self, spec: RunSpec, world: World, module: TokenLoss) -> None:
        self.workers = Replicas.find(spec, world)
        crew = world.subgroup(self.workers.ranks, spec.collective_timeout)
        super().__init__(spec, world, module, crew)
        self.all, self.world = world.with_untimed_group(), crew
        self._asked = 0.0

    def local_rows(self, rows: Rows) -> Rows:
        return rows[share(len(rows), [len(ranks) for ranks in self.workers.ranks], self.workers.mine)]

    def sum(self, values: list[float]) -> list[float]:
        """Sum over the ranks of this worker; the word of whoever wants to stop goes to all workers."""
        now, speaks = time.monotonic(), self.all.size > 1 and self.world.rank == 0
        if speaks and now - self._asked >= _ASK:
            self._asked = now
            values = [values[0] + self.all.store.check([_STOP]), *values[1:]]
        summed = self.world.sum(values)
        if speaks and summed[0]:
            self.all.store.set(_STOP, "1")
        return summed

    def all_finished(self, finished: bool, waiting: Callable[[], bool]) -> bool:
        return not self.all.sum_without_timeout([float(not finished)], waiting)[0]

    @torch.no_grad()
    def merge_replicas(
        self, totals: dict[str, Any], loss: float | None, evaluate: Callable[[], float | None]
    ) -> dict[str, Any]:
        """Average what was trained, by the tokens that each worker trained on; evaluate the parts and the average."""
        everyone = self.all.gather((totals, loss))
        parts = [everyone[ranks[0]] for ranks in self.workers.ranks]
        tokens = sum(part["trained_tokens"] for part, _ in parts)
        for parameter in self.trained.values():
            # All ranks of a worker have the same: the first one speaks for them.
            weight = totals["trained_tokens"] / tokens if self.world.rank == 0 else 0.0
            parameter.mul_(weight)
            if self.all.size > 1:
                dist.all_reduce(parameter.data)
        # From one rank: unlike processors may round differently, and there is one result.
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
        """Take back what `save` wrote.

        Raises:
            UserError: it is another worker's: parts of the data would be trained on twice, and others never.
        """
        kept = json.loads((folder / "worker.json").read_text())
        now = {"worker": self.workers.mine, "workers": len(self.workers)}
        if kept != now:
            raise UserError(
                f"strategy: averaging: this host holds part {kept['worker'] + 1} of {kept['workers']} of the run, and would now "
                f"be part {now['worker'] + 1} of {now['workers']}: start it on the hosts that began it, in their order"
            )
        super().load(folder)
