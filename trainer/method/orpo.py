"""Odds ratio preference optimization: learn the chosen answer, and make it more likely than the rejected one. It needs no reference.

Hong et al., https://arxiv.org/abs/2403.07691. Loss as in trl 1.16, `ORPOTrainer`: the mean cross entropy of all tokens of the chosen
sequences, prompts included, minus preference_beta times the mean log sigmoid of the log odds ratio.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from trainer.common.lazy import LazyModule
from trainer.method.method_base import Batch, Rank, Rows, Work, arranged, label_logps
from trainer.method.preferences_base import PAIR_SUMS, PreferenceMethod, PreferencePlan, pair_arrays, pair_means

if TYPE_CHECKING:
    import numpy as np
    import torch
    import torch.nn.functional as F

    from trainer.config import RunSpec
    from trainer.data import packing
    from trainer.method.module_with_loss import ModelWithLoss
else:
    np, torch = LazyModule("numpy"), LazyModule("torch")
    F, packing = LazyModule("torch.nn.functional"), LazyModule("trainer.data.packing")


class ORPOPlan(PreferencePlan):
    """The plan of ORPO. A pair is one sample with two sequences."""

    sequences = 2
    sums = (*PAIR_SUMS, "cross_entropy")

    def create(self, spec: RunSpec) -> ORPO:
        return ORPO(spec)

    def means(self, sums: Mapping[str, float]) -> dict[str, float]:
        found = pair_means(sums)
        return found | ({"cross_entropy": sums["cross_entropy"] / sums["pairs"]} if found else {})


PLAN = ORPOPlan()


class AnswerMask(NamedTuple):
    """The `extra` of a micro-batch, whose labels are all tokens of the chosen sequences and the answers of the rejected ones.

    `mask`: which tokens belong to answers, bool [rows, T]; `pairs_per_token`: of the update, so that its sum of token losses, divided by its pairs, is their mean.
    """

    mask: torch.Tensor
    pairs_per_token: float


class ORPO(PreferenceMethod):
    def prepare(self, work: Work, rank: Rank) -> Work:
        corpus, samples = work.corpus, [sample for row in work.rows for sample in row]
        chosen = corpus.lengths if corpus.splits is None else corpus.splits
        # The first token of a sequence is never predicted.
        return replace(work, shared=len(samples) / max(1, int((chosen[samples] - 1).sum())))

    def batch(
        self, work: Work, rows: Rows, pad: int, length: int | None, on_device: Callable[[np.ndarray], torch.Tensor]
    ) -> Batch:
        ids, positions, labels = pair_arrays(work, rows, pad, length)
        lengths = [len(range(*work.corpus.sequences(sample)[0].indices(2**62))) for row in rows for sample in row]
        whole: np.ndarray = np.zeros(labels.shape, np.bool_)
        for row, size in enumerate(lengths):
            whole[row, :size] = True
        extra = AnswerMask(on_device(labels != packing.IGNORED), work.shared)
        return arranged((ids, positions, np.where(whole, ids, labels)), on_device)._replace(extra=extra)

    def preference_loss(self, module: ModelWithLoss, batch: Batch) -> torch.Tensor:
        each = label_logps(module, batch)
        answers = F.pad(batch.extra.mask[:, 1:], (0, 1))
        counts = answers.sum(1)
        means = torch.where(answers, each, 0.0).sum(1) / counts.clamp(min=1)
        real = counts.chunk(2)[0] > 0  # a rank without rows has a pair of padding
        # Padding would have the infinite odds of a certain answer.
        chosen, rejected = torch.where(real.repeat(2), means, -1.0).chunk(2)
        ratio = F.logsigmoid(chosen - rejected - (_log_complement(chosen) - _log_complement(rejected)))
        cross_entropy = -each.chunk(2)[0].sum() * batch.extra.pairs_per_token
        one, other = chosen.detach()[real], rejected.detach()[real]
        self.add_metrics(
            pairs=real.sum(),
            chosen=self.beta * one.sum(),
            rejected=self.beta * other.sum(),
            accurate=(one > other).sum(),
            chosen_logps=one.sum(),
            rejected_logps=other.sum(),
            cross_entropy=cross_entropy,
        )
        return cross_entropy - self.beta * torch.where(real, ratio, 0.0).sum()


def _log_complement(logps: torch.Tensor) -> torch.Tensor:
    """Return log(1 - exp(x)) for x < 0, precise near 0 and for very negative numbers."""
    near = logps > -0.6931472
    safe = torch.where(near, logps, -1.0)
    far = torch.where(near, -1.0, logps)
    return torch.where(near, torch.log(-torch.expm1(safe)), torch.log1p(-torch.exp(far)))
