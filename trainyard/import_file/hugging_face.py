"""The names of transformers, TRL and peft: those that a run spec accepts itself, and the others."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from trainer.config.alias_table import ALIASES, REFUSED, Alias, as_text, is_off
from trainyard.import_file.parallelism import FSDP_NAMES, HOSTS
from trainyard.import_file.record_shapes import entries
from trainyard.import_file.translation import (
    Impossible,
    Missing,
    Row,
    Rows,
    Tool,
    Translation,
    Unused,
    accumulation,
    rows_of,
    whole_number,
)

LOGS = Unused("metrics.jsonl has every step, and the run folder the logs")
KERNELS = Unused("kernels=auto takes the fastest kernels that are installed")
LOADER = Unused("the trainer tokenizes, packs and shuffles by itself")
MODEL_LOADER = Unused("the folder of the model says how it is loaded")
WANDB = Impossible("wandb reads its own variables, such as WANDB_PROJECT: set them with run_env", ("false",))
INIT = Impossible("adapters are plain LoRA on the layers in lora_targets")
TEMPLATE = Impossible("the chat template of the model is used: change it in the folder of the model")
TOKENS = Impossible("the tokenizer of the model is used as it is: change it in the folder of the model")
CHECKPOINTS = Unused("checkpoints hold all that a run resumes from")
OPTIMIZER = Impossible(REFUSED["adam_beta1"])
NO_SCHEDULE = Impossible("the schedule is a warmup, then cosine, linear or constant")
LOSS = Impossible("the loss is the cross entropy of the tokens, each with the same weight")
# FSDP has a name of its own for it, beside which this one is false.
CHECKPOINTING = Alias(
    "gradient_checkpointing",
    {"true": {"gradient_checkpointing": True}, "false": {"gradient_checkpointing": False}},
    weak=("false",),
)
PREFERENCES = Missing("training on preferences or rewards")


def run_name(found: Translation, key: str, value: Any) -> None:
    """Name the run after the whole path of the output folder: its last part is often `out` or `sft`."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", str(value)).strip("-._")[-64:].lstrip("-._")
    if name:
        found.weak.append(("run", key, value, name))
    else:
        found.refuse(key, value, "expected a path of letters and digits")


def remote_code(found: Translation, key: str, value: Any) -> None:
    """Handle `trust_remote_code`: many files set it for models that transformers supports."""
    found.ignore(key, value, REFUSED["trust_remote_code"] if as_text(value) in ("true", "1") else "it asks for nothing")


def attention(found: Translation, key: str, value: Any) -> None:
    """Handle the name of an attention kernel."""
    word = {"fa2": "flash_attention_2"}.get(str(value), value)
    if word in ("flash_attention_2", "sdpa"):
        found.convert(ALIASES["attn_implementation"], key, value, converted=word)
    else:
        found.ignore(key, value, KERNELS.reason)


def timeout(found: Translation, key: str, value: Any) -> None:
    """Handle a timeout. What is longer than a run can wait means none."""
    limit = 30 * 24 * 3600
    try:
        found.set(
            "collective_timeout",
            min(float(value), limit),
            key,
            value,
            f"at most {limit} s" if float(value) > limit else "",
        )
    except (TypeError, ValueError, OverflowError):
        found.refuse(key, value, "expected a number of seconds")


def warmup(found: Translation, key: str, value: Any) -> None:
    """Handle a ratio and a number of steps, of which the number decides if it is not 0."""
    if as_text(value) in ("0", "0.0"):
        found.weak.append(("warmup", key, value, 0.0))
    elif key.endswith("ratio") and not is_empty_number(found.seen.get("warmup_steps")):
        found.ignore(key, value, "warmup_steps decides")
    else:
        found.set("warmup", value, key, value)


def is_empty_number(value: Any) -> bool:
    """Return whether a number is missing or 0."""
    return value is None or as_text(value) in ("0", "0.0", "")


def usual(value: float, row: Impossible = OPTIMIZER) -> Row:
    """Return the row of a number whose usual value is the one of a run."""
    return replace(row, harmless=(str(value), f"{value:g}"))


def loggers_of_project(found: Translation) -> None:
    """Log to wandb where a file names a project of it and no loggers."""
    if found.seen.get("wandb_project"):
        found.set_default("loggers", ["wandb"], "a file with wandb_project")


