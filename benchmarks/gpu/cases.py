"""The training runs that the checks compare: sizes of models, and fields of the run spec. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

# hidden_size, intermediate_size, layers, heads, key-value heads, data type of the files
Size = tuple[int, int, int, int, int, str]


@dataclass(frozen=True)
class Scale:
    """Sizes of the models and of a step. `rows`: rows per step; `steps`: steps of every run; `cpu`: a stand-in for a GPU."""

    name: str
    sizes: dict[str, Size]
    seq_length: int
    batch_size: int
    rows: int
    steps: int
    collective_mib: int
    lora_lr: float = 1e-3
    full_lr: float = 3e-4
    cpu: bool = False

    def fields(self, case: Case) -> dict[str, Any]:
        """Return the fields of the run spec that this scale sets for a case."""
        return {
            "lr": self.full_lr if case.fields.get("lora_r") == 0 else self.lora_lr,
            "seq_length": self.seq_length,
            "batch_size": self.batch_size,
            "total_batch_size": self.rows,
            "max_steps": self.steps,
            "epochs": 200,
            "warmup": 1,
            "packing": True,
            "precision": "bf16-mixed",
            "kernels": "torch",
            "loggers": "none",
            "eval_split": 0,
            "checkpoint_interval": 0,
        }


_CUDA_SIZES: dict[str, Size] = {
    "small": (512, 1376, 8, 8, 2, "float32"),
    "medium": (1024, 2816, 24, 16, 4, "float32"),
    "large": (2048, 5632, 22, 32, 4, "bfloat16"),
}
_CPU_SIZES: dict[str, Size] = {
    "small": (64, 192, 2, 2, 1, "float32"),
    "medium": (64, 192, 3, 2, 1, "float32"),
    "large": (128, 384, 3, 2, 1, "bfloat16"),
}
LARGE_MEMORY = 22 * 1024  # MiB of a GPU from which micro-batches have four rows
CUDA = Scale("cuda", _CUDA_SIZES, seq_length=1024, batch_size=4, rows=16, steps=12, collective_mib=256)
CUDA_SMALL = Scale("cuda-small", _CUDA_SIZES, seq_length=512, batch_size=2, rows=8, steps=12, collective_mib=64)
CPU = Scale(
    "cpu",
    _CPU_SIZES,
    seq_length=64,
    batch_size=2,
    rows=4,
    steps=8,
    collective_mib=1,
    lora_lr=3e-2,
    full_lr=1e-2,
    cpu=True,
)


def scale_for(device: str, memory_mib: float) -> Scale:
    """Return the scale for a device of `memory_mib` MiB."""
    if device == "cpu":
        return CPU
    return CUDA if memory_mib >= LARGE_MEMORY else CUDA_SMALL


@dataclass(frozen=True)
class Case:
    """One run of the trainer.

    Attributes:
        size: a name in `Scale.sizes`.
        fields: fields of the run spec, beyond `Scale.fields`.
        timed: its speed counts, so nothing else runs at the same time.
        planned: the plan predicts its speed too, from a measurement.
        ranks: ranks that torchrun starts; 0: `python -m trainer` without torchrun.
        seconds: time limit.
        packages: Python packages that it needs, besides those of every run.
    """

    size: str
    fields: dict[str, Any] = field(default_factory=dict)
    timed: bool = False
    planned: bool = False
    ranks: int = 0
    seconds: int = 120
    packages: tuple[str, ...] = ()


FULL = {"lora_r": 0}
FP32 = {"precision": "32-true"}
ZERO = FULL | {"strategy": "deepspeed"}
FSDP = FULL | {"strategy": "fsdp"}
NF4_FSDP = {"strategy": "fsdp", "quantize": "nf4"}
PIPELINE = {"strategy": "pipeline"}
DILOCO = {"strategy": "diloco", "local_steps": 3}
CASES: dict[str, Case] = {
    "lora": Case("medium", timed=True, planned=True),
    "full": Case("medium", FULL, timed=True, planned=True),
    "large": Case("large", timed=True, planned=True),
    "checkpointing": Case("medium", {"gradient_checkpointing": True}, timed=True, planned=True),
    "kernels": Case("large", {"kernels": "auto"}, timed=True, planned=True),
    "fp32": Case("medium", FP32, timed=True),
    "fp16": Case("medium", {"precision": "fp16-mixed"}, timed=True),
    "eager": Case("small", timed=True),
    "compiled": Case("small", {"torch_compile": True}, timed=True, seconds=180),
    "nf4": Case("medium", {"quantize": "nf4"}, packages=("bitsandbytes",)),
    "fsdp-nf4": Case("medium", NF4_FSDP, packages=("bitsandbytes",)),
    "fsdp-nf4-offload": Case("medium", NF4_FSDP | {"fsdp_offload": True}, packages=("bitsandbytes",)),
    "adamw8bit": Case("medium", FULL | {"optimizer": "adamw8bit"}, packages=("bitsandbytes",)),
    "fsdp": Case("medium", FSDP),
    "fsdp-offload": Case("medium", FSDP | {"fsdp_offload": True}),
    "fsdp-fp16": Case("medium", FSDP | {"precision": "fp16-mixed"}),
    "fsdp-compiled": Case("medium", FSDP | {"torch_compile": True}, seconds=180),
    "zero2": Case("medium", ZERO | {"deepspeed_offload": "optimizer"}, packages=("deepspeed",)),
    "zero3": Case("medium", ZERO | {"deepspeed_stage": 3, "deepspeed_offload": "all"}, packages=("deepspeed",)),
    "one-rank": Case("small", FP32, ranks=1),
    "two-ranks": Case("small", FP32, ranks=2),
    "pipeline": Case("small", FP32 | PIPELINE, ranks=2),
    "full-one": Case("small", FP32 | FULL, ranks=1),
    "pipeline-full": Case("small", FP32 | FULL | PIPELINE | {"gradient_checkpointing": True}, ranks=2),
    "pipeline-nf4": Case("medium", PIPELINE | {"quantize": "nf4"}, ranks=2, packages=("bitsandbytes",)),
    "pipeline-large": Case("large", FULL | PIPELINE, ranks=2),
    "diloco": Case("small", FP32 | DILOCO, ranks=2),
    "unsloth": Case("medium", {"backend": "unsloth"}, packages=("unsloth",)),
}
