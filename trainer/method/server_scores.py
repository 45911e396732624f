"""The log-probabilities of what servers have written, and how far a server deviates from the model that it should run."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from trainer.config import RunSpec
from trainer.data import packing
from trainer.generation.journal import Completion
from trainer.method.method_base import Batch, Rank, RunContext, Work, label_statistics, next_labels

MAX_DRIFT = 0.5  # mean difference of log-probabilities, nats per token, above which a server is left out
_DRIFT_TOKENS = 500  # of a server before its drift is judged


@dataclass(frozen=True)
class Scores:
    """The log-probabilities of a micro-batch by the adapters that wrote its rows.

    `by_server`: whether a server wrote the row, bool [rows]. `logps`: float32 [rows, T]; valid in these rows.
    """

    by_server: torch.Tensor
    logps: torch.Tensor


class ServerScores:
    """These log-probabilities on this rank, with the metrics of servers."""

    def __init__(self, spec: RunSpec, run: RunContext, names: Sequence[str]) -> None:
        """`names`: of the servers."""
        self._temperature, self._run, self._names = spec.grpo_temperature, run, names
        self._drifts: dict[str, list[Any]] = {name: [0.0, 0] for name in names}
        self._sums: dict[str, list[Any]] = {}
        self._began = time.monotonic()

    @property
    def sums(self) -> tuple[str, ...]:
        """The names of the sums of completions, staleness and drift; see docs/rewards.md."""
        return (
            "staleness",
            *(f"{kind}/{name}" for name in self._names for kind in ("server", "drift", "drifted")),
            "span",
        )

    def counted(self, step: int, mine: Sequence[Completion], is_first: bool) -> dict[str, float]:
        """Return these sums for the completions of this rank. The first rank measures the time."""
        found = {"staleness": float(sum(step - each.version for each in mine))}
        for name, (drift, count) in self._sums.items():
            found |= {f"drift/{name}": drift, f"drifted/{name}": float(count)}
            found[f"server/{name}"] = float(sum(each.worker == name for each in mine))
        if is_first:
            now = time.monotonic()
            found["span"], self._began = now - self._began, now
        return found

    def means(self, sums: Mapping[str, float]) -> dict[str, float]:
        if not sums["completions"]:
            return {}
        found = {"staleness": sums["staleness"] / sums["completions"]}
        for name in self._names:
            if sums["span"]:
                found[f"completions_per_second/{name}"] = sums[f"server/{name}"] / sums["span"]
            if sums[f"drifted/{name}"]:
                found[f"drift/{name}"] = sums[f"drift/{name}"] / sums[f"drifted/{name}"]
        return found

    def compute(
        self,
        work: Work,
        mine: Sequence[Completion],
        rank: Rank,
        adapter_of: Callable[[int], AbstractContextManager[None]],
    ) -> dict[int, Scores]:
        """Return the scores of the micro-batches of `work` with completions of servers, by the first place of each.

        `mine`: the completions of this rank. `adapter_of`: gives the model the adapter of a version for the time of a
        context.
        """
        found: dict[int, Scores] = {}
        self._sums = {name: [0.0, 0] for name in self._names}
        parts = [[row[0] for row in rows] for rows in work.parts if rows]
        for version in sorted({each.version for each in mine if each.worker}):
            with adapter_of(version), self._run.autocast(), torch.no_grad():
                for places in parts:
                    chosen = [mine[place].worker != "" and mine[place].version == version for place in places]
                    if any(chosen):
                        rank.waiting("computing log-probabilities")
                        self._score(rank.batch(work, [[place] for place in places]), places, chosen, mine, found)
        return found

    def _score(
        self,
        batch: Batch,
        places: Sequence[int],
        chosen: Sequence[bool],
        mine: Sequence[Completion],
        found: dict[int, Scores],
    ) -> None:
        logps, entropies = label_statistics(self._run.module, batch, self._temperature)
        rows = torch.tensor(chosen, device=logps.device)
        before = found.get(places[0])
        found[places[0]] = Scores(
            rows if before is None else before.by_server | rows,
            logps if before is None else torch.where(rows[:, None], logps, before.logps),
        )
        counts = (next_labels(batch.labels) != packing.IGNORED).view(batch.ids.shape).sum(1).tolist()
        drifts = (-logps - entropies).sum(1).tolist()
        for place, is_chosen, drift, count in zip(places, chosen, drifts, counts, strict=True):
            if is_chosen and mine[place].worker in self._sums:  # it may be of a server of an earlier start
                self._sums[mine[place].worker][0] += drift
                self._sums[mine[place].worker][1] += count

    def unlike(self, rank: Rank) -> dict[str, str]:
        """Return the servers whose tokens are improbable in this run, and why they are left out. All ranks call it."""
        for part in rank.group.gather(self._sums):
            for name, (drift, count) in part.items():
                self._drifts[name][0] += drift
                self._drifts[name][1] += count
        judged = {name: drift / count for name, (drift, count) in self._drifts.items() if count >= _DRIFT_TOKENS}
        self._drifts |= {name: [0.0, 0] for name in judged}
        return {
            name: f"its tokens are {mean:.2f} nats less probable in this run than they should be: it runs another model, or splits "
            "text into other tokens"
            for name, mean in judged.items()
            if mean > MAX_DRIFT
        }
