"""The names of Hugging Face (transformers, TRL, peft, accelerate) and of OpenDiLoCo for fields of the run spec, in one table."""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from trainer.common.formats import printable
from trainer.config.fields import LOGGERS, MAX_COUNT, NO_WORDS, word_for

Fields = Mapping[str, Any]  # values by field


@dataclass(frozen=True)
class Alias:
    """Another name of a field.

    Attributes:
        field: the field that the name sets.
        words: what each value of the name sets, if these are not values of the field.
        convert: returns what a value sets; raises ValueError with the values that it accepts. Neither this nor `words`:
            the values are those of the field.
        weak: values that another name of the same field overrides, as in ``bf16: false`` beside ``fp16: true``.
        note: what the field does differently; empty if nothing.
    """

    field: str
    words: Mapping[str, Fields] | None = None
    convert: Callable[[Any], Fields] | None = None
    weak: tuple[str, ...] = ()
    note: str = ""

    @property
    def is_switch(self) -> bool:
        """Whether a flag of this name needs no value."""
        return self.words is not None and set(self.words) == {"true", "false"}

    def fields(self, value: Any) -> Fields:
        """Return the values of fields that a value of this name sets. Raises ValueError with the values that it accepts."""
        if self.words is None:
            return self.convert(value) if self.convert else {self.field: value}
        word = self.word(value)
        if word not in self.words:
            raise ValueError("true or false" if self.is_switch else "one of " + ", ".join(self.words))
        return self.words[word]

    def word(self, value: Any) -> str:
        """Return the one of `words` that a value of YAML, a flag or ``-e`` means, or its text."""
        words = tuple(self.words or ())
        word = as_text(word_for(value, words))
        return {"1": "true", "0": "false"}.get(word, word) if "true" in words else word


def as_text(value: Any) -> str:
    """Return a value of YAML, a flag or ``-e`` as a word in lower case: ``true`` for True, ``none`` for None."""
    try:
        return str(value).strip().lower()
    except (ValueError, RecursionError):  # Python refuses to print an integer of more than 4300 digits
        return ""


def is_off(value: Any) -> bool:
    """Return whether a value of an option that has no words of its own disables it."""
    return as_text(value) in (*NO_WORDS, "0", "", "{}")


def _run_name(value: Any) -> Fields:
    """Return the last part of a path, which names the run."""
    name = PurePath(value).name if isinstance(value, str) else ""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", name):
        raise ValueError("a path whose last part consists of letters, digits, '.', '_' and '-'")
    return {"run": name}


def _text_column(value: Any) -> Fields:
    if not isinstance(value, str) or not value:
        raise ValueError("the name of a column")
    return {"columns": {"text": value}} if value != "text" else {}


def _loggers(value: Any) -> Fields:
    words = value if isinstance(value, list | tuple) else as_text(value).split(",")
    names = tuple(as_text(word) for word in words)
    if len(names) == 1 and names[0] in NO_WORDS:
        return {"loggers": ("none",)}
    if not names or not set(names) <= set(LOGGERS):
        raise ValueError(f"none, or some of {', '.join(LOGGERS)}")
    return {"loggers": names}


def _resume(value: Any) -> Fields:
    word = as_text(word_for(value, ("true", "false")))
    if word not in ("true", "false", "1", "0"):
        raise ValueError(
            "true or false: a run resumes from its own newest checkpoint, so set run= to the name of that run instead of a path"
        )
    return {"resume": "auto" if word in ("true", "1") else "never"}


def _fsdp(value: Any) -> Fields:
    """Convert the options of transformers' ``fsdp``, such as ``full_shard auto_wrap``."""
    words = set(as_text(value if not isinstance(value, list | tuple) else " ".join(map(str, value))).split())
    chosen = [_SHARDING[word] for word in sorted(words & set(_SHARDING))]
    if words - {*_SHARDING, "auto_wrap", "true", "1", "0", "yes", "on", *NO_WORDS} or len(chosen) > 1:
        raise ValueError("full_shard, shard_grad_op, hybrid_shard or no_shard, with or without auto_wrap")
    if not chosen and words & {"true", "1", "yes", "on", "auto_wrap"}:
        return _SHARDING["full_shard"]
    return chosen[0] if chosen else {}


