"""Group relative policy optimization: the advantages of completions, and the clipped loss.

Shao et al., DeepSeekMath, https://arxiv.org/abs/2402.03300; Yu et al., DAPO, https://arxiv.org/abs/2503.14476; Liu et al.,
Understanding R1-Zero-Like Training (Dr. GRPO), https://arxiv.org/abs/2503.20783. Names and values are those of TRL's GRPOTrainer.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from trainer.config import RunSpec

_SMALL = 1e-4  # added to a standard deviation, as TRL does


def group_advantages(rewards: np.ndarray, group: int, scale: str) -> np.ndarray:
    """Return by how much each completion is better than the others of its prompt, float64 [n]; 0 where the reward is NaN.

    `rewards`: of the completions, `group` after another of each prompt, float64 [n]; NaN for one that does not count.
    `scale`: `group` or `batch`: divide by the standard deviation of the group or of all; `none`: do not.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a group without a reward has no mean
        groups = rewards.reshape(-1, group)
        advantages = groups - np.nanmean(groups, axis=1, keepdims=True)
        if scale == "batch":
            advantages = advantages / (np.nanstd(rewards, ddof=1) + _SMALL)
        elif scale == "group":
            advantages = advantages / (np.nanstd(groups, axis=1, ddof=1, keepdims=True) + _SMALL)
    return np.nan_to_num(advantages, nan=0.0, posinf=0.0, neginf=0.0).reshape(-1)


@dataclass(frozen=True)
class PolicyLoss:
    """The fields of the run spec with these names after `grpo_`; `epsilon_high` as it applies."""

    epsilon: float
    epsilon_high: float
    beta: float

    @classmethod
    def of(cls, spec: RunSpec) -> PolicyLoss:
        return cls(spec.grpo_epsilon, spec.grpo_epsilon_high or spec.grpo_epsilon, spec.grpo_beta)

    def __call__(
        self,
        logps: torch.Tensor,
        old: torch.Tensor,
        reference: torch.Tensor | None,
        advantages: torch.Tensor,
        mask: torch.Tensor,
    ) -> TokenLosses:
        """Return the loss of every token and its parts, [rows, T] each.

        Args:
            logps, old, reference: log-probabilities of the completions' tokens, [rows, T] each: of the model, of the model
                that wrote them, and of the reference (None if `beta` is 0). `logps` alone has a gradient.
            advantages: of the completions, [rows].
            mask: whether a place has a token of the completion, bool [rows, T].
        """
        ratio = torch.exp(torch.where(mask, logps - old, 0.0))
        each = advantages[:, None]
        clipped = ratio.clamp(1 - self.epsilon, 1 + self.epsilon_high)
        loss = -torch.minimum(ratio * each, clipped * each)
        kl = torch.zeros_like(loss)
        if reference is not None:
            difference = torch.where(mask, reference - logps, 0.0)
            # Times the ratio, without which the gradient is not that of the KL divergence: DeepSeek-V3.2, arXiv:2512.02556.
            kl = (torch.exp(difference) - difference - 1) * ratio
            loss = loss + self.beta * kl
        low = (ratio < 1 - self.epsilon) & (each < 0) & mask
        high = (ratio > 1 + self.epsilon_high) & (each > 0) & mask
        return TokenLosses(torch.where(mask, loss, 0.0), torch.where(mask, kl, 0.0), low, high)


class TokenLosses(NamedTuple):
    """What `PolicyLoss` returns for every token, [rows, T] each: the loss, the KL estimate, whether the ratio is clipped below or above."""

    loss: torch.Tensor
    kl: torch.Tensor
    low: torch.Tensor
    high: torch.Tensor
