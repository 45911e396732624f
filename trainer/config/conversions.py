"""Names of other tools whose values differ from those of the run spec's fields, and their conversion."""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import PurePath
from typing import Any

from trainer.config.fields import MAX_COUNT, NO_WORDS, word_for

Converter = Callable[[Any], "Setting"]


@dataclass(frozen=True)
class Setting:
    """The meaning of a value of another tool's name.

    Attributes:
        values: values by field of the run spec; empty if the value is what a run does anyway.
        weak: other names that set the same field take precedence (``bf16: false`` beside ``fp16: true``).
    """

    values: Mapping[str, Any] = field(default_factory=dict)
    weak: bool = False


@dataclass(frozen=True)
class Conversion:
    """The conversion of a value of another tool's name to values of fields.

    Attributes:
        field: the field that the name sets.
        convert: returns the setting of a value; raises ValueError with the values that it accepts.
        meaning: the conversion in a few words, for the documentation.
        difference: what the field does differently; empty if nothing.
        switch: whether a flag of this name needs no value.
        is_text: whether the value may be any text.
    """

    field: str
    convert: Converter
    meaning: str
    difference: str = ""
    switch: bool = False
    is_text: bool = False


def as_text(value: Any) -> str:
    """Return a value of YAML, a flag or ``-e`` as a word in lower case: ``true`` for True, ``none`` for None."""
    try:
        return str(value).strip().lower()
    except (ValueError, RecursionError):  # Python refuses to print an integer of more than 4300 digits
        return ""


def is_off(value: Any) -> bool:
    """Return whether a value of an option that has no words of its own disables it."""
    return as_text(value) in (*NO_WORDS, "0", "", "{}")


_WORDS = {"yes": "true", "on": "true", "1": "true", "no": "false", "off": "false", "0": "false"}


def _switch(
    name: str, true: Mapping[str, Any] | None, false: Mapping[str, Any] | None, difference: str = "", weak: bool = True
) -> Conversion:
    """Return the conversion of true and false. `false` is a weak setting if `weak`; None: the value has no effect."""

    def convert(value: Any) -> Setting:
        word = _WORDS.get(as_text(value), as_text(value))
        if word not in ("true", "false"):
            raise ValueError("true or false")
        return Setting(true or {}) if word == "true" else Setting(false or {}, weak=weak)

    shown = [
        f"{word}: {_assignments(values)}" for word, values in (("true", true), ("false", false)) if values is not None
    ]
    return Conversion(name, convert, "; ".join(shown), difference, switch=True)


def _choice(name: str, choices: Mapping[str, Mapping[str, Any]], difference: str = "", weak: str = "") -> Conversion:
    """Return the conversion of one of `choices`; the value `weak` is a weak setting. Other values are invalid."""

    def convert(value: Any) -> Setting:
        word = as_text(word_for(value, tuple(choices)))
        if word not in choices:
            raise ValueError("one of " + ", ".join(choices))
        return Setting(choices[word], weak=word == weak)

    words: dict[str, list[str]] = {}
    for word, values in choices.items():
        words.setdefault(_assignments(values), []).append(word)
    shown = "; ".join(f"{' or '.join(group)}: {meaning}" for meaning, group in words.items())
    return Conversion(name, convert, shown, difference)


def _assignments(values: Mapping[str, Any]) -> str:
    return " ".join(f"{name}={_shown(value)}" for name, value in values.items()) or "the default"


def _shown(value: Any) -> str:
    words = ",".join(value) if isinstance(value, tuple) else str(value)
    return words.lower() if isinstance(value, bool) else words


# Conversions of numbers and texts ----------------------------------------------------------------------------------------


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError
    number = float(value)
    if not math.isfinite(number):
        raise ValueError
    return number


def _in_range(name: str, expected: str, accepts: Callable[[float], bool], whole: bool = False) -> Converter:
    """Return the conversion of a number that `accepts`; 0 is a weak setting."""

    def convert(value: Any) -> Setting:
        try:
            number = _number(value)
        except (ValueError, OverflowError):
            raise ValueError(expected) from None
        if not accepts(number) or (whole and number != int(number)):
            raise ValueError(expected)
        return Setting({name: int(number) if whole else number}, weak=not number)

    return convert


def _run_name(value: Any) -> Setting:
    """Return the last part of a path, which names the run."""
    name = PurePath(value).name if isinstance(value, str) else ""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", name):
        raise ValueError("a path whose last part consists of letters, digits, '.', '_' and '-'")
    return Setting({"run": name})


def _kept(value: Any) -> Setting:
    """Convert a number of checkpoints; 0 and -1 keep all, as in transformers and torchtitan."""
    setting = _in_range("checkpoint_keep", "a number of checkpoints; 0 or -1: all", lambda n: n >= -1, whole=True)(
        value
    )
    return Setting({"checkpoint_keep": max(setting.values["checkpoint_keep"], 0) or MAX_COUNT})


