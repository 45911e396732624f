"""The cost of a teacher model next to the student: its weights and logits in memory, and its forward pass. No torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer.common.errors import UserError
from trainer.costs.cost import LOSS_CHUNK, forward_products
from trainer.model_files.model_shape import shape_of

if TYPE_CHECKING:
    from trainer.config import RunSpec
    from trainer.costs.cost import RowStats
    from trainer.model_files.model_shape import Shape

# Copies of a chunk of logits in float32 that the loss holds at the same time: with and without a mixture of both models.
_MIXED, _PLAIN = 6, 3


def teacher_shape(spec: RunSpec) -> Shape | None:
    """Return the shape of the spec's teacher model, or None without one. Raises UserError as `shape_of`."""
    if not spec.teacher:
        return None
    try:
        return shape_of(spec.model_copy(update={"model": spec.teacher}))
    except UserError as error:
        raise UserError(f"teacher: {str(error).removeprefix('model: ')}") from None


def _bytes_per_number(spec: RunSpec) -> int:
    return 2 if spec.precision == "bf16-mixed" else 4


def teacher_weights(spec: RunSpec) -> int:
    """Return the bytes of the teacher's weights, which every rank holds in full."""
    shape = teacher_shape(spec)
    return shape.parameters * _bytes_per_number(spec) if shape else 0


def teacher_memory(spec: RunSpec, vocabulary: int, rows: RowStats) -> int:
    """Return the bytes that learning from probabilities needs on a process, beyond learning from text.

    `vocabulary`: vocabulary of the student. `rows`: rows of the dataset.
    """
    shape = teacher_shape(spec)
    if not shape:
        return 0
    places = spec.batch_size * rows.places * rows.trained
    copies = _MIXED if 0 < spec.gkd_beta < 1 else _PLAIN
    chunk = min(places * vocabulary, max(LOSS_CHUNK, vocabulary)) * 4 * copies
    chunk += places * shape.vocabulary * _bytes_per_number(spec)
    return teacher_weights(spec) + round(chunk)


def teacher_flops(spec: RunSpec, rows: RowStats) -> float:
    """Return the floating point operations of the teacher's forward pass for one row (a multiply-add counts as two)."""
    shape = teacher_shape(spec)
    if not shape:
        return 0.0
    return 2 * sum(forward_products(shape, rows)) * rows.places
