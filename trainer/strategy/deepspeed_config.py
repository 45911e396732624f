"""Configurations of DeepSpeed from the run spec: for the engine of a run, and as files for other tools. No torch.

https://www.deepspeed.ai/docs/config-json/
"""

from __future__ import annotations

import base64
import contextlib
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from trainer.common.errors import UserError
from trainer.model_files.model_shape import shape_of
from trainer.strategy.deepspeed_file import check_accumulation, free_options, merge
from trainer.strategy.plan import even_micro_batches

if TYPE_CHECKING:
    from trainer.config import RunSpec

_NEVER = 2**62  # steps between DeepSpeed's own progress lines
_BUCKET = 8_000_000  # numbers per bucket; DeepSpeed's default of 500 M allocates 2 GB


def bucket(spec: RunSpec, trained: int) -> int:
    """Return the numbers per bucket, which DeepSpeed allocates in full: at most the number of trained weights, or as a user's file says."""
    given = free_options(spec).get("zero_optimization.reduce_bucket_size")
    return given or min(_BUCKET, max(1, trained))


def prefetched(parameters: int) -> int:
    """Return the numbers that stage 3 prefetches: DeepSpeed's default, or less for a small model."""
    return min(50_000_000, parameters // 10)


def bucket_options(spec: RunSpec, trained: int, parameters: int) -> dict[str, int]:
    """Return the sizes of DeepSpeed's buckets in numbers, for a model with these trained weights and all its `parameters`."""
    sizes = dict.fromkeys(("reduce_bucket_size", "allgather_bucket_size"), bucket(spec, trained))
    return sizes | ({"stage3_prefetch_bucket_size": prefetched(parameters)} if spec.deepspeed_stage == 3 else {})


def common_options(spec: RunSpec) -> dict[str, Any]:
    """Return the options that this trainer and other tools pass to DeepSpeed."""
    zero: dict[str, Any] = {"stage": spec.deepspeed_stage}
    if spec.deepspeed_offload != "none":
        zero["offload_optimizer"] = {"device": "cpu"}
    if spec.deepspeed_offload == "all":
        zero["offload_param"] = {"device": "cpu"}
    return {
        "train_micro_batch_size_per_gpu": spec.batch_size,
        "gradient_clipping": spec.max_grad_norm,
        "zero_optimization": zero,
    }


def engine_config(spec: RunSpec, trained: int, parameters: int) -> dict[str, Any]:
    """Return the configuration of the engine. `trained`, `parameters`: number of trained weights, and of all weights."""
    config = common_options(spec)
    config["zero_optimization"] |= bucket_options(spec, trained, parameters)
    merge(config, free_options(spec))
    return config | {
        "gradient_accumulation_steps": 1,  # the training loop marks the last micro-batch of a step
        "zero_force_ds_cpu_optimizer": False,
        "communication_data_type": _comm_dtype(spec),
        "steps_per_print": _NEVER,
    }


def _comm_dtype(spec: RunSpec) -> str:
    return "bf16" if spec.comm_dtype == "bf16" else "fp32"


def file_config(spec: RunSpec, world: int) -> dict[str, Any]:
    """Return a configuration file for other tools, with an optimizer, for `world` processes.

    Raises UserError: the rows of a step do not divide evenly, or a user's own file has other micro-batches.
    """
    accumulation = even_micro_batches(spec, world)
    check_accumulation(spec, accumulation, world)
    config = common_options(spec) | {
        "train_batch_size": spec.rows_per_step,
        "gradient_accumulation_steps": accumulation,
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": spec.lr, "weight_decay": spec.weight_decay, "torch_adam": True},
        },
        "communication_data_type": _comm_dtype(spec),
    }
    if scheduler := _scheduler(spec):
        config["scheduler"] = scheduler
    zero = config["zero_optimization"]
    with contextlib.suppress(UserError):  # without the shape of the model, DeepSpeed's own bucket sizes apply
        shape = shape_of(spec)
        zero |= bucket_options(spec, shape.trained(spec), shape.parameters)
    zero["overlap_comm"] = True
    for name in ("offload_optimizer", "offload_param"):
        if name in zero:
            zero[name]["pin_memory"] = True
    if spec.precision != "32-true":
        config[spec.precision.removesuffix("-mixed")] = {"enabled": True}
    return merge(config, free_options(spec))


def _scheduler(spec: RunSpec) -> dict[str, Any] | None:
    """Return DeepSpeed's scheduler with the spec's schedule, or None if it needs none or a number of steps that is not known.

    DeepSpeed's shortest warmup has 2 steps.
    https://deepspeed.readthedocs.io/en/latest/schedulers.html
    """
    constant = spec.schedule == "constant"
    if (constant and not spec.warmup) or (not spec.max_steps and not (constant and spec.warmup >= 1)):
        return None
    warmup = round(spec.warmup * spec.max_steps) if spec.warmup < 1 else round(spec.warmup)
    linear = {"warmup_num_steps": max(1, warmup), "warmup_type": "linear"}
    if spec.schedule == "cosine":
        params = linear | {"total_num_steps": spec.max_steps, "warmup_min_ratio": 0.0, "cos_min_ratio": 0.0}
        return {"type": "WarmupCosineLR", "params": params}
    rates = linear | {"warmup_min_lr": 0.0, "warmup_max_lr": spec.lr}
    if spec.schedule == "linear":
        return {"type": "WarmupDecayLR", "params": rates | {"total_num_steps": spec.max_steps}}
    return {"type": "WarmupLR", "params": rates}


def accelerate_options(spec: RunSpec, processes: Sequence[int]) -> dict[str, Any]:
    """Return the options of accelerate's configuration file, with DeepSpeed's file in it.

    accelerate reads the path of a file of DeepSpeed, or its JSON in base64. Beside it, accelerate refuses its own
    options of the same meaning, such as mixed_precision; None removes one. `processes`: number of processes of every
    host. Raises UserError: as `file_config`.
    """
    config = file_config(spec, sum(processes))
    options: dict[str, Any] = {
        "deepspeed_config_file": base64.urlsafe_b64encode(json.dumps(config).encode()).decode(),
        "zero3_init_flag": spec.deepspeed_stage == 3,
    }
    if len(processes) > 1:  # otherwise accelerate requires pdsh and a hostfile
        options["deepspeed_multinode_launcher"] = "standard"
    return {"distributed_type": "DEEPSPEED", "mixed_precision": None, "deepspeed_config": options}
