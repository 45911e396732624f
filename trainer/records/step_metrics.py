"""The metrics of the steps since the last synchronization, and their reduction over ranks."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from trainer.records.gpu_use import READINGS

if TYPE_CHECKING:
    from trainer.strategy.base import Strategy


class MethodSums(Protocol):
    """The sums of a method over samples, and the metrics that follow from them (see MethodPlan)."""

    @property
    def sums(self) -> tuple[str, ...]:
        """The names of the sums. Ranks exchange them in this order."""
        ...

    def means(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Return the metrics of a step by name."""
        ...


_COUNTS = ("loss", "weight", "tokens", "trained_tokens", "samples")  # fields of a record that are summed over ranks


@dataclass(frozen=True)
class Reduced:
    """The metrics of all ranks for the steps up to a synchronization.

    `records`: one per step, with counts over all ranks. `stop`: a rank has a request to stop. `written`: every rank has
    written its shard of the pending checkpoint. `seconds`: mean duration of a step on the slowest rank, which is the same
    number on every host. `step_seconds`: mean seconds of a step on every rank, without the synchronization after it.
    `comm_share`: share of the time, from 0 to 1, in which every rank waited for communication that its computation does
    not hide; None if the strategy does not measure it. `mfu`: share of the peak of every rank's device that the step used, from 0
    to 1; None if it is unknown. `gpus`: the readings of every rank's GPU, see gpu_use; empty on a CPU.
    """

    records: list[dict[str, Any]]
    stop: bool
    written: bool
    seconds: float
    step_seconds: list[float]
    comm_share: list[float] | None
    mfu: list[float] | None
    gpus: list[dict[str, float]]


@dataclass(frozen=True)
class RankUse:
    """How this rank used its device in this start, without the steps up to the first synchronization, which have its overhead.

    `at_peak`: seconds that its steps need at the peak of the device. `elapsed`: seconds of the slowest rank.
    """

    at_peak: float
    elapsed: float


class StepMetrics:
    """Collects a record per step on this rank and reduces them when ranks synchronize."""

    def __init__(self, method: MethodSums, at_peak: Callable[[int, int, int], float] | None = None) -> None:
        """`at_peak`: returns the seconds of a step at the peak of this device, see `Utilisation.seconds`."""
        self._method, self._at_peak = method, at_peak
        self._records: list[dict[str, Any]] = []
        self._uses: list[RankUse] = []

    def add(
        self,
        step: int,
        steps: int,
        *,
        loss: float,
        lr: float,
        grad_norm: float,
        counts: dict[str, float],
        sums: Sequence[float] = (),
        rows: Sequence[int],
        seconds: float,
    ) -> None:
        """Add the record of step number `step` (from 1) of `steps`.

        Args:
            loss: summed over the samples on this rank.
            grad_norm: before clipping; not finite if the gradient scaler skipped the step.
            counts: `tokens`, `trained_tokens` and `samples` on this rank, and their `weight` in the mean loss.
            sums: of the method on this rank, in the order of their names.
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
                **dict(zip(self._method.sums, sums, strict=True)),
                "rows": list(rows),
                "seconds": seconds,
            }
        )

    def local_loss(self) -> dict[str, Any]:
        """Return the mean loss of the newest step on this rank as `loss`; nothing if this rank had no samples."""
        newest = self._records[-1]
        return {"loss": newest["loss"] / newest["weight"]} if newest["weight"] else {}

    def reduce(
        self,
        strategy: "Strategy",
        flags: Callable[[], tuple[bool, bool]],
        waiting: Callable[[], bool],
        gpu: Mapping[str, float],
    ) -> Reduced:
        """Synchronize the model and sum the metrics over all ranks of `strategy.world`. Every rank calls it.

        `flags`: returns whether this rank has a request to stop, and whether it has written its shard of the
        checkpoint. `waiting`: see Strategy.sync. `gpu`: the readings of this rank's GPU.
        """
        world, records, names = strategy.world, self._records, (*_COUNTS, *self._method.sums)
        self._records = []
        started = time.perf_counter()
        counts = [float(record[name]) for record in records for name in names]
        strategy.sync(waiting)

        compute, total, shared, waited, needed = ([0.0] * world.size for _ in range(5))
        about = [[int(record[name]) for name in ("tokens", "trained_tokens", "samples")] for record in records]
        # Mean seconds of a step at the peak of this device; -1 if they are unknown.
        needed[world.rank] = sum(self._at_peak(*each) for each in about) / len(records) if self._at_peak else -1.0
        compute[world.rank] = sum(record.pop("seconds") for record in records) / len(records)
        total[world.rank] = compute[world.rank] + (time.perf_counter() - started) / len(records)
        shared[world.rank] = strategy.rank_seconds()
        within = strategy.comm_seconds()
        waited[world.rank] = -1.0 if within is None else within / len(records) + total[world.rank] - compute[world.rank]
        readings = [0.0] * (world.size * len(READINGS))  # -1: unknown
        first = world.rank * len(READINGS)
        readings[first : first + len(READINGS)] = [gpu.get(name, -1.0) for name in READINGS]
        sums = strategy.sum([*map(float, flags()), *counts, *readings, *compute, *total, *shared, *waited, *needed])

        stop, written, *rest = sums
        counts, rest = rest[: len(counts)], rest[len(counts) :]
        readings, times = rest[: len(readings)], rest[len(readings) :]
        compute, total, shared, waited, needed = (times[part * world.size :][: world.size] for part in range(5))
        strategy.update_shares(shared)
        for index, record in enumerate(records):
            record |= dict(zip(names, counts[index * len(names) :], strict=False))
            record |= {name: int(record[name]) for name in ("tokens", "trained_tokens", "samples")}
            if self._method.sums:
                record["metrics"] = self._method.means({name: record.pop(name) for name in self._method.sums})
        if needed[world.rank] >= 0 and not strategy.staged:
            self._uses.append(RankUse(len(records) * needed[world.rank], len(records) * max(total)))
        share = [min(1.0, seconds / max(total)) for seconds in waited] if min(waited) >= 0 else None
        ranks = (readings[first:][: len(READINGS)] for first in range(0, len(readings), len(READINGS)))
        gpus = [{name: value for name, value in zip(READINGS, rank, strict=True) if value >= 0} for rank in ranks]
        mfu = [seconds / max(total) for seconds in needed] if min(needed) >= 0 and not strategy.staged else None
        return Reduced(records, stop > 0, written == world.size, max(total), compute, share, mfu, gpus)

    @property
    def use(self) -> RankUse | None:
        """The use of this rank's device; None if it is unknown."""
        uses = self._uses[1:] or self._uses
        if not uses:
            return None
        return RankUse(sum(use.at_peak for use in uses), sum(use.elapsed for use in uses))