_LOGGERS = {"tensorboard": "tensorboard", "wandb": "wandb"}
_FILE_LOGGERS = (*NO_WORDS, "dummy", "disk", "stdout")


def _loggers(value: Any) -> Setting:
    words = value if isinstance(value, list | tuple) else as_text(value).split(",")
    names = [as_text(word) for word in words]
    if len(names) == 1 and names[0] in _FILE_LOGGERS:
        return Setting({"loggers": ("none",)})
    if not names or not set(names) <= set(_LOGGERS):
        raise ValueError("one of none, tensorboard, wandb, or tensorboard,wandb")
    return Setting({"loggers": tuple(_LOGGERS[name] for name in names)})


def _targets(value: Any) -> Setting:
    if as_text(value) in ("all", "all-linear"):
        return Setting({"lora_targets": ("all-linear",)})
    return Setting({"lora_targets": value})


def _text_column(value: Any) -> Setting:
    """Convert the name of the column with the text."""
    if not isinstance(value, str) or not value:
        raise ValueError("the name of a column")
    return Setting({"columns": {"text": value}} if value != "text" else {})


def _deepspeed(value: Any) -> Setting:
    """Convert the options of a file of DeepSpeed, which `trainer.config.tool_files` reads."""
    if is_off(value):
        return Setting()
    if not isinstance(value, Mapping) and not as_text(value).startswith("{"):
        raise ValueError("options of DeepSpeed")
    return Setting({"deepspeed_config": value})


def _resume(value: Any) -> Setting:
    word = _WORDS.get(as_text(value), as_text(value))
    if word in ("true", "auto", "latest", "last"):
        return Setting({"resume": "auto"})
    if word in ("false", "never"):
        return Setting({"resume": "never"}, weak=True)
    raise ValueError(
        "true or false: a run resumes from its own newest checkpoint, so set run= to the name of that run instead of a path"
    )


def _fsdp(value: Any) -> Setting:
    """Convert the options of transformers' ``fsdp``, such as ``full_shard auto_wrap``."""
    texts = as_text(value if not isinstance(value, list | tuple) else " ".join(map(str, value))).split()
    words = {_WORDS.get(word, word) for word in texts}
    unknown = words - {*_SHARDING, "auto_wrap", "true", "false", "none"}
    chosen = [_SHARDING[word] for word in sorted(words & set(_SHARDING))]
    if unknown or len(chosen) > 1:
        raise ValueError("full_shard, shard_grad_op, hybrid_shard or no_shard, with or without auto_wrap")
    if not chosen and words & {"true", "auto_wrap"}:
        chosen = [_SHARDING["full_shard"]]
    return Setting(chosen[0] if chosen else {})


_WHOLE = {"strategy": "fsdp", "fsdp_shard": "all"}
_GRADIENTS = {"strategy": "fsdp", "fsdp_shard": "gradients"}
_HOST = {"strategy": "fsdp", "fsdp_shard": "host"}
_SHARDING = {
    "no_shard": {"strategy": "ddp"},
    "full_shard": _WHOLE,
    "shard_grad_op": _GRADIENTS,
    "hybrid_shard": _HOST,
    "_hybrid_shard_zero2": _HOST,
}
_PRECISION: dict[str, Mapping[str, Any]] = {
    word: {"precision": value}
    for value, words in {
        "32-true": ("no", "fp32", "float32", "32", "32-true"),
        "bf16-mixed": ("bf16", "bfloat16", "bf16-mixed"),
        "fp16-mixed": ("fp16", "float16", "fp16-mixed"),
    }.items()
    for word in words
}
_OPTIMIZER: dict[str, Mapping[str, Any]] = {
    word: {"optimizer": value}
    for value, words in {
        "adamw": ("adamw", "adamw_torch", "adamw_torch_fused", "adamw_hf"),
        "adamw8bit": ("adamw8bit", "adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit"),
    }.items()
    for word in words
}
_FP32 = "trained weights stay in float32"
_EVALUATED = "evaluation runs every eval_interval steps and at the end"
_SAVED = "checkpoints are written every checkpoint_interval steps and at the end"

# Conversions by name -----------------------------------------------------------------------------------------------------

