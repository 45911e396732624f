"""Supervised fine-tuning: the cross entropy of the answers, or also the divergence from the token probabilities of a teacher."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer.method.method_base import Batch, Method, next_labels, places_of
from trainer.method.method_plan import MethodPlan

if TYPE_CHECKING:
    import torch

    from trainer.config import RunSpec
    from trainer.method.module_with_loss import ModelWithLoss
    from trainer.models.loss import Divergence


class SFTPlan(MethodPlan):
    computes_tokens_only = True

    def create(self, spec: RunSpec) -> SFT:
        from trainer.models.loss import Divergence

        return SFT(Divergence.of(spec))


PLAN = SFTPlan()


class SFT(Method):
    """The loss of supervised fine-tuning, with or without a teacher."""

    keeps_dropout = True

    def __init__(self, divergence: Divergence | None = None) -> None:
        """`divergence`: how the loss compares the model with a teacher."""
        from trainer.models.loss import Divergence

        super().__init__()
        self.divergence = divergence or Divergence()

    def loss(self, module: ModelWithLoss, batch: Batch) -> torch.Tensor:
        from trainer.models.loss import distillation_loss

        targets = next_labels(batch.labels)
        selected = places_of(batch)
        if batch.extra is not None:
            taught = module.selected_logits(batch.ids, batch.positions, selected)
            return distillation_loss(taught, targets[selected], batch.extra, self.divergence)
        return module.summed_cross_entropy(batch.ids, batch.positions, selected, targets[selected])
