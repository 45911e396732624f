"""A user's own configuration of DeepSpeed: the options that a run takes, and those that fields of the run spec set. No
torch.

https://www.deepspeed.ai/docs/config-json/
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from trainer.formats import printable, quoted

if TYPE_CHECKING:
    from trainer.config import RunSpec

_MAX_DEPTH, _MAX_OPTIONS = 5, 200
_MAX_NUMBER = 10**12
AUTO = "auto"  # transformers and accelerate fill such a value from their own arguments
# Options that change neither the result nor the files of a run, and their types.
_FREE: dict[str, type[bool] | type[int]] = {
    "zero_optimization.overlap_comm": bool,
    "zero_optimization.contiguous_gradients": bool,
    "zero_optimization.reduce_scatter": bool,
    "zero_optimization.allgather_partitions": bool,
    "zero_optimization.round_robin_gradients": bool,
    "zero_optimization.reduce_bucket_size": int,
    "zero_optimization.allgather_bucket_size": int,
    "zero_optimization.stage3_prefetch_bucket_size": int,
    "zero_optimization.stage3_param_persistence_threshold": int,
    "zero_optimization.stage3_max_live_parameters": int,
    "zero_optimization.stage3_max_reuse_distance": int,
    "zero_optimization.sub_group_size": int,
    "zero_optimization.offload_optimizer.pin_memory": bool,
    "zero_optimization.offload_param.pin_memory": bool,
    "wall_clock_breakdown": bool,
}
# Options that the trainer determines, with the reason.
_DETERMINED = {
    "gradient_accumulation_steps": "the number of ranks determines it",
    "steps_per_print": "metrics.jsonl has every step",
    "scheduler": "the fields schedule and warmup define the learning rate",
}


def _owned(spec: RunSpec) -> dict[str, tuple[Any, str]]:
    """Return {option: (value that the spec gives it, field of the spec)}."""
    return {
        "train_batch_size": (spec.rows_per_step, "total_batch_size"),
        "train_micro_batch_size_per_gpu": (spec.batch_size, "batch_size"),
        "gradient_clipping": (spec.max_grad_norm, "max_grad_norm"),
        "optimizer.type": ("AdamW", "optimizer"),
        "optimizer.params.lr": (spec.lr, "lr"),
        "optimizer.params.weight_decay": (spec.weight_decay, "weight_decay"),
        "optimizer.params.betas": ([0.9, 0.999], "optimizer"),
        "optimizer.params.eps": (1e-8, "optimizer"),
        "optimizer.params.torch_adam": (True, "optimizer"),
        "bf16.enabled": (spec.precision == "bf16-mixed", "precision"),
        "fp16.enabled": (spec.precision == "fp16-mixed", "precision"),
        "communication_data_type": ("bf16" if spec.gradient_comm_dtype == "bf16" else "fp32", "gradient_comm_dtype"),
        "zero_optimization.stage": (spec.deepspeed_stage, "deepspeed_stage"),
        "zero_optimization.offload_optimizer.device": (
            "none" if spec.deepspeed_offload == "none" else "cpu",
            "deepspeed_offload",
        ),
        "zero_optimization.offload_param.device": (
            "cpu" if spec.deepspeed_offload == "all" else "none",
            "deepspeed_offload",
        ),
    }


def _leaves(config: Mapping[str, Any], prefix: str = "", depth: int = 1) -> Iterator[tuple[str, Any]]:
    """Yield (dotted name, value) of nested mappings. Raises ValueError if they are nested too deeply."""
    for name, value in config.items():
        path = f"{prefix}{name}"
        if isinstance(value, Mapping):
            if depth == _MAX_DEPTH:
                raise ValueError(f"deepspeed_config: {printable(path, 80)}: the mappings are too deep")
            yield from _leaves(value, f"{path}.", depth + 1)
        else:
            yield path, value


def check_file(spec: RunSpec) -> None:
    """Check the options in `deepspeed_config` against the other fields of the spec.

    Raises:
        ValueError: an option that a run does not take, or whose value differs from that of a field.
    """
    owned = _owned(spec)
    for number, (name, value) in enumerate(_leaves(spec.deepspeed_config)):
        shown = printable(name, 80)
        if number == _MAX_OPTIONS:
            raise ValueError(f"deepspeed_config: more than {_MAX_OPTIONS} options")
        if value == AUTO:
            continue
        reason = _DETERMINED.get(name) or _DETERMINED.get(name.partition(".")[0])
        if reason:
            raise ValueError(f"deepspeed_config: {shown}: {reason}: remove it, or set it to auto")
        if name in owned:
            expected, field = owned[name]
            if (type(value) is bool and type(expected) is not bool) or value != expected:
                raise ValueError(
                    f"deepspeed_config: {shown} is {quoted(value)}, but the run has {quoted(expected)}: set {field}, or remove it"
                )
        elif name in _FREE:
            whole = isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MAX_NUMBER
            if not (isinstance(value, bool) if _FREE[name] is bool else whole):
                kind = "true or false" if _FREE[name] is bool else "an integer >= 0"
                raise ValueError(f"deepspeed_config: {shown}: expected {kind}, got {quoted(value)}")
        else:
            raise ValueError(f"deepspeed_config: {shown} is not supported: remove it")


def free_options(spec: RunSpec) -> dict[str, Any]:
    """Return the options of `deepspeed_config` that no field of the spec has, by dotted name."""
    found = _leaves(spec.deepspeed_config)
    return {name: value for name, value in found if name in _FREE and value != AUTO}


def merge(config: dict[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration with options by dotted name. Options of a disabled offload are left out."""
    for name, value in options.items():
        *parents, leaf = name.split(".")
        place: dict[str, Any] | None = config
        for parent in parents:
            place = place.get(parent) if place is not None else None
        if place is not None:
            place[leaf] = value
    return config