_FRACTION = Conversion(
    "eval_split",
    _in_range("eval_split", "a fraction of the samples below 1, such as 0.05", lambda number: 0 <= number < 1),
    "a fraction of the samples; a number of samples is refused",
)
_EPOCHS = Conversion(
    "epochs",
    _in_range("epochs", "an integer; for a part of an epoch, set max_steps", lambda number: number >= 1, whole=True),
    "a whole number, such as 3.0",
)
_EVAL_STEPS = Conversion(
    "eval_interval",
    _in_range("eval_interval", "a number of steps; a fraction is not supported", lambda n: n >= 0, whole=True),
    "a number of steps; a fraction is refused",
)
_SAVE_STEPS = Conversion(
    "checkpoint_interval",
    _in_range("checkpoint_interval", "a number of steps; a fraction is not supported", lambda n: n >= 0, whole=True),
    "a number of steps; a fraction is refused",
)
_WARMUP_STEPS = Conversion(
    "warmup", _in_range("warmup", "a number of steps", lambda n: n >= 0), "a number of steps, or a fraction below 1"
)
_DTYPE = _choice("precision", _PRECISION, _FP32)
_FOUR_BIT = _switch("quantize", {"quantize": "nf4"}, {"quantize": "none"}, weak=False)
# False is TRL's default, and leaves it to the dataset: all of a chat, but the completion of a pair alone.
_ASSISTANT = replace(
    _switch("train_on", {"train_on": "answer"}, {}),
    meaning="true: train_on=answer; false: no effect beside train_on or completion_only_loss, refused without them",
)
_LIGER = _switch(
    "kernels", {"kernels": "auto"}, {"kernels": "torch"}, "kernels=auto also uses FlashAttention if installed"
)
_TIMEOUT = Conversion(
    "collective_timeout",
    _in_range("collective_timeout", "a number of seconds above 0", lambda n: n > 0),
    "a number of seconds",
    "the run fails when it expires",
)
_LOGGER = Conversion(
    "loggers", _loggers, "dummy, disk, stdout: none", "the run folder has metrics.jsonl and logs with any logger"
)
_OFFLOAD = _switch("deepspeed_offload", {"deepspeed_offload": "optimizer"}, {"deepspeed_offload": "none"})
_KEEP = Conversion("checkpoint_keep", _kept, "0 or -1: all checkpoints")
_ALL_LINEAR = Conversion("lora_targets", _targets, "all: all-linear")
_RESUME = Conversion("resume", _resume, "true: auto, false: never", "never refuses to start a run that has checkpoints")
_SCHEDULE: dict[str, Mapping[str, Any]] = {
    "cosine": {"schedule": "cosine"},
    "linear": {"schedule": "linear"},
    "constant": {"schedule": "constant"},
    "constant_with_warmup": {"schedule": "constant"},
}
_SCHEDULER = _choice("schedule", _SCHEDULE, "warmup applies to every schedule; set warmup=0 for none")

_EVAL_STRATEGY = _choice("eval_interval", {"no": {"eval_split": 0}, "steps": {}, "epoch": {}}, _EVALUATED)
_LORA = _switch("lora_r", {}, {"lora_r": 0}, weak=False)

