"""Kahneman-Tversky optimization: good answers become more likely and bad ones less, in relation to a reference and to a baseline.

Ethayarajh et al., https://arxiv.org/abs/2402.01306. Loss as in trl 1.16, `KTOTrainer`. The baseline is the divergence from the reference, estimated on
mismatched sequences: the prompt of a sample with the answer of another one. TRL estimates it for every micro-batch of every rank; here
it is the mean over all samples of an update, the same on all ranks, and the other sample is always the same one, so that the result does not depend on the
number of ranks, and the log-probabilities of the reference can be computed before the first step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from trainer.common.lazy import LazyModule
from trainer.method.method_base import Batch, Rank, Rows, Work, arranged
from trainer.method.preferences_base import (
    PreferenceMethod,
    PreferencePlan,
    collect,
    evaluating,
    label_counts,
    of_rows,
    reference_logps,
    sequence_logps,
)

if TYPE_CHECKING:
    import numpy as np
    import torch

    from trainer.config import RunSpec
    from trainer.data import mixture, packing
    from trainer.data.corpus import Corpus
    from trainer.method.module_with_loss import ModelWithLoss
else:
    np, torch = LazyModule("numpy"), LazyModule("torch")
    mixture, packing = LazyModule("trainer.data.mixture"), LazyModule("trainer.data.packing")

_PARTNER_KEY = 0x4B70  # separates the permutation of partners from those of other purposes


class KTOPlan(PreferencePlan):
    sums = ("good", "bad", "good_rewards", "bad_rewards", "good_logps", "bad_logps", "kl")
    has_reference = True

    def create(self, spec: RunSpec) -> KTO:
        return KTO(spec)

    def means(self, sums: Mapping[str, float]) -> dict[str, float]:
        found: dict[str, float] = {}
        for kind, name in (("good", "chosen"), ("bad", "rejected")):
            if sums[kind]:
                found[f"rewards/{name}"] = sums[f"{kind}_rewards"] / sums[kind]
                found[f"logps/{name}"] = sums[f"{kind}_logps"] / sums[kind]
        if sums["good"] and sums["bad"]:
            found["rewards/margins"] = found["rewards/chosen"] - found["rewards/rejected"]
        count = sums["good"] + sums["bad"]
        return found | ({"kl": sums["kl"] / count} if count else {})

    def passes(self, spec: RunSpec) -> int:
        return 1 if self.precomputes(spec) else 3


PLAN = KTOPlan()


class Labels(NamedTuple):
    """The `extra` of a micro-batch. Without `baseline`, its sequences are mismatched and serve to compute the baseline.

    `desirable`: bool [rows]; `reference`: log-probabilities of the reference, float32 [rows], or None.
    """

    desirable: torch.Tensor
    reference: torch.Tensor | None
    baseline: float | None


class KTO(PreferenceMethod):
    def __init__(self, spec: RunSpec) -> None:
        super().__init__(spec)
        self.good, self.bad = spec.kto_desirable_weight, spec.kto_undesirable_weight
        self._capacity = spec.seq_length

    def prepare(self, work: Work, rank: Rank) -> Work:
        total = 0.0
        for rows in work.parts:
            rank.waiting("comparing with the reference")
            total += rank.score(rank.batch(work, rows))
        (total,) = rank.sum([total])
        return replace(work, shared=max(0.0, total / max(1, len(work.rows))))

    def batch(
        self, work: Work, rows: Rows, pad: int, length: int | None, on_device: Callable[[np.ndarray], torch.Tensor]
    ) -> Batch:
        corpus, samples, mismatched = work.corpus, [sample for row in rows for sample in row], work.shared is None
        found = [self._mismatched(corpus, sample) if mismatched else _own(corpus, sample) for sample in samples]
        arrays = packing.lay_out([[each] for each in found], pad, length)
        assert corpus.desirable is not None
        reference = None
        if corpus.references is not None:
            reference = on_device(of_rows(corpus.references[:, int(mismatched)], rows).astype(np.float32))
        extra = Labels(on_device(of_rows(corpus.desirable, rows)), reference, work.shared)
        return arranged(arrays, on_device)._replace(extra=extra)

    def reference_values(self, work: Work, rows: Rows, rank: Rank) -> np.ndarray:
        own, mismatched = (collect(rank, rank.batch(replace(work, shared=shared), rows)) for shared in (0.0, None))
        return np.stack([own, mismatched], 1)[: len(rows)]

    def _mismatched(self, corpus: Corpus, sample: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens of the prompt of a sample with the answer of its partner, and which of them are the answer."""
        tokens, trained = _own(corpus, sample)
        other, answered = _own(corpus, int(_partners(len(corpus))[sample]))
        prompt, answer = tokens[: np.argmax(trained)], np.argmax(answered)
        joined = np.concatenate([prompt, other[answer:]])[: self._capacity]
        flags = np.concatenate([np.zeros(len(prompt), np.bool_), answered[answer:]])[: self._capacity]
        return joined, flags

    def preference_loss(self, module: ModelWithLoss, batch: Batch) -> torch.Tensor:
        extra: Labels = batch.extra
        if extra.baseline is None:
            with torch.no_grad(), evaluating(module):
                return self._ratios(module, batch, sequence_logps(module, batch)).sum()
        logps = sequence_logps(module, batch)
        ratios = self._ratios(module, batch, logps)
        real = label_counts(batch.labels) > 0  # a rank without rows has a row of padding
        signs = torch.where(extra.desirable, 1.0, -1.0)
        weights = torch.where(extra.desirable, self.good, self.bad)
        losses = weights * (1 - torch.sigmoid(self.beta * signs * (ratios - extra.baseline)))
        sums: dict[str, torch.Tensor] = {"kl": real.sum() * extra.baseline}
        for kind, mine in (("good", real & extra.desirable), ("bad", real & ~extra.desirable)):
            sums |= {
                kind: mine.sum(),
                f"{kind}_rewards": self.beta * ratios[mine].sum(),
                f"{kind}_logps": logps[mine].sum(),
            }
        self.add_metrics(**sums)
        return torch.where(real, losses, 0.0).sum()

    def _ratios(self, module: ModelWithLoss, batch: Batch, logps: torch.Tensor) -> torch.Tensor:
        """Return the log-probabilities minus those of the reference, float32 [rows]."""
        reference: torch.Tensor | None = batch.extra.reference
        return logps - (reference_logps(module, batch) if reference is None else reference)


def _own(corpus: Corpus, sample: int) -> tuple[np.ndarray, np.ndarray]:
    (span,) = corpus.sequences(sample)
    return corpus.tokens[span], corpus.trained[span]


@functools.lru_cache(maxsize=4)
def _partners(samples: int) -> np.ndarray:
    """Return the other sample whose answer belongs to the mismatched sequence of every sample, int64 [samples].

    Each is the partner of one sample. The order is random because neighbours in a dataset often have the same prompt.
    """
    order = mixture.permutation(samples, _PARTNER_KEY)
    partners = np.empty_like(order)
    partners[order] = np.roll(order, 1)
    return partners