def every_epochs(field: str) -> Callable[[Translation, str, Any], None]:
    """Return the row of a number of times in an epoch, or of epochs: a run counts steps, or does it after each epoch."""

    def row(found: Translation, key: str, value: Any) -> None:
        if is_off(value):
            found.ignore(key, value, "it asks for nothing")
        elif whole_number(value) == 1:
            found.set(field, "epoch", key, value)
        else:
            found.refuse(key, value, f"{field} is a number of steps, or epoch: set it")

    return row


def _unless_each_epoch(strategy: str, name: str) -> Callable[[Translation, str, Any], None]:
    """Return the row of a number of steps, which transformers ignores where `strategy` says epoch."""

    def row(found: Translation, key: str, value: Any) -> None:
        if "epoch" in (
            as_text(found.seen.get(strategy)),
            as_text(found.seen.get(strategy.replace("eval", "evaluation"))),
        ):
            found.ignore(key, value, f"{strategy}: epoch")
        else:
            found.convert(ALIASES[name], key, value)

    return row


TRANSFORMERS_ROWS: Rows = {
    **rows_of(
        Unused("it has no effect on a run"),
        "do_train do_eval dataset_num_proc overwrite_output_dir ddp_find_unused_parameters",
    ),
    **{name: Impossible(reason) for name, reason in REFUSED.items()},
    **{name: alias for name, alias in ALIASES.items() if not name.startswith(("hv.", "ckpt."))},
    **{name: name for name in ("max_steps", "weight_decay", "max_grad_norm", "seed", "torch_compile")},
    **FSDP_NAMES,
    "gradient_checkpointing": CHECKPOINTING,
    "output_dir": run_name,
    "gradient_accumulation_steps": accumulation,
    "trust_remote_code": remote_code,
    "ddp_timeout": timeout,
    "warmup_ratio": warmup,
    "warmup_steps": warmup,
    "eval_on_start": "eval_start",
    "save_steps": _unless_each_epoch("save_strategy", "save_steps"),
    "eval_steps": _unless_each_epoch("eval_strategy", "eval_steps"),
    "attn_implementation": attention,
    "adam_beta1": usual(0.9),
    "adam_beta2": usual(0.999),
    "adam_epsilon": usual(1e-8),
    **rows_of(
        LOGS,
        """
        log_level log_level_replica log_on_each_node logging_nan_inf_filter disable_tqdm include_num_input_tokens_seen
        logging_dir logging_steps logging_strategy logging_first_step skip_memory_metrics plot_loss include_for_metrics
        """,
    ),
    **rows_of(
        HOSTS,
        """
        local_rank use_cpu no_cuda ddp_backend ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph
        accelerator_config
        """,
    ),
    **rows_of(
        LOADER,
        """
        dataloader_pin_memory dataloader_persistent_workers dataloader_prefetch_factor
        dataloader_multiprocessing_context dataloader_in_order dataloader_num_workers remove_unused_columns label_names
        length_column_name data_seed ignore_data_skip full_determinism
        """,
    ),
    **rows_of(
        KERNELS,
        """
        tf32 torch_empty_cache_steps use_cache liger_kernel_config gradient_checkpointing_kwargs
        activation_checkpointing_kwargs torch_compile_backend torch_compile_mode bf16_full_eval fp16_full_eval
        low_cpu_mem_usage save_safetensors debug
        """,
    ),
    **rows_of(
        Unused("every step counts the tokens of all ranks"),
        "average_tokens_across_devices split_batches dataloader_drop_last",
    ),
    **rows_of(
        CHECKPOINTS,
        "save_only_model save_on_each_node enable_jit_checkpoint restore_callback_states_from_checkpoint",
    ),
    **rows_of(
        Unused("evaluation reports the loss"),
        """
        prediction_loss_only eval_do_concat_batches eval_use_gather_object eval_accumulation_steps batch_eval_metrics
        per_device_eval_batch_size eval_delay metric_for_best_model greater_is_better
        """,
    ),
    **rows_of(
        Impossible("the last step is the result: set max_steps or epochs"),
        "load_best_model_at_end early_stopping_patience",
    ),
    **rows_of(
        Impossible(REFUSED["push_to_hub"]),
        "hub_model_id hub_strategy hub_token hub_private_repo hub_always_push hub_revision",
    ),
    **rows_of(
        Impossible("trackio takes it from run_env, such as TRACKIO_SPACE_ID"),
        "trackio_space_id trackio_bucket_id trackio_static_space_id",
    ),
    **rows_of(NO_SCHEDULE, "lr_scheduler_kwargs"),
    **rows_of(OPTIMIZER, "optim_args optim_target_modules"),
    "label_smoothing_factor": usual(0.0, LOSS),
    **rows_of(LOSS, "neftune_noise_alpha"),
    "auto_find_batch_size": Impossible("batch_size is fixed: trainyard plan says what fits"),
    "train_sampling_strategy": replace(Impossible(REFUSED["group_by_length"]), harmless=("random",)),
    "parallelism_config": Impossible("a model is divided by strategy=fsdp, deepspeed or pipeline alone"),
    "do_predict": Impossible("a run trains and evaluates only"),
    "reward_model": PREFERENCES,
}
_TRAINING = {
    "schedule": "linear",
    "warmup": 0.0,
    "eval_split": 0.0,
    "epochs": 3,
    "batch_size": 8,
    "checkpoint_interval": 500,
    "seed": 42,
}
# What TRL and peft add to the arguments of a trainer: a file with such names is of TRL.
_OF_TRL = re.compile(
    "model_name.*|dataset_.*|max_(seq_)?length|use_peft|lora_.*|load_in_.*|.*_only_loss|attn_implementation|(torch_)?dtype|use_dora|use_rslora"
)
TRANSFORMERS = Tool(
    "transformers",
    {name: row for name, row in TRANSFORMERS_ROWS.items() if not _OF_TRL.fullmatch(name)},
    {**_TRAINING, "lr": 5e-5, "lora_r": 0},
    loggers_of_project,
)