def _deepspeed(value: Any) -> Fields:
    """Convert the options of a file of DeepSpeed, which `trainer.config.tool_files` reads."""
    if is_off(value):
        return {}
    if not isinstance(value, Mapping) and not as_text(value).startswith("{"):
        raise ValueError("options of DeepSpeed")
    return {"deepspeed_config": value}


def _fsdp_config(value: Any) -> Fields:
    """Convert the options of FSDP of transformers, accelerate or torch, with or without the prefix ``fsdp_``."""
    if is_off(value):
        return {}
    if not isinstance(value, Mapping):
        raise ValueError("options of FSDP, or the path of a JSON file with them")
    found: dict[str, Any] = {}
    for name, option in value.items():
        word = str(name).lower().removeprefix("fsdp_")
        if word in _FSDP_OPTIONS:
            fields = _FSDP_OPTIONS[word].fields(_only_value(option))
        elif word in _FSDP_IMPLIED or is_off(option):
            fields = {}
        else:
            raise ValueError(f"options of FSDP without {printable(name, 40)}, which FSDP2 does not have")
        for field, each in fields.items():
            if found.setdefault(field, each) != each:
                raise ValueError(f"options of FSDP with one value of {field}")
    # transformers writes options that ask for nothing where it does not shard.
    asked = found or any(not is_off(option) for option in value.values())
    return {"strategy": "fsdp"} | found if asked else {}


def _only_value(option: Any) -> Any:
    """Return the value of a mapping whose values are equal, as ``{param_dtype: torch.bfloat16, reduce_dtype: torch.bfloat16}``."""
    parts = list(option.values()) if isinstance(option, Mapping) else [option]
    values = [part.removeprefix("torch.") if isinstance(part, str) else part for part in parts]
    return values[0] if values and all(value == values[0] for value in values) else option


def _words(field: str, values: Mapping[Any, Iterable[str]]) -> dict[str, Fields]:
    """Return {word: {field: value}} for {value: words}."""
    return {word: {field: value} for value, words in values.items() for word in words}


def _switch(field: str, true: Any, false: Any) -> dict[str, Fields]:
    return {"true": {field: true}, "false": {field: false}}


HOST_NAMES = [
    "backend",
    "world_size",
    "num_nodes",
    "nnodes",
    "num_gpus_per_node",
    "gpus_per_node",
    "nproc_per_node",
    "num_processes",
    "master_addr",
    "master_port",
    "node_rank",
    "rank",
    "local_rank",
    "init_method",
    "rdzv_backend",
    "rdzv_endpoint",
    "rdzv_id",
]
"""Names that say which hosts take part, and how ranks find each other."""
_SHARDING: dict[str, Fields] = {
    "no_shard": {"strategy": "ddp"},
    "full_shard": {"strategy": "fsdp", "fsdp_shard": "all"},
    "shard_grad_op": {"strategy": "fsdp", "fsdp_shard": "gradients"},
    "hybrid_shard": {"strategy": "fsdp", "fsdp_shard": "host"},
    "_hybrid_shard_zero2": {"strategy": "fsdp", "fsdp_shard": "host"},
}
_SHARDS = Alias("strategy", _SHARDING)
_FP32 = "trained weights stay in float32"
_DTYPE = Alias(
    "precision",
    _words(
        "precision",
        {
            "32-true": ("no", "fp32", "float32"),
            "bf16-mixed": ("bf16", "bfloat16"),
            "fp16-mixed": ("fp16", "float16"),
        },
    ),
    note=_FP32,
)
_OFFLOAD = Alias("fsdp_offload", _switch("fsdp_offload", True, False))
_FSDP_OPTIONS = {
    "fsdp": Alias("strategy", convert=_fsdp),
    "config": Alias("strategy", convert=_fsdp_config),
    "sharding_strategy": _SHARDS,
    "reshard_after_forward": Alias(
        "fsdp_shard", {"true": _SHARDING["full_shard"], "false": _SHARDING["shard_grad_op"], **_SHARDING}
    ),
    **dict.fromkeys(("offload_params", "cpu_offload", "cpu_offload_params"), _OFFLOAD),
    "activation_checkpointing": Alias("gradient_checkpointing", _switch("gradient_checkpointing", True, False)),
    **dict.fromkeys(("mixed_precision", "mixed_precision_policy"), _DTYPE),
}
_FSDP_IMPLIED = [
    "version",
    "auto_wrap_policy",
    "transformer_layer_cls_to_wrap",
    "transformer_cls_names_to_wrap",
    "min_num_params",
    "state_dict_type",
    "final_state_dict_type",
    "cpu_ram_efficient_loading",
    "sync_module_states",
    "use_orig_params",
    "limit_all_gathers",
    "backward_prefetch",
    "backward_prefetch_policy",
    "forward_prefetch",
]
_ON_HOSTS = Alias(
    "strategy",
    convert=lambda value: {},
    note="the inventory and the launch options say which hosts and ports take part",
)
_EVAL_STRATEGY = Alias(
    "eval_interval",
    {"no": {"eval_split": 0}, "steps": {}, "epoch": {"eval_interval": "epoch"}},
    note="evaluation also runs at the end",
)
_COMPRESSION = Alias(
    "diloco_comm_dtype",
    _words(
        "diloco_comm_dtype",
        {"32": ("none",), "bf16": ("fp16", "scaled-fp16", "uniform8bit", "quantile8bit", "blockwise8bit")},
    ),
    note="pseudo-gradients travel in bfloat16",
)
_LOGGERS = Alias("loggers", convert=_loggers, note="the run folder has metrics.jsonl and logs with any logger")
_RESUME = Alias("resume", convert=_resume, weak=("false",), note="never refuses to start a run that has checkpoints")

