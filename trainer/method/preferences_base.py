"""What the methods that learn from preferences have in common: their fields, the reference model, and log-probabilities of sequences."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

from trainer.common.lazy import LazyModule
from trainer.config.methods import METHODS
from trainer.config.presets import OBSERVATORY
from trainer.method.method_base import Batch, Method, Rank, Rows, Work, arranged, label_logps
from trainer.method.method_plan import MethodPlan

if TYPE_CHECKING:
    import numpy as np
    import torch

    from trainer.config import RunSpec
    from trainer.data import packing
    from trainer.data.corpus import Corpus
    from trainer.method.module_with_loss import ModelWithLoss
else:
    np, torch, packing = LazyModule("numpy"), LazyModule("torch"), LazyModule("trainer.data.packing")

# Fields of the run spec that ask for what only supervised fine-tuning does, with the value that does not.
_SFT_ONLY = {"distill_alpha": 0.0, "fake_data": False, "train_on": "answer", "torch_compile": False}


class PreferencePlan(MethodPlan):
    """The plan of a method that learns from preferences. Every sample has the same weight."""

    def validate(self, spec: RunSpec) -> None:
        for name, value in _SFT_ONLY.items():
            if (found := getattr(spec, name)) != value:
                shown = str(found).lower() if isinstance(found, bool) else found
                without = str(value).lower() if isinstance(value, bool) else value
                raise ValueError(f"{name}: {shown} requires method sft, got method {spec.method}: set {name}={without}")
        if spec.packing is True:
            raise ValueError(
                f"packing: true requires method sft, got method {spec.method}, whose rows have one sequence each: set packing=auto"
            )
        if spec.backend == "unsloth":
            raise ValueError(f"backend: unsloth requires method sft, got method {spec.method}: set backend=peft")
        if spec.dataset == OBSERVATORY and not spec.script:
            needed = {"pairs": "pairs of a chosen and a rejected answer", "labels": "answers with labels"}
            raise ValueError(
                f"dataset: {spec.dataset} has one answer to each question, and method {spec.method} needs "
                f"{needed[METHODS[spec.method].data]}: set dataset"
            )

    def weights(self, corpus: Corpus) -> np.ndarray:
        return np.ones(len(corpus), np.int64)

    def precomputes(self, spec: RunSpec) -> bool:
        return self.has_reference and (spec.preference_precompute or not spec.lora_r)


class Reference(NamedTuple):
    """The `extra` of a micro-batch whose log-probabilities are collected instead of a loss: one value for each row."""

    collected: list[torch.Tensor]


class PreferenceMethod(Method):
    def __init__(self, spec: RunSpec) -> None:
        super().__init__()
        self.beta = spec.preference_beta

    def loss(self, module: ModelWithLoss, batch: Batch) -> torch.Tensor:
        if isinstance(batch.extra, Reference):
            with torch.no_grad():
                logps = sequence_logps(module, batch)
            batch.extra.collected.append(logps.double().cpu())
            return logps.sum()
        return self.preference_loss(module, batch)

    def preference_loss(self, module: ModelWithLoss, batch: Batch) -> torch.Tensor:
        """Return the loss of a micro-batch, see `loss`."""
        raise NotImplementedError


def collect(rank: Rank, batch: Batch) -> np.ndarray:
    """Return the log-probability of the labels of every row, float64 [rows]; nothing on a rank without the output head."""
    collected: list[torch.Tensor] = []
    rank.score(batch._replace(extra=Reference(collected)))
    return torch.cat(collected).numpy() if collected else np.zeros(0)


def sequence_logps(module: ModelWithLoss, batch: Batch) -> torch.Tensor:
    """Return the sum of the log-probabilities of the labels of every row, float32 [rows]."""
    return label_logps(module, batch).sum(1)


def label_counts(labels: torch.Tensor) -> torch.Tensor:
    """Return the number of labels of every row, int64 [rows]: 0 in a row of padding."""
    return (labels[:, 1:] != packing.IGNORED).sum(1)


def reference_logps(module: ModelWithLoss, batch: Batch) -> torch.Tensor:
    """Return `sequence_logps` of the model without its adapter and without dropout, detached."""
    with torch.no_grad(), without_adapter(module):
        return sequence_logps(module, batch)


@contextlib.contextmanager
def evaluating(module: ModelWithLoss) -> Iterator[None]:
    """Within the block, the model has no dropout."""
    training = module.training
    module.eval()
    try:
        yield
    finally:
        module.train(training)


@contextlib.contextmanager
def without_adapter(module: ModelWithLoss) -> Iterator[None]:
    """Within the block, the model is the base model, without dropout."""
    with evaluating(module), module.model.disable_adapter():  # type: ignore[operator]
        yield


def pair_batch(
    work: Work, rows: Rows, pad: int, length: int | None, on_device: Callable[[np.ndarray], torch.Tensor]
) -> Batch:
    """Return the micro-batch of pairs: the chosen sequences, then the rejected ones, one in a row; arguments as for Method.batch."""
    return arranged(pair_arrays(work, rows, pad, length), on_device)


def pair_arrays(work: Work, rows: Rows, pad: int, length: int | None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the arrays of `pair_batch`, as `packing.lay_out` does."""
    corpus, pairs = work.corpus, [work.corpus.sequences(sample) for row in rows for sample in row]
    spans = [pair[0] for pair in pairs] + [pair[1] for pair in pairs]
    sequences = [[(corpus.tokens[span], corpus.trained[span])] for span in spans]
    return packing.lay_out(sequences or [[], []], pad, length)


def of_rows(array: np.ndarray, rows: Rows) -> np.ndarray:
    """Return the entries of an array of samples that belong to rows with one sample each; one zero if there are no rows."""
    samples = [sample for row in rows for sample in row]
    return array[samples] if samples else np.zeros((1, *array.shape[1:]), array.dtype)


PAIR_SUMS = ("pairs", "chosen", "rejected", "chosen_logps", "rejected_logps", "accurate")


def pair_means(sums: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics of pairs by the names of TRL. `sums`: those of `PAIR_SUMS`."""
    count = sums["pairs"]
    if not count:
        return {}
    return {
        "rewards/chosen": sums["chosen"] / count,
        "rewards/rejected": sums["rejected"] / count,
        "rewards/margins": (sums["chosen"] - sums["rejected"]) / count,
        "rewards/accuracies": sums["accurate"] / count,
        "logps/chosen": sums["chosen_logps"] / count,
        "logps/rejected": sums["rejected_logps"] / count,
    }
