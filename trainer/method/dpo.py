"""Direct preference optimization: the chosen answer of a pair becomes more likely than the rejected one, in relation to a reference.

Rafailov et al., https://arxiv.org/abs/2305.18290; IPO: https://arxiv.org/abs/2310.12036; hinge: https://arxiv.org/abs/2305.10425;
robust: https://arxiv.org/abs/2403.00409. The reference is the model before the training: the adapter switched off, or log-probabilities that are computed
before the first step. Losses as in trl 1.16, `DPOTrainer`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from trainer.common.lazy import LazyModule
from trainer.method.method_base import Batch, Rank, Rows, Work
from trainer.method.preferences_base import (
    PAIR_SUMS,
    PreferenceMethod,
    PreferencePlan,
    collect,
    label_counts,
    of_rows,
    pair_batch,
    pair_means,
    reference_logps,
    sequence_logps,
)

if TYPE_CHECKING:
    import numpy as np
    import torch
    import torch.nn.functional as F

    from trainer.config import RunSpec
    from trainer.method.module_with_loss import ModelWithLoss
else:
    np, torch, F = LazyModule("numpy"), LazyModule("torch"), LazyModule("torch.nn.functional")


class DPOPlan(PreferencePlan):
    """The plan of DPO. A pair is one sample with two sequences."""

    sequences = 2
    sums = PAIR_SUMS
    has_reference = True

    def validate(self, spec: RunSpec) -> None:
        super().validate(spec)
        if (spec.preference_loss == "robust") != (spec.preference_label_smoothing > 0):
            raise ValueError(
                "preference_label_smoothing: it is the fraction of pairs with the wrong order that preference_loss robust expects, "
                f"got {spec.preference_label_smoothing:g} with {spec.preference_loss}: set both, or neither"
            )

    def create(self, spec: RunSpec) -> DPO:
        return DPO(spec)

    def means(self, sums: Mapping[str, float]) -> dict[str, float]:
        return pair_means(sums)

    def passes(self, spec: RunSpec) -> int:
        return 0 if self.precomputes(spec) else 1


PLAN = DPOPlan()


class DPO(PreferenceMethod):
    """The loss of DPO. The `extra` of a micro-batch: the log-probabilities of the reference, float32 [pairs, 2], or None."""

    def __init__(self, spec: RunSpec) -> None:
        super().__init__(spec)
        self.kind, self.smoothing = spec.preference_loss, spec.preference_label_smoothing

    def batch(
        self, work: Work, rows: Rows, pad: int, length: int | None, on_device: Callable[[np.ndarray], torch.Tensor]
    ) -> Batch:
        made = pair_batch(work, rows, pad, length, on_device)
        if work.corpus.references is None:
            return made
        return made._replace(extra=on_device(of_rows(work.corpus.references, rows).astype(np.float32)))

    def reference_values(self, work: Work, rows: Rows, rank: Rank) -> np.ndarray:
        return collect(rank, rank.batch(work, rows)).reshape(2, -1).T[: len(rows)]

    def preference_loss(self, module: ModelWithLoss, batch: Batch) -> torch.Tensor:
        logps = sequence_logps(module, batch)
        reference = reference_logps(module, batch).view(2, -1).T if batch.extra is None else batch.extra
        counts = label_counts(batch.labels)
        chosen, rejected = (logps - reference.T.flatten()).chunk(2)
        real = counts.chunk(2)[0] > 0  # a rank without rows has a pair of padding
        each = self._losses(chosen, rejected, *counts.chunk(2))
        one, other = self.beta * chosen.detach()[real], self.beta * rejected.detach()[real]
        self.add_metrics(
            pairs=real.sum(),
            chosen=one.sum(),
            rejected=other.sum(),
            accurate=(one > other).sum(),
            chosen_logps=logps.chunk(2)[0][real].sum(),
            rejected_logps=logps.chunk(2)[1][real].sum(),
        )
        return torch.where(real, each, 0.0).sum()

    def _losses(
        self, chosen: torch.Tensor, rejected: torch.Tensor, chosen_count: torch.Tensor, rejected_count: torch.Tensor
    ) -> torch.Tensor:
        """Return the loss of every pair, float32 [pairs].

        `chosen`, `rejected`: log-probability of the answer minus that of the reference, float32 [pairs].
        `chosen_count`, `rejected_count`: tokens of the answer, int64 [pairs].
        """
        margin = self.beta * (chosen - rejected)
        if self.kind == "hinge":
            return torch.relu(1 - margin)
        if self.kind == "ipo":  # with means over tokens, as its authors confirmed to TRL
            difference = chosen / chosen_count.clamp(min=1) - rejected / rejected_count.clamp(min=1)
            return (difference - 1 / (2 * self.beta)) ** 2
        if self.kind == "robust":
            right, wrong = -F.logsigmoid(margin), -F.logsigmoid(-margin)
            return ((1 - self.smoothing) * right - self.smoothing * wrong) / (1 - 2 * self.smoothing)
        return -F.logsigmoid(margin)
