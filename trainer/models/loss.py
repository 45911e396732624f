"""The loss of a student that learns from the token probabilities of a teacher, beside the text.

Generalised Jensen-Shannon divergence: Agarwal et al., On-Policy Distillation of Language Models, https://arxiv.org/abs/2306.13649.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from trainer.config import RunSpec
from trainer.costs.cost import LOSS_CHUNK
from trainer.data.packing import IGNORED


@dataclass(frozen=True)
class Divergence:
    """The comparison of student and teacher in the loss; see the fields of the run spec with these names."""

    alpha: float = 0.0
    temperature: float = 1.0
    beta: float = 0.0

    @classmethod
    def of(cls, spec: RunSpec) -> Divergence:
        return cls(spec.distill_alpha, spec.distill_temperature, spec.gkd_beta)


def generalized_jsd(student: torch.Tensor, teacher: torch.Tensor, beta: float, temperature: float) -> torch.Tensor:
    """Return the generalised Jensen-Shannon divergence of every place, float32 [n].

    beta 0 is KL(teacher, student), beta 1 is KL(student, teacher), and others between compare both with their mixture,
    as `generalized_jsd_loss` of trl does. `student`, `teacher`: logits, float32 [n, V].
    """
    mine, other = (F.log_softmax(logits / temperature, dim=-1) for logits in (student, teacher))
    if beta == 0:
        return (other.exp() * (other - mine)).sum(-1)
    if beta == 1:
        return (mine.exp() * (mine - other)).sum(-1)
    share = torch.tensor(beta, dtype=mine.dtype, device=mine.device)
    mixture = torch.logaddexp(mine + torch.log1p(-share), other + torch.log(share))
    from_teacher = (other.exp() * (other - mixture)).sum(-1)
    from_student = (mine.exp() * (mine - mixture)).sum(-1)
    return beta * from_teacher + (1 - beta) * from_student


def distillation_loss(
    logits: torch.Tensor, targets: torch.Tensor, teacher: torch.Tensor, divergence: Divergence
) -> torch.Tensor:
    """Return the loss of a micro-batch summed over its tokens, a float32 scalar.

    `logits`: logits of the student, [n, V]. `targets`: the next tokens, int64 [n]; -100 where there is no loss.
    `teacher`: logits of the teacher, [n, V]; its vocabulary may be padded to another size.
    """
    size = max(1, LOSS_CHUNK // logits.shape[1])
    compute = functools.partial(_chunk_loss, divergence=divergence)
    loss = torch.zeros((), dtype=torch.float32, device=logits.device)
    # In chunks that are recomputed: no log-probabilities of all places and tokens are in memory.
    for chunk in zip(*(tensor.split(size) for tensor in (logits, targets, teacher)), strict=True):
        loss = loss + checkpoint(compute, *chunk, use_reentrant=False, preserve_rng_state=False)  # type: ignore[operator]
    return loss


def _chunk_loss(
    logits: torch.Tensor, targets: torch.Tensor, teacher: torch.Tensor, divergence: Divergence
) -> torch.Tensor:
    logits = logits.float()
    # Models of one family pad their vocabularies to different sizes; the tokens in front are the same.
    width = min(logits.shape[1], teacher.shape[1])
    each = generalized_jsd(logits[:, :width], teacher[:, :width].float(), divergence.beta, divergence.temperature)
    each = torch.where(targets != IGNORED, each, 0.0)
    text = F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")
    return (1 - divergence.alpha) * text + divergence.alpha * each.sum()
