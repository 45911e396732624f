"""The properties of a training method before a run starts: validation, weights of samples and costs. Importable without torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from trainer.config.methods import METHODS

if TYPE_CHECKING:
    import numpy as np

    from trainer.config import RunSpec
    from trainer.data.corpus import Corpus
    from trainer.method.method_base import Method


class MethodPlan:
    """The properties of one method.

    A new method is one file with a subclass of this class, which is its `PLAN`, and a subclass of `Method`; and one line in
    `trainer.config.methods.METHODS`. The defaults describe supervised fine-tuning.
    """

    sequences: ClassVar[int] = 1  # sequences of one sample in a pass with gradients; each takes a row of a micro-batch
    has_reference: ClassVar[bool] = False  # the loss compares the model with the untrained one
    # The work of a step is that of its tokens: no reference, no completions, no second sequence. MFU is known then.
    computes_tokens_only: ClassVar[bool] = False
    # Names of the sums over samples that the loss adds (see Method.add_metrics). Ranks exchange them in this order.
    sums: ClassVar[tuple[str, ...]] = ()

    def validate(self, spec: RunSpec) -> None:
        """Check that the fields of the spec can be combined with the method and its strategy. Raises ValueError with one line."""

    def create(self, spec: RunSpec) -> Method:
        """Return the computation of the method."""
        raise NotImplementedError

    def weights(self, corpus: Corpus) -> np.ndarray:
        """Return the weight of every sample in the mean loss, int64 [samples]: by default its tokens with loss.

        The loss of an update is divided by the weights of its samples, which every rank knows.
        """
        return corpus.trained_counts()

    def means(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Return the metrics of a step or of an evaluation by name. `sums`: the sums over the samples of all ranks."""
        return {}

    def precomputes(self, spec: RunSpec) -> bool:
        """Return whether the log-probabilities of the reference are computed before the first step (see Method.reference_values)."""
        return False

    def as_rows(self, spec: RunSpec) -> RunSpec:
        """Return the spec of supervised fine-tuning whose rows are the sequences of this method: memory and time follow from it."""
        if METHODS[spec.method].packs:
            return spec
        rows = {"batch_size": spec.batch_size * self.sequences, "gradient_accumulation": None, "packing": False}
        return spec.model_copy(update=rows | {"total_batch_size": spec.rows_per_step * self.sequences})

    def passes(self, spec: RunSpec) -> int:
        """Return the number of passes without gradients over a micro-batch, beside its pass with gradients."""
        return 0

    def time_factor(self, spec: RunSpec) -> float:
        """Return the time of a micro-batch relative to that of its pass with gradients alone."""
        forward = 1 / (3 - bool(spec.lora_r) + spec.gradient_checkpointing)
        return 1 + self.passes(spec) * forward
