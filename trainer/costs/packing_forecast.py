"""Whether rows will be packed, as far as the architecture of the model determines it. No torch: the plan of a run says it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from trainer.common.errors import UserError
from trainer.common.formats import counted, printable
from trainer.config.methods import METHODS
from trainer.config.presets import TINY_RUN
from trainer.model_files.model_shape import model_type

if TYPE_CHECKING:
    from trainer.config import RunSpec
    from trainer.data.data_report import DataReport

FEW_STEPS = 20
# Model types of transformers by whether they keep the samples of a packed row apart. The ranks test every model themselves:
# these lists only allow the plan to say it before a run starts. tests/integration/trainer/test_architectures.py verifies them.
KEEPS_APART = frozenset(
    ("llama", "qwen2", "qwen3", "qwen3_moe", "mistral", "ministral3", "mixtral", "gemma2", "gemma3_text", "phi", "phi3")
    + ("smollm3", "olmo2", "granite", "glm4", "cohere", "starcoder2", "stablelm", "gpt2", "gpt_neox")
)
MIXES = frozenset(("gpt_oss", "opt", "falcon", "bloom", "mamba"))


def packing_text(spec: RunSpec) -> str:
    """Return whether rows are packed, and the reason if they are not or if only the ranks can find out."""
    if spec.packing is False:
        return "not packed: packing=false"
    if not METHODS[spec.method].packs:
        return f"not packed: a row has one sequence with method={spec.method}"
    if spec.packing is True:
        return _packed(spec)
    try:
        kind = model_type(spec)
    except UserError:
        return "packed if the model keeps the samples of a row apart, which the ranks test"
    if kind in MIXES:
        return f"not packed: {kind} mixes the samples of a packed row"
    if kind in KEEPS_APART:
        return _packed(spec)
    name = printable(kind, 80) or "this model"
    return f"packed if {name} keeps the samples of a row apart, which the ranks test"


def may_pack(spec: RunSpec) -> bool:
    return not packing_text(spec).startswith("not packed")


def step_lines(spec: RunSpec, samples: int, rows: int, about: str = "") -> list[str]:
    """Return the number of steps of a run and what is in one, and what a user must know about them.

    `samples, rows`: of an epoch. `about`: before numbers that are estimates.
    """
    size, epochs, rows = spec.samples_per_step, float(spec.epochs), max(1, rows)
    steps = spec.max_steps or math.ceil(rows * epochs / size)
    if spec.max_steps:
        epochs = steps * size / rows
    each = samples * epochs / steps
    lines = [
        f"steps: {about}{steps} of {size} rows ({each:.3g} samples a step); epochs: {epochs:.3g} of {counted(samples, 'sample')}"
    ]
    given = {"epochs": spec.epochs, "max_steps": spec.max_steps}
    if spec.max_steps and spec.epochs > 1 and given != TINY_RUN:
        lines.append(
            f"note: max_steps={spec.max_steps} decides, and repeats the data: epochs={spec.epochs} has no effect"
        )
    if steps < FEW_STEPS and not (spec.max_steps or spec.fake_data):
        lines.append(
            f"WARNING: {about}{counted(steps, 'optimizer step')}, which may teach little: decrease total_batch_size, increase epochs, or set "
            "max_steps (docs/train.md, What a step is)"
        )
    return lines


def steps_about(spec: RunSpec, data: DataReport) -> list[str]:
    """Return `step_lines` for the totals of a dataset, whose rows are full where they are packed."""
    samples = data.samples - data.loss.lost
    read = (data.samples + data.unread) / data.samples * (1 - spec.eval_split) / (spec.shard or (1, 1))[1]
    filled = data.kept_tokens / spec.seq_length
    rows = filled if may_pack(spec) else max(filled, samples)
    return step_lines(spec, max(1, round(samples * read)), max(1, math.ceil(rows * read)), "about ") if samples else []


def _packed(spec: RunSpec) -> str:
    return f"packed (several samples share a row of {spec.seq_length} tokens)"
