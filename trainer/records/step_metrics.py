"""The metrics of the steps since the last synchronization, and their reduction over ranks."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trainer.records.gpu_use import READINGS

if TYPE_CHECKING:
    from trainer.strategy.base import Strategy

_COUNTS = ("loss", "tokens", "trained_tokens", "samples")  # fields of a record that are summed over ranks


@dataclass(frozen=True)
class Reduced:
    """The metrics of all ranks for the steps up to a synchronization.

    `records`: one per step, with counts over all ranks. `stop`: a rank has a request to stop. `written`: every rank has
    written its shard of the pending checkpoint. `seconds`: mean duration of a step on the slowest rank, which is the same
    number on every host. `step_seconds`: mean seconds of a step on every rank, without the synchronization after it.
    `comm_share`: share of the time, from 0 to 1, in which every rank waited for communication that its computation does
    not hide; None if the strategy does not measure it. `gpus`: the readings of every rank's GPU, see gpu_use; empty on a CPU.
    """

    records: list[dict[str, Any]]
    stop: bool
    written: bool
    seconds: float
    step_seconds: list[float]
    comm_share: list[float] | None
    gpus: list[dict[str, float]]


class StepMetrics:
    """Collects a record per step on this rank and reduces them when ranks synchronize."""

    def __init__(self) -> None:
        self._records: list[dict[str, Any]] = []

    def add(
        self,
        step: int,
        steps: int,
        *,
        loss: float,
        lr: float,
        grad_norm: float,
        counts: dict[str, int],
        scheduled: int,
        rows: Sequence[int],
        seconds: float,
    ) -> None:
        """Add the record of step number `step` (from 1) of `steps`.

        Args:
            loss: summed over the tokens with loss on this rank.
            grad_norm: before clipping; not finite if the gradient scaler skipped the step.
            counts: `tokens`, `trained_tokens` and `samples` on this rank.
            scheduled: samples of the step over all ranks.
            rows: rows of every rank, if one plan distributes them.
            seconds: duration of the step on this rank.
        """
        self._records.append(
            {
                "step": step,
                "steps": steps,
                "loss": loss,
                "lr": lr,
                # fp16's gradient scaler skips steps that overflow; JSON has no infinity.
                "grad_norm": grad_norm if math.isfinite(grad_norm) else None,
                **counts,
                "scheduled": scheduled,
                "rows": list(rows),
                "seconds": seconds,
            }
        )

    def local_loss(self) -> dict[str, Any]:
        """Return the mean loss of the newest step on this rank as `loss`; nothing without a token with loss."""
        newest = self._records[-1]
        return {"loss": newest["loss"] / newest["trained_tokens"]} if newest["trained_tokens"] else {}

    def reduce(
        self,
        strategy: "Strategy",
        flags: Callable[[], tuple[bool, bool]],
        waiting: Callable[[], bool],
        gpu: Mapping[str, float],
    ) -> Reduced:
        """Synchronize the model and sum the metrics over all ranks of `strategy.world`. Every rank calls it.

        Args:
            flags: returns whether this rank has a request to stop, and whether it has written its shard of the checkpoint.
            waiting: see Strategy.sync.
            gpu: the readings of this rank's GPU.
        """
        world, records = strategy.world, self._records
        self._records = []
        started = time.perf_counter()
        counts = [float(record[name]) for record in records for name in _COUNTS]
        strategy.sync(waiting, [*map(float, flags()), *counts])

        compute, total, shared, waited = ([0.0] * world.size for _ in range(4))
        compute[world.rank] = sum(record.pop("seconds") for record in records) / len(records)
        total[world.rank] = compute[world.rank] + (time.perf_counter() - started) / len(records)
        shared[world.rank] = strategy.rank_seconds()
        within = strategy.comm_seconds()
        waited[world.rank] = -1.0 if within is None else within / len(records) + total[world.rank] - compute[world.rank]
        readings = [0.0] * (world.size * len(READINGS))  # -1: unknown
        first = world.rank * len(READINGS)
        readings[first : first + len(READINGS)] = [gpu.get(name, -1.0) for name in READINGS]
        sums = strategy.sum([*map(float, flags()), *counts, *readings, *compute, *total, *shared, *waited])

        stop, written, *rest = sums
        counts, rest = rest[: len(counts)], rest[len(counts) :]
        readings, times = rest[: len(readings)], rest[len(readings) :]
        compute, total, shared, waited = (times[part * world.size :][: world.size] for part in range(4))
        strategy.update_shares(shared)
        for index, record in enumerate(records):
            record |= dict(zip(_COUNTS, counts[index * len(_COUNTS) :], strict=False))
            record |= {name: int(record[name]) for name in _COUNTS if name != "loss"}
        share = [min(1.0, seconds / max(total)) for seconds in waited] if min(waited) >= 0 else None
        ranks = (readings[first:][: len(READINGS)] for first in range(0, len(readings), len(READINGS)))
        gpus = [{name: value for name, value in zip(READINGS, rank, strict=True) if value >= 0} for rank in ranks]
        return Reduced(records, stop > 0, written == world.size, max(total), compute, share, gpus)
