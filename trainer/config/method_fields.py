"""The fields of a run spec that a training method or a teacher uses."""

import functools
from typing import Literal

from trainer.config.basic_fields import BasicFields
from trainer.config.fields import MAX_NUMBER, MAX_SECONDS, Words, declare
from trainer.config.reward_source import EXPECTED as EXPECTED_REWARD
from trainer.config.reward_source import Rewards

_grpo = functools.partial(declare, needs="method=grpo")
_served = functools.partial(declare, needs="method=grpo rollout_servers")
_dpo = functools.partial(declare, needs="method=dpo")
_kto = functools.partial(declare, needs="method=kto")


class MethodFields(BasicFields):
    """These fields, after those of every run."""

    distill_alpha: float = declare(
        0.0,
        "weight of the teacher's token probabilities: (1 - distill_alpha) x cross entropy + distill_alpha x KL",
        ge=0,
        le=1,
    )
    distill_temperature: float = declare(
        1.0, "temperature of teacher and student in the KL term", ge=0.01, le=100, needs="teacher"
    )
    teacher: str = declare(
        "",
        "model whose token probabilities the student learns, with the same vocabulary: a local folder, host:/folder, or a hub id",
    )
    gkd_beta: float = declare(
        0.0,
        "divergence from the teacher: 0: KL(teacher, student); 1: KL(student, teacher); between: generalised Jensen-Shannon",
        ge=0,
        le=1,
        needs="teacher",
    )
    reward: Rewards = _grpo(
        (),
        "grpo: what rates a completion, each with a weight after a colon; see docs/rewards.md",
        expected=EXPECTED_REWARD,
    )
    reward_timeout: float = _grpo(
        60.0,
        "grpo: time limit of one call of a reward function",
        ge=0.1,
        le=MAX_SECONDS,
        unit="seconds",
        mutable=True,
    )
    grpo_group_size: int = _grpo(8, "grpo: completions of each prompt in a step", ge=2, le=4096)
    grpo_max_tokens: int | None = _grpo(
        None,
        "grpo: maximum length of a completion; the prompt has the rest of seq_length; unset: half of seq_length",
        ge=1,
        le=1_048_576,
        unit="tokens",
    )
    grpo_temperature: float = _grpo(1.0, "grpo: temperature of completions and their probabilities", ge=0.01, le=100)
    grpo_beta: float = _grpo(
        0.0, "grpo: weight of the KL divergence from the model without its adapter; requires LoRA", ge=0, le=MAX_NUMBER
    )
    grpo_epsilon: float = declare(
        0.2,
        "grpo: clip the ratio of new to old probabilities below at 1 - grpo_epsilon",
        ge=0,
        lt=1,
        needs="method=grpo grpo_iterations|rollout_servers",
    )
    grpo_epsilon_high: float = declare(
        0.0,
        "grpo: clip the ratio above at 1 + grpo_epsilon_high; 0: grpo_epsilon",
        ge=0,
        le=MAX_NUMBER,
        needs="method=grpo grpo_iterations|rollout_servers",
    )
    grpo_iterations: int = _grpo(
        1, "grpo: optimizer updates from the completions of one step; 1: no ratio is clipped", ge=1, le=1000
    )
    grpo_loss: Literal["dapo", "grpo", "dr_grpo"] = _grpo(
        "dapo",
        "grpo: mean of the loss over all tokens of a step (dapo), the means of completions (grpo), or their sums over "
        "grpo_max_tokens (dr_grpo)",
    )
    grpo_scale_rewards: Literal["group", "batch", "none"] = _grpo(
        "group",
        "grpo: divide advantages by the deviation of the rewards of the prompt, of the step, or by nothing",
    )
    rollout_servers: Words = _grpo(
        (),
        "grpo: servers that write completions beside the ranks: addresses of Ollama (http://10.0.0.5:11434) and vLLM "
        "(http://10.0.0.6:8000/v1); cluster or all: the Ollama servers of the cluster, or of the inventory",
        mutable=True,
    )
    rollout_model: str = _served(
        "",
        "grpo: base model on the Ollama servers, such as smollm2:135m; empty: they get that of the run, in 16 bits",
        mutable=True,
    )
    rollout_ranks: bool = _served(True, "grpo: ranks write completions, too", mutable=True)
    rollout_folder: str = _served(
        "", "grpo: folder of adapters that the first host shares with vLLM servers", mutable=True
    )
    max_staleness: int = _served(
        1,
        "grpo: steps by which the adapter of a server may be older than the one it trains; 0: servers wait while ranks train",
        ge=0,
        le=64,
        unit="steps",
        mutable=True,
    )
    preference_beta: float = declare(
        0.1,
        "dpo, kto: how strongly the model is kept near the reference; orpo: weight of the odds ratio",
        gt=0,
        le=1000,
        suggested_names=["beta"],
        needs="method=dpo|orpo|kto",
    )
    preference_loss: Literal["sigmoid", "ipo", "hinge", "robust"] = _dpo(
        "sigmoid", "dpo: loss of a pair; robust: some pairs have the wrong order, see preference_label_smoothing"
    )
    preference_label_smoothing: float = _dpo(
        0.0, "dpo: fraction of the pairs with the wrong order, for preference_loss=robust", ge=0, lt=0.5
    )
    preference_precompute: bool = declare(
        False,
        "dpo, kto: compute the log-probabilities of the reference before the first step, not in every step; always without LoRA "
        "and in pipelines",
        needs="method=dpo|kto",
    )
    kto_desirable_weight: float = _kto(1.0, "kto: weight of the loss of good answers", gt=0, le=1000)
    kto_undesirable_weight: float = _kto(1.0, "kto: weight of the loss of bad answers", gt=0, le=1000)
