"""Group relative policy optimization: the model writes several completions of each prompt, and learns from their rewards.

Shao et al., DeepSeekMath, https://arxiv.org/abs/2402.03300. The names, the advantages and the loss are those of TRL's GRPOTrainer.
All random numbers are functions of the seed, the step and the place in the step: a resumed run, and any number of ranks, draw
the same. One rank rates the completions of an update, in a process with limits (see `trainer.rewards`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from trainer.common.errors import UserError
from trainer.common.lazy import LazyModule
from trainer.config import RunSpec
from trainer.config.reward_source import rewards_error
from trainer.config.rollout_fields import rollout_error
from trainer.config.strategies import AUTO
from trainer.data.reasoning import CLOSING, OPENING
from trainer.method.method_base import Batch, Method, Rank, Rows, RunContext, Work, label_logps, next_labels
from trainer.method.method_plan import MethodPlan

if TYPE_CHECKING:
    import numpy as np
    import torch

    from trainer.data import packing
    from trainer.data.corpus import Corpus
    from trainer.generation.journal import Completion
    from trainer.method.module_with_loss import ModelWithLoss
    from trainer.method.rollout_work import RolloutWork
    from trainer.method.server_scores import Scores
    from trainer.models.sampling import CompletionWriter
    from trainer.rewards.reward_process import RewardFunction, RewardProcess
else:
    np, torch, packing = LazyModule("numpy"), LazyModule("torch"), LazyModule("trainer.data.packing")

STRATEGIES = ("ddp", "diloco", AUTO)
_KEY = 0x6B6403  # separates these random numbers from those of other purposes
_EXAMPLES = 4  # completions of a step that are kept for a person to read
_SUMS = "completions rated reward spread groups flat written ended kl low high own write_seconds"


class GRPOPlan(MethodPlan):
    def validate(self, spec: RunSpec) -> None:
        if not spec.reward:
            raise ValueError(
                "reward: method=grpo learns from rewards: set reward=my_reward.py, or a built-in one, such as exact"
            )
        if reason := rewards_error(spec.reward):
            raise ValueError(reason)
        refused = {
            "packing": spec.packing is True,
            "fake_data": spec.fake_data,
            "distill_alpha": spec.distill_alpha > 0,
            "torch_compile": spec.torch_compile,
            "backend": spec.backend == "unsloth",
            "script": bool(spec.script),
        }
        if name := next((name for name, found in refused.items() if found), ""):
            raise ValueError(f"{name}: {getattr(spec, name)} cannot be combined with method=grpo: omit it")
        inside = {"diloco": spec.replica_strategy}.get(spec.strategy, "ddp")
        if spec.strategy not in STRATEGIES or inside != "ddp":
            raise ValueError(
                "method: grpo needs ranks that hold the whole model: set strategy=ddp (or diloco with replica_strategy=ddp)"
            )
        if spec.rows_per_step % spec.grpo_group_size:
            raise ValueError(
                f"total_batch_size: {spec.rows_per_step} completions of a step are not a multiple of grpo_group_size "
                f"{spec.grpo_group_size}: set total_batch_size={-(-spec.rows_per_step // spec.grpo_group_size) * spec.grpo_group_size}"
            )
        if spec.prompt_length < 1:
            raise ValueError(
                f"grpo_max_tokens: {spec.completion_length} leaves no space for a prompt in seq_length {spec.seq_length}: increase "
                "seq_length, or decrease grpo_max_tokens"
            )
        if spec.grpo_beta and not spec.lora_r:
            raise ValueError(
                "grpo_beta: the reference is the model without its adapter, but lora_r is 0: set grpo_beta=0, or lora_r"
            )
        if reason := rollout_error(spec):
            raise ValueError(reason)
        if spec.reward_timeout >= spec.collective_timeout:
            raise ValueError(
                f"reward_timeout: other ranks wait only {spec.collective_timeout:g} s for the rewards (collective_timeout): "
                "increase collective_timeout, or decrease reward_timeout"
            )

    def create(self, spec: RunSpec) -> GRPO:
        return GRPO(spec)

    def weights(self, corpus: Corpus) -> np.ndarray:
        """Return one for every prompt. `GRPO.prepare` replaces the sums by what the completions count."""
        return np.ones(len(corpus), np.int64)

    def passes(self, spec: RunSpec) -> int:
        return int(spec.grpo_beta > 0)


PLAN = GRPOPlan()


class Extra(NamedTuple):
    """What the loss needs beside the tokens of a micro-batch.

    `advantages`, `scales`: of the completions, float32 [rows]; a loss of a token counts `scale` times. `old`: receives the
    log-probabilities of the first iteration by the number of the micro-batch, `part`, and gives them to later ones. `rewards`:
    in an evaluation, float32 [rows]. `scores`: of rows that servers wrote.
    """

    advantages: torch.Tensor
    scales: torch.Tensor
    old: dict[int, torch.Tensor] | None
    part: int
    rewards: torch.Tensor | None = None
    scores: Scores | None = None


@dataclass(frozen=True)
class Rated:
    """Completions with their rewards, those of all ranks or of one.

    `ids`: the tokens of each. `rewards`, `advantages`: float64 [n], NaN for a reward that does not count. `parts`: float64 [n, functions].
    """

    ids: Sequence[Sequence[int]]
    rewards: np.ndarray
    advantages: np.ndarray
    parts: np.ndarray

    def part(self, start: int, end: int) -> Rated:
        kept = slice(start, end)
        return Rated(self.ids[kept], self.rewards[kept], self.advantages[kept], self.parts[kept])


@dataclass
class Shared:
    """The completions of this rank. `old`: see Extra. `is_evaluation`: the loss is minus the reward. `scores`: by the number of the micro-batch."""

    rated: Rated
    is_evaluation: bool
    old: dict[int, torch.Tensor] = field(default_factory=dict)
    scores: dict[int, Scores] = field(default_factory=dict)


class GRPO(Method):
    """Writes completions, rates them, and computes the clipped loss."""

    def __init__(self, spec: RunSpec) -> None:
        from trainer.models.policy_loss import PolicyLoss

        super().__init__()
        self._spec, self._policy = spec, PolicyLoss.of(spec)
        self.iterations = spec.grpo_iterations
        self._run: RunContext | None = None
        self._writer: CompletionWriter | None = None
        self._workers: RolloutWork | None = None
        self._process: RewardProcess | None = None
        self._names: tuple[str, ...] = ()

    def begin(self, run: RunContext) -> None:
        self._run = run
        if self._spec.rollout_servers:
            from trainer.method.rollout_work import RolloutWork

            self._workers = RolloutWork(self._spec, run, self._ready_writer().ends)

    def end(self) -> None:
        if self._process:
            self._process.close()
            self._process = None
        if self._workers:
            self._workers.close()
            self._workers = None

    # Metrics -------------------------------------------------------------------------------------------------------------

    def measures(self, plan: MethodPlan) -> GRPO:
        return self

    @property
    def sums(self) -> tuple[str, ...]:
        """The names of the sums, with two for every reward function, and those of rollout servers."""
        rewards = (f"{kind}/{name}" for name in self._names for kind in ("reward", "rated"))
        return (*_SUMS.split(), *rewards, *(self._workers.scores.sums if self._workers else ()))

    def means(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Return the metrics of a step or of an evaluation; see docs/rewards.md."""

        def mean(name: str, count: str) -> dict[str, float]:
            return {name: sums[name] / sums[count]} if sums[count] else {}

        found = mean("reward", "rated")
        for name in self._names:
            found |= mean(f"reward/{name}", f"rated/{name}")
        if sums["completions"]:
            found["completion_length"] = sums["written"] / sums["completions"]
            found["truncated"] = 1 - sums["ended"] / sums["completions"]
        if not sums["groups"]:  # an evaluation
            return found
        found |= {"reward_std": sums["spread"] / sums["groups"], "flat_groups": sums["flat"] / sums["groups"]}
        if trained := sums["written"] * self.iterations:
            found |= {"clip_low": sums["low"] / trained, "clip_high": sums["high"] / trained}
            found |= {"kl": sums["kl"] / trained} if self._spec.grpo_beta else {}
        if sums["write_seconds"]:
            found["completions_per_second"] = sums["own"] / sums["write_seconds"]
        return found | (self._workers.scores.means(sums) if self._workers else {})

    def _add_sums(self, mine: Rated, group: int) -> None:
        """Add what the completions of this rank say. `group`: completions of a prompt; 1 in an evaluation."""
        rated = ~np.isnan(mine.rewards)
        ended = sum(bool(ids) and ids[-1] in self._ready_writer().ends for ids in mine.ids)
        found = {"completions": len(mine.ids), "rated": rated.sum(), "reward": np.nansum(mine.rewards)}
        found |= {"written": sum(map(len, mine.ids)), "ended": ended}
        if group > 1:
            each = mine.rewards.reshape(-1, group)
            spread = [np.std(row[~np.isnan(row)], ddof=1) if (~np.isnan(row)).sum() > 1 else 0.0 for row in each]
            found |= {"groups": len(each), "spread": sum(spread), "flat": sum(value < 1e-8 for value in spread)}
        for place, name in enumerate(self._names):
            part = mine.parts[:, place]
            found |= {f"reward/{name}": np.nansum(part), f"rated/{name}": (~np.isnan(part)).sum()}
        self.add_metrics(**{name: float(value) for name, value in found.items()})

    # Completions ---------------------------------------------------------------------------------------------------------

    def prepare(self, work: Work, rank: Rank) -> Work:
        """Write and rate the completions of the prompts of `work`; return the work on them. Raises UserError: a reward failed."""
        prompts = [sample for rows in work.parts for row in rows for sample in row]
        known = [sample for row in work.rows for sample in row]
        is_evaluation = work.step < 0
        group = 1 if is_evaluation else self._spec.grpo_group_size
        before = sum(rank.group.gather(len(prompts))[: rank.group.rank])  # prompts of the ranks before this one
        first, end = before * group, (before + len(prompts)) * group  # places of this rank
        completions: list[Completion] = []

        def write(places: Sequence[int]) -> list[list[int]]:
            return self._write(work, known, group, places, rank)

        if self._workers and not is_evaluation:
            completions = self._workers.write(work, known, group, rank, write)
            written = [each.ids for each in completions]
        else:
            written = [each for part in rank.group.gather(write(range(first, end))) for each in part]
        rated = self._rate(work, known, written, group, rank)
        mine = rated.part(first, end)
        self._add_sums(mine, group)
        if known and not is_evaluation and rank.group.rank == 0:
            self._keep_examples(work.corpus, known[0], rated, group)
        corpus = completed(work.corpus, [sample for sample in prompts for _ in range(group)], mine.ids)
        size = self._spec.batch_size
        rows = [[place] for place in range(len(mine.ids))]
        parts = [rows[start : start + size] for start in range(0, len(rows), size)] or [[]]
        total, weight = (self._count(each, is_evaluation) for each in (rated, mine))
        tokens = {"tokens": len(corpus.tokens), "trained_tokens": int(corpus.trained.sum())}
        shared = Shared(mine, is_evaluation)
        work = replace(work, corpus=corpus, parts=parts, total=total, weight=weight, shared=shared, counts=tokens)
        if self._workers and completions:
            shared.scores = self._workers.score(work, completions[first:end], rank)
            self.add_metrics(**self._workers.scores.counted(work.step, completions[first:end], rank.group.rank == 0))
        return work

    def _count(self, rated: Rated, is_evaluation: bool) -> float:
        if is_evaluation:
            return float((~np.isnan(rated.rewards)).sum())
        if self._spec.grpo_loss == "dapo":
            return float(sum(map(len, rated.ids)))
        return float(len(rated.ids))

    def _ready_writer(self) -> CompletionWriter:
        from trainer.models.sampling import CompletionWriter

        assert self._run is not None
        if self._writer is None:
            model = self._run.module.model
            device = next(model.parameters()).device
            self._writer = CompletionWriter(self._run.tokenizer, model, device, self._spec.grpo_temperature)
        return self._writer

    def _write(
        self, work: Work, prompts: Sequence[int], group: int, places: Sequence[int], rank: Rank
    ) -> list[list[int]]:
        """Return the completions of some places of a step, which has `group` places for each of `prompts`, those of all ranks."""
        from trainer.models.sampling import groups_that_fit

        assert self._run is not None
        started = time.perf_counter()
        spec, writer, module = self._spec, self._ready_writer(), self._run.module
        samples = [prompts[place // group] for place in places]
        starts = work.corpus.starts
        tokens = {each: work.corpus.tokens[starts[each] : starts[each + 1]].tolist() for each in set(samples)}
        lengths = [(len(tokens[sample]), spec.completion_length) for sample in samples]
        written: list[list[int]] = []
        was_training = module.training
        module.eval()
        try:
            with self._run.autocast():
                for chosen in groups_that_fit(lengths, spec.batch_size * spec.seq_length, spec.seq_length):
                    rank.waiting("writing completions")
                    keys = [
                        (spec.seed, work.step + 1, places[i] // group, samples[i], places[i] % group, _KEY)
                        for i in chosen
                    ]
                    asked = [tokens[samples[i]] for i in chosen]
                    written += writer.write(asked, [spec.completion_length] * len(chosen), keys)
        finally:
            module.train(was_training)
        self.add_metrics(own=float(len(written)), write_seconds=time.perf_counter() - started)
        return written

    # Rewards -------------------------------------------------------------------------------------------------------------

    def _rate(self, work: Work, prompts: Sequence[int], ids: list[list[int]], group: int, rank: Rank) -> Rated:
        """Return the rewards of all completions. The first rank computes them. Raises UserError on every rank if that fails."""
        from trainer.models.policy_loss import group_advantages
        from trainer.rewards.reward_process import total

        rank.waiting("computing rewards")
        found: Any = self._rewards(work, prompts, ids, group) if rank.group.rank == 0 else None
        error, names, weights, parts = rank.group.gather(found)[0]
        if error:
            raise UserError(error)
        self._names = tuple(names)
        values: np.ndarray = np.array(parts, np.float64).reshape(len(ids), len(names))
        rewards = total(values, weights)
        advantages = (
            group_advantages(rewards, group, self._spec.grpo_scale_rewards) if group > 1 else np.zeros(len(ids))
        )
        return Rated(ids, rewards, advantages, values)

    def _rewards(
        self, work: Work, prompts: Sequence[int], ids: list[list[int]], group: int
    ) -> tuple[str, Any, Any, Any]:
        """Return an error, and the names, weights and rewards of all functions."""
        from trainer.rewards.reward_process import RewardBatch, RewardProcess

        assert self._run is not None and work.corpus.records is not None
        records = [work.corpus.records[sample] for sample in prompts for _ in range(group)]
        given = {name: [record["columns"].get(name) for record in records] for name in self._run.columns}
        texts = [self._text(each) for each in ids]
        asked = [record["prompt"] for record in records]
        answers: list[Any] = [
            text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
            for text, prompt in zip(texts, asked, strict=True)
        ]
        try:
            if self._process is None:
                self._process = RewardProcess(
                    self._spec.reward, self._run.columns, self._spec.reward_timeout, self._spec.collective_timeout
                )
            starts, tokens = work.corpus.starts, work.corpus.tokens
            ends = [
                self._run.tokenizer.decode(tokens[max(starts[i], starts[i + 1] - 32) : starts[i + 1]]) for i in prompts
            ]
            endings = [end for end in ends for _ in range(group)]
            rollouts = RewardBatch(asked, answers, ids, given, max(0, work.step), self._run.steps, endings)
            parts: list[list[float]] = self._process(rollouts).tolist() if ids else []
        except UserError as error:
            return str(error), [], [], []
        functions: list[RewardFunction] = self._process.functions
        return "", [each.name for each in functions], [each.weight for each in functions], parts

    def _text(self, ids: Sequence[int]) -> str:
        """Return the text of a completion without special tokens, but for marks of reasoning."""
        assert self._run is not None
        tokenizer = self._run.tokenizer
        shown = {each: tokenizer.decode([each]) for each in {*ids} & {*tokenizer.all_special_ids}}
        left_out = {each for each, text in shown.items() if not (OPENING.match(text) or CLOSING.match(text))}
        return str(tokenizer.decode([each for each in ids if each not in left_out]))

    def _keep_examples(self, corpus: Corpus, sample: int, rated: Rated, group: int) -> None:
        """Keep some completions of the first prompt of a step, for a person to read."""
        assert self._run is not None and corpus.records is not None
        for place in range(min(group, _EXAMPLES)):
            parts: dict[str, float] = dict(zip(self._names, rated.parts[place].tolist(), strict=True))
            self.examples.append(
                {
                    "prompt": corpus.records[sample]["prompt"],
                    "completion": self._text(rated.ids[place]),
                    "reward": _json_number(float(rated.rewards[place])),
                    "rewards": {name: _json_number(value) for name, value in parts.items()},
                    "advantage": float(rated.advantages[place]),
                }
            )

    # The loss ------------------------------------------------------------------------------------------------------------

    def batch(
        self, work: Work, rows: Rows, pad: int, length: int | None, on_device: Callable[[np.ndarray], torch.Tensor]
    ) -> Batch:
        shared: Shared = work.shared
        places = [row[0] for row in rows]
        advantages: np.ndarray = np.zeros(max(1, len(rows)), np.float32)
        scales = np.zeros_like(advantages)
        for index, place in enumerate(places):
            advantages[index] = shared.rated.advantages[place]
            # What the sum over the tokens of a completion is divided by.
            divisors = {"dapo": 1, "grpo": len(shared.rated.ids[place]), "dr_grpo": self._spec.completion_length}
            scales[index] = 1 / divisors[self._spec.grpo_loss]
        old = shared.old if self.iterations > 1 else None
        part = places[0] if places else -1
        extra = Extra(on_device(advantages), on_device(scales), old, part, scores=shared.scores.get(part))
        if shared.is_evaluation:
            rewards = (
                np.nan_to_num(shared.rated.rewards[places].astype(np.float32)) if places else np.zeros(1, np.float32)
            )
            extra = extra._replace(rewards=on_device(rewards))
        return super().batch(work, rows, pad, length, on_device)._replace(extra=extra)

    def loss(self, module: ModelWithLoss, batch: Batch) -> torch.Tensor:
        extra: Extra = batch.extra
        if extra.rewards is not None:
            return -extra.rewards.sum()
        temperature = self._spec.grpo_temperature
        mask = (next_labels(batch.labels) != packing.IGNORED).view(batch.ids.shape)
        logps = label_logps(module, batch, temperature)
        old = logps.detach()
        if extra.scores is not None:
            old = torch.where(extra.scores.by_server[:, None], extra.scores.logps, old)
        if extra.old is not None:
            old = extra.old.setdefault(extra.part, old)
        reference = None
        if self._policy.beta:
            model: Any = module.model
            with torch.no_grad(), model.disable_adapter():
                reference = label_logps(module, batch, temperature)
        found = self._policy(logps, old, reference, extra.advantages, mask)
        self.add_metrics(kl=found.kl.sum(), low=found.low.sum(), high=found.high.sum())
        return (found.loss * extra.scales[:, None]).sum()


def completed(corpus: Corpus, prompts: Sequence[int], ids: Sequence[Sequence[int]]) -> Corpus:
    """Return a corpus of prompts with completions, which carry loss.

    `corpus`: the prompts. `prompts`: the sample of each completion. `ids`: the tokens of the completions.
    """
    from trainer.data.corpus import Corpus

    tokens, trained = [corpus.tokens[:0]], [corpus.trained[:0]]
    for sample, written in zip(prompts, ids, strict=True):
        prompt = corpus.tokens[corpus.starts[sample] : corpus.starts[sample + 1]]
        tokens += [prompt, np.array(written, np.int32)]
        trained += [np.zeros(len(prompt), np.bool_), np.ones(len(written), np.bool_)]
    lengths = [len(one) + len(other) for one, other in zip(tokens[1::2], tokens[2::2], strict=True)]
    return Corpus(
        np.concatenate(tokens), np.concatenate(trained), np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    )


def _json_number(value: float) -> float | None:
    return None if math.isnan(value) else value