# Names with values of their own.
_CONVERTED: dict[str, Alias] = {
    "output_dir": Alias("run", convert=_run_name, note="the files are in runs/RUN of every host"),
    "dataset_text_field": Alias("columns", convert=_text_column, note="the column of the text"),
    "completion_only_loss": Alias("train_on", _switch("train_on", "answer", "all")),
    # False is TRL's default, and leaves it to the dataset: all of a chat, but the completion of a pair alone.
    "assistant_only_loss": Alias("train_on", {"true": {"train_on": "answer"}, "false": {}}),
    "lr_scheduler_type": Alias(
        "schedule",
        _words(
            "schedule",
            {"cosine": ["cosine"], "linear": ["linear"], "constant": ["constant", "constant_with_warmup"]},
        ),
        note="warmup applies to every schedule; set warmup=0 for none",
    ),
    "bf16": Alias("precision", _switch("precision", "bf16-mixed", "32-true"), weak=("false",), note=_FP32),
    "fp16": Alias("precision", _switch("precision", "fp16-mixed", "32-true"), weak=("false",), note=_FP32),
    "mixed_precision": _DTYPE,
    "dtype": _DTYPE,
    "torch_dtype": _DTYPE,
    "load_in_4bit": Alias("quantize", _switch("quantize", "nf4", "none")),
    "bnb_4bit_quant_type": Alias("quantize", {"nf4": {}}),
    "use_peft": Alias("lora_r", {"true": {}, "false": {"lora_r": 0}}),
    "optim": Alias(
        "optimizer",
        _words(
            "optimizer",
            {
                "adamw": ("adamw", "adamw_torch", "adamw_torch_fused"),
                "adamw8bit": ("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit"),
            },
        ),
    ),
    "use_liger_kernel": Alias(
        "kernels",
        _switch("kernels", "auto", "torch"),
        weak=("false",),
        note="kernels=auto also uses FlashAttention if installed",
    ),
    "attn_implementation": Alias(
        "kernels",
        _words("kernels", {"auto": ["flash_attention_2"], "torch": ["sdpa"]}),
        weak=("sdpa",),
        note="kernels=torch uses sdpa without Liger kernels; auto uses FlashAttention on CUDA if it is installed",
    ),
    "deepspeed": Alias("deepspeed_config", convert=_deepspeed, note="the path of a file, with strategy=deepspeed"),
    "sharding_strategy": _SHARDS,
    "fsdp_sharding_strategy": _SHARDS,
    "fsdp": Alias("strategy", convert=_fsdp),
    "fsdp_config": Alias(
        "strategy",
        convert=_fsdp_config,
        note="FSDP2 implies the other options: every decoder layer is a unit, and weights are loaded and saved in shards",
    ),
    "offload_optimizer_device": Alias(
        "deepspeed_offload", _words("deepspeed_offload", {"optimizer": ["cpu"], "none": ["none"]})
    ),
    "ddp_comm_hook": Alias("gradient_comm_dtype", _words("gradient_comm_dtype", {"32": ["no"], "bf16": ["bf16"]})),
    # Names of the section `distributed` of a YAML file, see trainer.config.tool_files.
    **{f"distributed.{name}": _ON_HOSTS for name in HOST_NAMES},
    "eval_strategy": _EVAL_STRATEGY,
    "evaluation_strategy": _EVAL_STRATEGY,
    "save_strategy": Alias(
        "checkpoint_interval",
        {"no": {"checkpoint_interval": 0}, "steps": {}, "epoch": {"checkpoint_interval": "epoch"}},
        weak=("no",),
        note="a checkpoint is also written at the end",
    ),
    "save_total_limit": Alias(
        "checkpoint_keep",
        convert=lambda value: {"checkpoint_keep": MAX_COUNT if as_text(value) == "0" else value},
        note="0: all checkpoints",
    ),
    "resume_from_checkpoint": _RESUME,
    "ckpt.resume": _RESUME,
    "report_to": _LOGGERS,
    "log_with": _LOGGERS,
    "metric_logger_type": Alias("loggers", _words("loggers", {("wandb",): ["wandb"], ("none",): ["dummy"]})),
    "hivemind_compression": _COMPRESSION,
    "hv.hivemind_compression": _COMPRESSION,
    "hv.fail_rank_drop": Alias("diloco_membership", {"true": {"diloco_membership": "fixed"}, "false": {}}),
    "hv.all_reduce_strategy": Alias("diloco_membership", {"wait_for_all": {"diloco_membership": "fixed"}}),
}
# Field -> names with the same values.
_SAME = {
    "run": "run_name run_id",
    "model": "model_name model_name_or_path path_model pretrained_model_name_or_path",
    "dataset": "dataset_name dataset_name_or_path train_file",
    "dataset_split": "dataset_train_split",
    "dataset_config": "dataset_config_name",
    "seq_length": "max_seq_length max_length block_size",
    "epochs": "num_train_epochs",
    "max_steps": "total_steps max_train_steps",
    "batch_size": "per_device_train_batch_size",
    "gradient_accumulation": "gradient_accumulation_steps",
    "lr": "learning_rate",
    "warmup": "warmup_steps warmup_ratio num_warmup_steps",
    "max_grad_norm": "gradient_clipping",
    "teacher": "teacher_model_name_or_path",
    "grpo_group_size": "num_generations",
    "grpo_max_tokens": "max_completion_length",
    "grpo_iterations": "num_iterations",
    "preference_label_smoothing": "label_smoothing",
    "preference_precompute": "precompute_ref_log_probs",
    "kto_desirable_weight": "desirable_weight",
    "kto_undesirable_weight": "undesirable_weight",
    "lora_r": "peft_lora_r",
    "lora_alpha": "peft_lora_alpha",
    "lora_targets": "target_modules lora_target_modules",
    "gradient_checkpointing": "activation_checkpointing",
    "fsdp_offload": "fsdp_cpu_offload fsdp_offload_params",
    "deepspeed_stage": "zero_stage",
    "local_steps": "hv.local_steps",
    "outer_lr": "hv.outer_lr",
    "eval_interval": "eval_steps",
    "checkpoint_interval": "save_steps ckpt.interval",
    "checkpoint_keep": "ckpt.topk",
    "collective_timeout": "ddp_timeout hv.averaging_timeout hv.timeout_waiting_for_peers",
}
ALIASES: dict[str, Alias] = {
    name: Alias(field) for field, names in _SAME.items() for name in names.split()
} | _CONVERTED
# Micro-batches of one rank. The field gradient_accumulation counts those of all ranks.
ACCUMULATION = "gradient_accumulation_steps"
_OPTIMIZER = "the optimizer is AdamW with torch's defaults: omit it"
REFUSED: dict[str, str] = {
    "beta": "several methods have one: set preference_beta for dpo, orpo and kto, grpo_beta, or gkd_beta for a teacher",
    "load_in_8bit": "weights in 8 bits are not supported: set quantize=nf4",
    "trust_remote_code": "code from a model's files does not run: use a model that transformers supports",
    "push_to_hub": "a run does not upload: collect the result with -e collect_to=FOLDER",
    "use_dora": "DoRA is not supported: omit it",
    "use_rslora": "rsLoRA is not supported: multiply lora_alpha by the square root of lora_r",
    "adam_beta1": _OPTIMIZER,
    "adam_beta2": _OPTIMIZER,
    "adam_epsilon": _OPTIMIZER,
    "group_by_length": "the seed defines the order of samples: set packing=auto, which needs no padding",
}
"""Names that a run cannot honour, with the reason and the remedy. The value false is accepted."""
