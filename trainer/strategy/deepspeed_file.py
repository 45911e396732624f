"""A user's own configuration of DeepSpeed: options that set fields of the run spec, and those that a run passes on. No torch.

https://www.deepspeed.ai/docs/config-json/
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from trainer.common.errors import UserError
from trainer.common.formats import printable, quoted

if TYPE_CHECKING:
    from trainer.config import RunSpec

_MAX_DEPTH, _MAX_OPTIONS = 5, 200
_MAX_NUMBER = 10**12
AUTO = "auto"  # transformers and accelerate fill such a value from their own arguments
_ACCUMULATION = "gradient_accumulation_steps"
# Options that change neither the result nor the files of a run, and their types.
_ZERO_FLAGS = (
    "overlap_comm contiguous_gradients reduce_scatter allgather_partitions round_robin_gradients "
    "stage3_gather_16bit_weights_on_model_save offload_optimizer.pin_memory offload_param.pin_memory"
)
_ZERO_NUMBERS = (
    "reduce_bucket_size allgather_bucket_size stage3_prefetch_bucket_size stage3_param_persistence_threshold "
    "stage3_max_live_parameters stage3_max_reuse_distance sub_group_size"
)
FREE: dict[str, type[bool] | type[int]] = {
    **{f"zero_optimization.{name}": bool for name in _ZERO_FLAGS.split()},
    **{f"zero_optimization.{name}": int for name in _ZERO_NUMBERS.split()},
    **dict.fromkeys(("zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "wall_clock_breakdown"), bool),
    "steps_per_print": int,
}
# Of the loss scale. They have no effect, because the factor of the loss is that of the trainer, with any strategy.
LOSS_SCALE = {
    f"fp16.{name}"
    for name in (
        "auto_cast", "loss_scale", "loss_scale_window", "initial_scale_power", "hysteresis", "consecutive_hysteresis",
        "min_loss_scale",
    )
}  # fmt: skip
_SCHEDULES = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
_OPTIMIZERS = ("AdamW", "Adam")  # DeepSpeed's Adam is AdamW unless adam_w_mode is false
# Options with the value of a field.
_FIELDS = {
    "train_batch_size": "total_batch_size",
    "train_micro_batch_size_per_gpu": "batch_size",
    "gradient_clipping": "max_grad_norm",
    "optimizer.params.lr": "lr",
    "optimizer.params.weight_decay": "weight_decay",
    "scheduler.params.warmup_max_lr": "lr",
    "scheduler.params.warmup_num_steps": "warmup",
    "scheduler.params.total_num_steps": "max_steps",
    "zero_optimization.stage": "deepspeed_stage",
}


def derived_fields(config: Any, values: Mapping[str, Any], ranks: int | None) -> dict[str, tuple[Any, str]]:
    """Return the fields that the options of DeepSpeed set and `values` does not: {field: (value, option of DeepSpeed)}.

    `config`: the options; none of other types than a mapping. `values`: fields of the spec, as far as they are given.
    `ranks`: number of ranks of the run, if it is known. Raises ValueError: the options are nested too deeply, or need
    the number of ranks.
    """
    options = {name: value for name, value in leaves(config) if value != AUTO} if isinstance(config, Mapping) else {}
    found: dict[str, tuple[Any, str]] = {}
    for name, field in _FIELDS.items():
        if name in options:
            found.setdefault(field, (options[name], name))
    for name, precision in (("bf16.enabled", "bf16-mixed"), ("fp16.enabled", "fp16-mixed")):
        if options.get(name) is True:
            found.setdefault("precision", (precision, name))
    devices = [options.get(f"zero_optimization.{name}.device") for name in ("offload_optimizer", "offload_param")]
    if devices[0] == "cpu":
        offload = "all" if devices[1] == "cpu" else "optimizer"
        found["deepspeed_offload"] = (offload, "zero_optimization.offload_optimizer.device")
    if options.get("communication_data_type") in ("bf16", "bfp16"):
        found["comm_dtype"] = ("bf16", "communication_data_type")
    if schedule := _SCHEDULES.get(str(options.get("scheduler.type"))):
        found["schedule"] = (schedule, "scheduler.type")
    given = {name for name, value in values.items() if value is not None}
    if given & {"total_batch_size", "gradient_accumulation"}:
        found.pop("total_batch_size", None)
    elif "total_batch_size" not in found and _ACCUMULATION in options:
        found["gradient_accumulation"] = (_of_all_ranks(options[_ACCUMULATION], ranks), _ACCUMULATION)
    return {field: value for field, value in found.items() if field not in given}


def _of_all_ranks(count: Any, ranks: int | None) -> Any:
    """Return the micro-batches of all ranks for those of one; an invalid count unchanged. Raises ValueError without `ranks`."""
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        return count
    if ranks is None:
        raise ValueError(
            f"deepspeed_config: {_ACCUMULATION} counts the micro-batches of one rank, and a step has the same rows on any "
            f"number of ranks: set total_batch_size to {count} x batch_size x ranks"
        )
    return count * ranks


def owned(spec: RunSpec) -> dict[str, tuple[Any, str]]:
    """Return {option: (value that the spec gives it, or a tuple of equivalent values; field of the spec)}."""
    device = "none" if spec.deepspeed_offload == "none" else "cpu"
    return {
        **{option: (getattr(spec, field), field) for option, field in _FIELDS.items()},
        "train_batch_size": (spec.rows_per_step, "total_batch_size"),
        "optimizer.type": (_OPTIMIZERS, "optimizer"),
        "optimizer.params.betas": ([0.9, 0.999], "optimizer"),
        "optimizer.params.eps": (1e-8, "optimizer"),
        "optimizer.params.torch_adam": ((True, False), "optimizer"),
        "optimizer.params.adam_w_mode": (True, "optimizer"),
        "scheduler.type": (next(name for name, word in _SCHEDULES.items() if word == spec.schedule), "schedule"),
        "scheduler.params.warmup_min_lr": (0, "schedule"),
        "scheduler.params.warmup_type": ("linear", "schedule"),
        "scheduler.params.warmup_min_ratio": (0, "schedule"),
        "scheduler.params.cos_min_ratio": (0, "schedule"),
        "bf16.enabled": (spec.precision == "bf16-mixed", "precision"),
        "fp16.enabled": (spec.precision == "fp16-mixed", "precision"),
        "communication_data_type": (("bf16", "bfp16") if spec.comm_dtype == "bf16" else "fp32", "comm_dtype"),
        "zero_optimization.offload_optimizer.device": (device, "deepspeed_offload"),
        "zero_optimization.offload_param.device": (
            device if spec.deepspeed_offload == "all" else "none",
            "deepspeed_offload",
        ),
    }


def leaves(config: Mapping[str, Any], prefix: str = "", depth: int = 1) -> Iterator[tuple[str, Any]]:
    """Yield (dotted name, value) of nested mappings. Raises ValueError if they are nested too deeply."""
    for name, value in config.items():
        path = f"{prefix}{name}"
        if isinstance(value, Mapping):
            if depth == _MAX_DEPTH:
                raise ValueError(f"deepspeed_config: {printable(path, 80)}: the mappings are too deep")
            yield from leaves(value, f"{path}.", depth + 1)
        else:
            yield path, value


def check_file(spec: RunSpec) -> None:
    """Check the options in `deepspeed_config` against the other fields of the spec.

    Raises ValueError: an option that a run does not take, or whose value differs from that of a field.
    """
    fields = owned(spec)
    for number, (name, value) in enumerate(leaves(spec.deepspeed_config)):
        shown = printable(name, 80)
        if number == _MAX_OPTIONS:
            raise ValueError(f"deepspeed_config: more than {_MAX_OPTIONS} options")
        if value == AUTO or name in LOSS_SCALE:
            continue
        if name in fields:
            _check_owned(shown, value, *fields[name])
        elif name in FREE:
            if not (isinstance(value, bool) if FREE[name] is bool else _is_whole(value)):
                kind = "true or false" if FREE[name] is bool else "an integer >= 0"
                raise ValueError(f"deepspeed_config: {shown}: expected {kind}, got {quoted(value)}")
        elif name == _ACCUMULATION:
            if not _is_whole(value) or not value:
                raise ValueError(f"deepspeed_config: {shown}: expected an integer >= 1, got {quoted(value)}")
        else:
            raise ValueError(f"deepspeed_config: {shown} is not supported: remove it")


def _is_whole(value: Any) -> bool:
    """Return whether a value is an integer in range, also as 2e8, which JSON reads as a float."""
    return type(value) in (int, float) and 0 <= value <= _MAX_NUMBER and value == int(value)


def _check_owned(shown: str, value: Any, expected: Any, field: str) -> None:
    """Raise ValueError if the value of an option differs from that of a field."""
    accepted = expected if isinstance(expected, tuple) else (expected,)
    if any(value == each and (type(value) is bool) == (type(each) is bool) for each in accepted):
        return
    raise ValueError(
        f"deepspeed_config: {shown} is {quoted(value)}, but the run has {quoted(accepted[0])}: set {field}, or remove it"
    )


def check_accumulation(spec: RunSpec, count: int, world: int) -> None:
    """Check the micro-batches of one rank in `deepspeed_config` against those of a run with `world` ranks, `count`.

    Raises UserError: they differ.
    """
    given = spec.deepspeed_config.get(_ACCUMULATION, AUTO)
    if given not in (AUTO, count):
        raise UserError(
            f"deepspeed_config: {_ACCUMULATION} is {quoted(given)}, but {spec.rows_per_step} rows of a step on {world} "
            f"processes with batch_size {spec.batch_size} make {count}: set total_batch_size, or remove it"
        )


def free_options(spec: RunSpec) -> dict[str, Any]:
    """Return the options of `deepspeed_config` that no field of the spec has, by dotted name."""
    found = [(name, value) for name, value in leaves(spec.deepspeed_config) if name in FREE and value != AUTO]
    return {name: FREE[name](value) for name, value in found}


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