CONVERSIONS: dict[str, Conversion] = {
    "output_dir": Conversion(
        "run", _run_name, "the last part of the path", "the files are in runs/RUN of every host", is_text=True
    ),
    "num_epochs": _EPOCHS,
    "num_train_epochs": _EPOCHS,
    "max_epochs": _EPOCHS,
    "dataset_text_field": Conversion(
        "columns", _text_column, "the column of the text: columns={text: NAME}", is_text=True
    ),
    "total_steps": Conversion(
        "max_steps",
        _in_range("max_steps", "a number of steps", lambda n: n >= -1, whole=True),
        "a number of steps",
        "the schedule ends with the last step",
    ),
    "train_on_inputs": _switch("train_on", {"train_on": "all"}, {"train_on": "answer"}, weak=False),
    "completion_only_loss": _switch("train_on", {"train_on": "answer"}, {"train_on": "all"}, weak=False),
    "assistant_only_loss": _ASSISTANT,
    "lr_scheduler": _SCHEDULER,
    "lr_scheduler_type": _SCHEDULER,
    "scheduler": _SCHEDULER,
    "warmup_steps": _WARMUP_STEPS,
    "num_warmup_steps": _WARMUP_STEPS,
    "lr_warmup_steps": _WARMUP_STEPS,
    "warmup_ratio": Conversion(
        "warmup",
        _in_range("warmup", "a fraction of all steps below 1, such as 0.03", lambda n: 0 <= n < 1),
        "a fraction of all steps below 1",
    ),
    "bf16": _switch("precision", {"precision": "bf16-mixed"}, {"precision": "32-true"}, _FP32),
    "fp16": _switch("precision", {"precision": "fp16-mixed"}, {"precision": "32-true"}, _FP32),
    "mixed_precision": _DTYPE,
    "dtype": _DTYPE,
    "torch_dtype": _DTYPE,
    "load_in_4bit": _FOUR_BIT,
    "use_4bit": _FOUR_BIT,
    "quantization": _choice(
        "quantize", {"nf4": {"quantize": "nf4"}, "4bit": {"quantize": "nf4"}, "none": {"quantize": "none"}}
    ),
    "bnb_4bit_quant_type": _choice("quantize", {"nf4": {}}),
    "adapter": _choice("lora_r", {"lora": {}, "qlora": {"quantize": "nf4"}, "none": {"lora_r": 0}}),
    "finetuning_type": _choice("lora_r", {"lora": {}, "full": {"lora_r": 0}}),
    "use_peft": _LORA,
    "use_lora": _LORA,
    "target_modules": _ALL_LINEAR,
    "lora_target": _ALL_LINEAR,
    "lora_target_modules": _ALL_LINEAR,
    "lora_target_linear": _switch("lora_targets", {"lora_targets": ("all-linear",)}, {}),
    "optim": _choice("optimizer", _OPTIMIZER),
    "use_liger": _LIGER,
    "use_liger_kernel": _LIGER,
    "flash_attention": _switch("kernels", {"kernels": "auto"}, {"kernels": "torch"}),
    "attn_implementation": _choice(
        "kernels",
        {"flash_attention_2": {"kernels": "auto"}, "sdpa": {"kernels": "torch"}},
        "kernels=torch uses sdpa without Liger kernels; auto uses FlashAttention on CUDA if it is installed",
        weak="sdpa",
    ),
    "use_gradient_checkpointing": _choice(
        "gradient_checkpointing",
        {word: {"gradient_checkpointing": word != "false"} for word in ("true", "false", "unsloth")},
    ),
    "deepspeed": Conversion("deepspeed_config", _deepspeed, "the path of a file, with strategy=deepspeed"),
    "sharding_strategy": _choice("strategy", _SHARDING),
    "fsdp": Conversion(
        "strategy",
        _fsdp,
        "full_shard: strategy=fsdp, shard_grad_op: fsdp_shard=gradients, hybrid_shard: fsdp_shard=host, no_shard: strategy=ddp",
    ),
    "offload": _OFFLOAD,
    "cpu_offload": _OFFLOAD,
    "offload_optimizer": _OFFLOAD,
    "offload_optimizer_device": _choice(
        "deepspeed_offload", {"cpu": {"deepspeed_offload": "optimizer"}, "none": {"deepspeed_offload": "none"}}
    ),
    "hivemind_compression": _choice(
        "diloco_comm_dtype",
        {"none": {"diloco_comm_dtype": "32"}}
        | {
            word: {"diloco_comm_dtype": "bf16"}
            for word in ("fp16", "scaled-fp16", "uniform8bit", "quantile8bit", "blockwise8bit")
        },
        "pseudo-gradients travel in bfloat16",
    ),
    "fault_tolerance": _switch(
        "diloco_membership", {"diloco_membership": "torchft"}, {"diloco_membership": "fixed"}, weak=False
    ),
    "ddp_comm_hook": _choice(
        "gradient_comm_dtype",
        {"no": {"gradient_comm_dtype": "32"}, "bf16": {"gradient_comm_dtype": "bf16"}},
    ),
    "eval_steps": _EVAL_STEPS,
    "val_check_interval": _EVAL_STEPS,
    "save_steps": _SAVE_STEPS,
    "save_interval": _SAVE_STEPS,
    "ckpt.interval": _SAVE_STEPS,
    "eval_strategy": _EVAL_STRATEGY,
    "evaluation_strategy": _EVAL_STRATEGY,
    "save_strategy": _choice(
        "checkpoint_interval", {"no": {"checkpoint_interval": 0}, "steps": {}, "epoch": {}}, _SAVED, weak="no"
    ),
    "save_total_limit": _KEEP,
    "keep_latest_k": _KEEP,
    "val_set_size": _FRACTION,
    "val_size": _FRACTION,
    "validation_split": _FRACTION,
    "resume_from_checkpoint": _RESUME,
    "resume_from_previous_checkpoint": _RESUME,
    "ckpt.resume": _RESUME,
    "report_to": _LOGGER,
    "logger": _LOGGER,
    "log_with": _LOGGER,
    "metric_logger_type": _LOGGER,
    "ddp_timeout": _TIMEOUT,
    "hv.averaging_timeout": _TIMEOUT,
    "hv.timeout_waiting_for_peers": _TIMEOUT,
    "hv.fail_rank_drop": _switch("diloco_membership", {"diloco_membership": "fixed"}, {}),
    "hv.all_reduce_strategy": _choice("diloco_membership", {"wait_for_all": {"diloco_membership": "fixed"}}),
}
CONVERSIONS["fsdp_sharding_strategy"] = CONVERSIONS["sharding_strategy"]
CONVERSIONS["hv.hivemind_compression"] = CONVERSIONS["hivemind_compression"]