def drop_adapter(found: Translation, reason: str, tool: str) -> None:
    """Train all weights: names of an adapter have no effect in the tool."""
    for name in ("lora_r", "lora_alpha", "lora_dropout", "lora_targets"):
        found.unused.setdefault(reason, []).extend(found.origins.pop(name, []))
        found.values.pop(name, None)
    found.set_default("lora_r", 0, tool)


def _adapter(found: Translation) -> None:
    """Train all weights unless `use_peft` asks for adapters, as TRL does."""
    loggers_of_project(found)
    if as_text(found.seen.get("use_peft")) not in ("true", "1"):
        drop_adapter(found, "without use_peft, TRL trains all weights", "TRL")
        return
    found.set_default("lora_dropout", 0.05, "TRL")
    if "lora_targets" not in found.values:
        found.set_default(
            "lora_targets", "all-linear", "trainyard: without lora_target_modules, peft chooses by the architecture"
        )


TRL_ROWS: Rows = {
    **TRANSFORMERS_ROWS,
    **{name: name for name in ("packing", "lora_r", "lora_alpha", "lora_dropout")},
    "datasets": entries,
    "use_peft": Unused("adapters are LoRA; without it, all weights are trained"),
    "assistant_only_loss": Alias("train_on", {"true": {"train_on": "answer"}, "false": {}}, note="train_on is all"),
    "test_split_size": "eval_split",
    **rows_of(
        LOADER,
        """
        dataset_kwargs dataset_streaming streaming shuffle_dataset eval_packing pad_to_multiple_of dataset_batch_size
        ignore_bias_buffers
        """,
    ),
    **rows_of(Unused("packed samples are kept apart by their positions"), "padding_free packing_strategy"),
    "truncation_mode": Impossible("a longer sample loses its end", ("keep_start",)),
    **rows_of(Impossible("the evaluation takes eval_split of the dataset"), "dataset_test_split"),
    **rows_of(
        MODEL_LOADER,
        "model_init_kwargs lora_task_type bnb_4bit_quant_storage bnb_4bit_compute_dtype use_bnb_nested_quant",
    ),
    "model_revision": Impossible("the newest revision is fetched: give the folder of another one as model", ("main",)),
    **rows_of(INIT, "lora_modules_to_save lora_target_parameters"),
    **rows_of(TEMPLATE, "chat_template_path"),
    **rows_of(TOKENS, "eos_token pad_token"),
    "activation_offloading": Impossible("set gradient_checkpointing"),
    "loss_type": replace(LOSS, harmless=("nll", "chunked_nll")),
    "router_aux_loss_coef": usual(0.0, LOSS),
    **rows_of(
        PREFERENCES,
        """
        beta num_generations max_completion_length max_prompt_length reward_funcs reward_model_name_or_path ref_model
        loss_weights
        """,
    ),
}
TRL = Tool(
    "TRL",
    TRL_ROWS,
    {
        **_TRAINING,
        "lr": 2e-5,
        "seq_length": 1024,
        "packing": False,
        "train_on": "all",
        "gradient_checkpointing": True,
        "precision": "bf16-mixed",
    },
    _adapter,
)
