"""Fields of a run spec that exclude or require each other."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer.config.dataset_source import columns_error
from trainer.config.presets import TINY
from trainer.config.strategies import DEFAULT_STRATEGY

if TYPE_CHECKING:
    from trainer.config.run_spec import RunSpec

MAX_FAKE_TOKENS = 2**28  # 1.3 GB of memory
MAX_FAKE_ROWS = 2**20


def check_combinations(spec: RunSpec) -> None:
    """Check that the fields of a spec can be combined, under any strategy. Raises ValueError with one line."""
    if spec.gradient_accumulation and "batch_size" in spec.automatic:
        raise ValueError(
            "batch_size: auto cannot be combined with gradient_accumulation, which counts micro-batches: set total_batch_size"
        )
    if spec.gradient_accumulation and spec.total_batch_size:
        product = spec.gradient_accumulation * spec.batch_size
        if product != spec.total_batch_size:
            raise ValueError(
                f"gradient_accumulation {spec.gradient_accumulation} x batch_size {spec.batch_size} = {product} rows, "
                f"but total_batch_size is {spec.total_batch_size}: set only one of them"
            )
    for source in spec.sources:
        if reason := columns_error(source.columns):
            raise ValueError(reason)
    if "none" in spec.loggers and len(spec.loggers) > 1:
        raise ValueError(f"loggers: 'none' excludes other loggers, got {','.join(spec.loggers)}")
    if spec.backend == "unsloth" and not spec.lora_r:
        raise ValueError("backend: unsloth requires LoRA, got lora_r 0: set backend=peft for full fine-tuning")
    if spec.quantize != "none" and not spec.lora_r:
        raise ValueError(
            f"quantize: {spec.quantize} requires LoRA, got lora_r 0: 4-bit weights cannot be trained, set lora_r=16"
        )
    if spec.fake_data and (spec.fake_rows > MAX_FAKE_ROWS or spec.fake_tokens > MAX_FAKE_TOKENS):
        raise ValueError(
            f"fake_data: the run needs {spec.fake_rows} rows of {spec.seq_length} tokens in memory, of at most "
            f"{MAX_FAKE_ROWS} rows and {MAX_FAKE_TOKENS} tokens: set a smaller max_steps"
        )
    if spec.data_part and spec.fake_data:
        raise ValueError(f"data_part: {spec.data_part} needs a dataset: omit fake_data or data_part")
    if spec.shard and not 1 <= spec.shard[0] <= spec.shard[1]:
        raise ValueError(
            f"data_part: {spec.data_part}: expected a part from 1 to {spec.shard[1]}, and at least one part"
        )
    _check_script(spec)
    _check_distillation(spec)


def _check_script(spec: RunSpec) -> None:
    """Check that a spec with a script sets nothing that only the trainer can do. Raises ValueError with one line."""
    if not spec.script:
        return
    if spec.strategy != DEFAULT_STRATEGY:
        raise ValueError(f"script: the script decides how ranks share the work: omit strategy ({spec.strategy})")
    for name in ("fake_data", "teacher", "distill_alpha", "merge", "torch_compile", "data_part"):
        if getattr(spec, name):
            raise ValueError(f"script: {name} is for the trainer, which does not run: omit {name}, or script")
    for name, without in (("method", "sft"), ("quantize", "none"), ("backend", "auto"), ("optimizer", "adamw")):
        if (value := getattr(spec, name)) != without:
            raise ValueError(f"script: {name} {value} is for the trainer, which does not run: omit {name}, or script")


def _check_distillation(spec: RunSpec) -> None:
    """Check the fields of a run with a teacher. Raises ValueError with one line."""
    if spec.distill_alpha and not spec.teacher:
        raise ValueError(
            f"distill_alpha: {spec.distill_alpha:g} requires a teacher model, whose probabilities the ranks compute: "
            "set teacher in the run spec, or distill_alpha=0"
        )
    if spec.teacher and not spec.distill_alpha:
        raise ValueError("teacher: it has no effect with distill_alpha 0: set distill_alpha=0.5")
    if spec.teacher == TINY:
        raise ValueError("teacher: tiny has random weights: give a model folder, host:/folder, or a hub id (org/name)")
