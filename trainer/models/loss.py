"""The loss of a student that learns from the token probabilities of a teacher, beside the text.

Generalised Jensen-Shannon divergence: Agarwal et al., On-Policy Distillation of Language Models, https://arxiv.org/abs/2306.13649.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from trainer.config import RunSpec
from trainer.costs.cost import LOSS_CHUNK
from trainer.data.packing import IGNORED


class TopProbabilities(NamedTuple):
    """The most probable tokens of a teacher at every place of a micro-batch.

    `ids`: int32 [rows, T, K]; `values`: their log-probabilities, float32 [rows, T, K], in descending order, -inf where there are
    fewer. They belong to the token at the place, as labels do.
    """

    ids: torch.Tensor
    values: torch.Tensor


class TeacherLogits(NamedTuple):
    """The logits of a teacher, [n, V], for the n places with loss of a micro-batch, in their order."""

    logits: torch.Tensor


class PendingProbabilities(Protocol):
    """The most probable tokens of a teacher on another host, which computes while the student does.

    `waited`: seconds that the last call of `result` waited.
    """

    waited: float

    def result(self) -> TopProbabilities:
        """Wait for the answer and return it."""
        ...


Teacher = TopProbabilities | TeacherLogits | PendingProbabilities


def top_tokens(logits: torch.Tensor, count: int, vocabulary: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the most probable of the first `vocabulary` tokens, int32 [n, K], and their log-probabilities, float32 [n, K].

    K is `count`; where the vocabulary has fewer tokens, the remaining log-probabilities are -inf.

    Args:
        logits: [n, V].
    """
    size = max(1, LOSS_CHUNK // logits.shape[1])
    ids = torch.zeros(len(logits), count, dtype=torch.int32, device=logits.device)
    values = torch.full((len(logits), count), -torch.inf, device=logits.device)
    kept = min(count, vocabulary, logits.shape[1])
    for start in range(0, len(logits), size):
        part = F.log_softmax(logits[start : start + size, :vocabulary].float(), dim=-1).topk(kept, sorted=True)
        ids[start : start + size, :kept], values[start : start + size, :kept] = part.indices.int(), part.values
    return ids, values


def at_places(shape: torch.Size, places: torch.Tensor, ids: torch.Tensor, values: torch.Tensor) -> TopProbabilities:
    """Lay probabilities of the tokens after n places out over a micro-batch of `shape` [rows, T].

    Args:
        places: positions in the flattened micro-batch, int64 [n], none of them the last of a row.
        ids, values: [n, K], see TopProbabilities.
    """
    count = shape.numel()
    all_ids = ids.new_zeros((count, ids.shape[1])).index_copy(0, places + 1, ids)
    all_values = values.new_full((count, ids.shape[1]), -torch.inf).index_copy(0, places + 1, values)
    return TopProbabilities(all_ids.view(*shape, -1), all_values.view(*shape, -1))


@dataclass(frozen=True)
class Divergence:
    """The comparison of student and teacher in the loss; see the fields of the run spec with these names."""

    alpha: float = 0.0
    temperature: float = 1.0
    beta: float = 0.0

    @classmethod
    def of(cls, spec: RunSpec) -> Divergence:
        """Return the divergence of a run."""
        return cls(spec.distill_alpha, spec.distill_temperature, spec.gkd_beta)


def top_kl(logits: torch.Tensor, ids: torch.Tensor, values: torch.Tensor, temperature: float) -> torch.Tensor:
    """Return the forward KL divergence from a student to the most probable tokens of a teacher, float32 [n].

    The teacher's distribution is its top tokens with the temperature, renormalised: the probability of all other tokens is 0.
    The student's distribution is over its whole vocabulary. The gradient is not multiplied by the squared temperature.

    Args:
        logits: logits of the student, float32 [n, V].
        ids: int [n, K].
        values: log-probabilities of the teacher, float32 [n, K]; -inf for a token that does not count, but not for all of a row.
    """
    teacher = F.log_softmax(values / temperature, dim=-1)
    student = F.log_softmax(logits / temperature, dim=-1).gather(1, ids.long())
    counts = teacher > -torch.inf
    difference = torch.where(counts, teacher, 0.0) - student
    return torch.where(counts, teacher.exp() * difference, 0.0).sum(-1)


def generalized_jsd(student: torch.Tensor, teacher: torch.Tensor, beta: float, temperature: float) -> torch.Tensor:
    """Return the generalised Jensen-Shannon divergence of every place, float32 [n].

    beta 0 is KL(teacher, student), beta 1 is KL(student, teacher), and others between compare both with their mixture, as
    `generalized_jsd_loss` of trl does.

    Args:
        student, teacher: logits, float32 [n, V].
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
    logits: torch.Tensor, targets: torch.Tensor, places: torch.Tensor, teacher: Teacher, divergence: Divergence
) -> torch.Tensor:
    """Return the loss of a micro-batch summed over its tokens, a float32 scalar.

    A token for which the teacher has no probabilities carries the cross entropy alone.

    Args:
        logits: logits of the student, [n, V].
        targets: the next tokens, int64 [n]; -100 where there is no loss.
        places: places of these tokens in the flattened micro-batch, int64 [n].
    """
    size = max(1, LOSS_CHUNK // logits.shape[1])
    if not isinstance(teacher, TopProbabilities | TeacherLogits):
        teacher = teacher.result()
    if isinstance(teacher, TopProbabilities):
        parts = [teacher.ids.flatten(0, 1)[places], teacher.values.flatten(0, 1)[places]]
        compute = functools.partial(_top_loss, divergence=divergence)
    else:
        parts = [teacher.logits]
        compute = functools.partial(_logits_loss, divergence=divergence)
    loss = torch.zeros((), dtype=torch.float32, device=logits.device)
    # In chunks that are recomputed: no log-probabilities of all places and tokens are in memory.
    for chunk in zip(*(tensor.split(size) for tensor in (logits, targets, *parts)), strict=True):
        loss = loss + checkpoint(compute, *chunk, use_reentrant=False, preserve_rng_state=False)  # type: ignore[operator]
    return loss


def _top_loss(
    logits: torch.Tensor,
    targets: torch.Tensor,
    ids: torch.Tensor,
    values: torch.Tensor,
    divergence: Divergence,
) -> torch.Tensor:
    logits = logits.float()
    taught = (values[:, 0] > -torch.inf) & (targets != IGNORED)
    # A row without any probability would give NaN, also in the gradient.
    values = torch.where(taught[:, None], values, 0.0)
    text = F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="none")
    share = torch.where(taught, divergence.alpha, 0.0)
    return ((1 - share) * text + share * top_kl(logits, ids, values, divergence.temperature)).sum()


def _logits_loss(
    logits: torch.Tensor,
    targets: torch.Tensor,
    teacher: torch.Tensor,
    divergence: Divergence,
) -> torch.Tensor:
    logits = logits.float()
    # Models of one family pad their vocabularies to different sizes; the tokens in front are the same.
    width = min(logits.shape[1], teacher.shape[1])
    each = generalized_jsd(logits[:, :width], teacher[:, :width].float(), divergence.beta, divergence.temperature)
    each = torch.where(targets != IGNORED, each, 0.0)
    text = F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")
    return (1 - divergence.alpha) * text + divergence.alpha * each.sum()
