"""The names of axolotl."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from trainer.config.alias_table import ALIASES, Alias, as_text, is_off
from trainyard.import_file.hugging_face import (
    CHECKPOINTING,
    CHECKPOINTS,
    INIT,
    KERNELS,
    LOADER,
    LOGS,
    LOSS,
    MODEL_LOADER,
    NO_SCHEDULE,
    PREFERENCES,
    TEMPLATE,
    TOKENS,
    TRANSFORMERS_ROWS,
    WANDB,
    drop_adapter,
    every_epochs,
    loggers_of_project,
    usual,
)
from trainyard.import_file.parallelism import HOSTS
from trainyard.import_file.record_shapes import entries
from trainyard.import_file.translation import (
    Impossible,
    Missing,
    Rows,
    Tool,
    Translation,
    Unused,
    is_empty,
    rows_of,
    whole_number,
)

_MEDIA = Missing("training on images, video or sound")
_LAYERS = Missing("training of some layers")


def _adapter(found: Translation, key: str, value: Any) -> None:
    """Handle the kind of the adapter."""
    word = as_text(value)
    if word in ("lora", "qlora"):
        found.ignore(key, value, "adapters are LoRA; load_in_4bit makes them QLoRA")
    else:
        found.apply(Missing(f"the adapter {word}"), key, value)


def _targets(found: Translation, key: str, value: Any) -> None:
    """Handle the layers of the adapters: names; a regular expression is none."""
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list) or any(set("*[](|\\^$") & set(str(name)) for name in names):
        found.refuse(key, value, "lora_targets takes names of layers, no regular expressions: all-linear is used")
    elif not is_off(found.seen.get("lora_target_linear")) and not is_empty(found.seen.get("lora_target_linear")):
        found.ignore(key, value, "lora_target_linear names all layers")
    else:
        found.set("lora_targets", names, key, value)


def _linear(found: Translation, key: str, value: Any) -> None:
    if is_off(value):
        found.ignore(key, value, "lora_target_modules names the layers")
    else:
        found.set("lora_targets", "all-linear", key, value)


def _rows_of_a_rank(found: Translation, key: str, value: Any) -> None:
    """Handle `batch_size`: the rows of one rank in a step."""
    rows, micro = whole_number(value), whole_number(found.seen.get("micro_batch_size")) or 1
    if not rows or rows % micro:
        found.refuse(key, value, "expected a multiple of micro_batch_size")
    elif found.seen.get("gradient_accumulation_steps"):
        found.ignore(key, value, "gradient_accumulation_steps decides")
    else:
        found.accumulation[key] = rows // micro


def _pretraining(found: Translation, key: str, value: Any) -> None:
    """Handle a dataset of plain text."""
    entries(found, key, value)
    found.set("train_on", "all", key, "all", "every token of a text")


def _plugins(found: Translation, key: str, value: Any) -> None:
    """Handle the list of plugins, each by its last word."""
    for plugin in value if isinstance(value, list) else [value]:
        name = str(plugin).rpartition(".")[2]
        if name in ("CutCrossEntropyPlugin", "LigerPlugin", "KernelsPlugin"):
            found.ignore(key, plugin, KERNELS.reason)
        elif name in ("DiffusionPlugin", "LLMCompressorPlugin", "KDPlugin"):
            found.apply(Missing(f"what the plugin {name} does"), key, plugin)
        else:
            found.refuse(key, plugin, "plugins of axolotl do not run here")


def _evaluation(found: Translation, key: str, value: Any) -> None:
    """Handle the evaluation set: a fraction, or a number of samples."""
    if whole_number(value):
        found.refuse(key, value, "eval_split is a fraction of the samples: set it")
    else:
        found.set("eval_split", value, key, value)


def _rl(found: Translation, key: str, value: Any) -> None:
    """Handle the kind of training on preferences."""
    word = as_text(value)
    if word in ("dpo", "ipo", "orpo", "kto"):
        found.set("method", "dpo" if word == "ipo" else word, key, value)
        if word == "ipo":
            found.set("preference_loss", "ipo", key, value)
    else:
        found.apply(Missing("reinforcement learning, or this training on preferences"), key, value)


def _finish(found: Translation) -> None:
    loggers_of_project(found)
    if is_empty(found.seen.get("adapter")):
        drop_adapter(found, "without adapter, axolotl trains all weights", "axolotl")
        if found.values.get("quantize") == "nf4":
            found.drop("quantize", "weights in 4 bits cannot be trained: set lora_r")


def _special_tokens(found: Translation, key: str, value: Any) -> None:
    """Handle special tokens, of which the one for padding is never learned."""
    for name, token in value.items() if isinstance(value, Mapping) else [("", value)]:
        row = Unused("padding is masked") if name == "pad_token" else TOKENS
        found.apply(row, f"{key}.{name}" if name else key, token)


_PRECISION = {"auto": {"precision": "bf16-mixed"}, "full": {"precision": "bf16-mixed"}}
_OPTIMIZERS = {
    **dict(ALIASES["optim"].words or {}),
    "paged_adamw_32bit": {"optimizer": "adamw"},
    "adamw_torch_8bit": {"optimizer": "adamw8bit"},
    "ao_adamw_8bit": {"optimizer": "adamw8bit"},
}
_ON = {"gradient_checkpointing": True}

ROWS: Rows = {
    **TRANSFORMERS_ROWS,
    "base_model": "model",
    "sequence_len": "seq_length",
    "sample_packing": "packing",
    "micro_batch_size": "batch_size",
    "num_epochs": "epochs",
    "lora_r": "lora_r",
    "lora_alpha": "lora_alpha",
    "lora_dropout": "lora_dropout",
    "datasets": entries,
    "pretraining_dataset": _pretraining,
    "val_set_size": _evaluation,
    "adapter": _adapter,
    "lora_target_modules": _targets,
    "lora_target_linear": _linear,
    "batch_size": _rows_of_a_rank,
    "plugins": _plugins,
    "train_on_inputs": Alias("train_on", {"true": {"train_on": "all"}, "false": {"train_on": "answer"}}),
    "lr_scheduler": ALIASES["lr_scheduler_type"],
    "optimizer": Alias("optimizer", _OPTIMIZERS),
    "bf16": replace(ALIASES["bf16"], words={**dict(ALIASES["bf16"].words or {}), **_PRECISION}),
    "bfloat16": ALIASES["bf16"],
    "float16": ALIASES["fp16"],
    "gradient_checkpointing": replace(
        CHECKPOINTING,
        words={**dict(CHECKPOINTING.words or {}), **dict.fromkeys(("offload", "offload_disk", "unsloth"), _ON)},
    ),
    "use_tensorboard": Alias("loggers", {"true": {"loggers": ("tensorboard",)}, "false": {}}),
    **rows_of(WANDB, "wandb_project wandb_entity wandb_name wandb_watch wandb_log_model wandb_run_id wandb_mode"),
    **rows_of(
        Impossible("it is not among the loggers"),
        """
        use_swanlab use_otel_metrics use_comet swanlab_project swanlab_experiment_name swanlab_description swanlab_mode
        swanlab_workspace swanlab_log_model otel_metrics_host otel_metrics_port
        """,
    ),
    "use_mlflow": Alias("loggers", {"true": {"loggers": ("mlflow",)}, "false": {}}),
    **rows_of(
        Impossible(
            "loggers=mlflow and loggers=trackio take the name from WANDB_PROJECT, and addresses from their variables: set them with run_env"
        ),
        "trackio_project_name trackio_run_name mlflow_tracking_uri mlflow_experiment_name",
    ),
    "use_wandb": Unused("wandb_project selects wandb"),
    "saves_per_epoch": every_epochs("checkpoint_interval"),
    "evals_per_epoch": every_epochs("eval_interval"),
    "auto_resume_from_checkpoints": Unused("a run resumes from its newest checkpoint"),
    **rows_of(CHECKPOINTS, "save_first_step"),
    **rows_of(
        KERNELS,
        """
        flash_attention sdp_attention eager_attention flex_attention xformers_attention sage_attention s2_attention
        use_kernels liger_rope liger_rms_norm liger_rms_norm_gated liger_glu_activation liger_layer_norm
        liger_fused_linear_cross_entropy liger_use_token_scaling lora_mlp_kernel lora_qkv_kernel lora_o_kernel
        lora_embedding_kernel cut_cross_entropy flash_attn_cross_entropy flash_attn_rms_norm flash_attn_fuse_mlp
        flash_attn_fuse_qkv flash_optimum fused_attn_kernel flex_attn_compile_kwargs experts_implementation
        use_scattermoe use_sonicmoe gemma4_hybrid_attn_impl use_dsv4_kernels dsv4_fp4_grouped_mode use_glm_dsa_kernels
        tiled_mlp torchdistx_path dynamo_backend activation_offloading layer_offloading lora_on_cpu
        experimental_skip_move_to_device large_head_attention chunked_cross_entropy
        """,
    ),
    **rows_of(
        LOGS,
        """
        loss_watchdog_threshold loss_watchdog_patience debug include_tokens_per_second include_tkps profiler_steps
        eval_table_size
        """,
    ),
    **rows_of(
        HOSTS,
        """
        ddp device device_map world_size local_rank gpu_memory_limit max_memory use_ray ray_num_workers ray_run_name
        resources_per_worker dp_shard_size dp_replicate_size expert_parallel_num_nvl_bytes
        expert_parallel_token_capacity
        """,
    ),
    **rows_of(
        MODEL_LOADER,
        """
        model_type tokenizer_type tokenizer_use_fast tokenizer_legacy tokenizer_use_mistral_common
        tokenizer_save_jinja_files is_llama_derived_model is_falcon_derived_model is_mistral_derived_model
        is_qwen_derived_model lora_fan_in_fan_out base_model_config bnb_config_kwargs base_model_ignore_patterns
        hf_use_auth_token llama4_linearized_experts qlora_sharded_model_loading strict
        """,
    ),
    **rows_of(
        LOADER,
        """
        dataset_prepared_path dataset_processes dataset_keep_in_memory shuffle_merged_datasets
        shuffle_before_merging_datasets skip_prepare_dataset eval_sample_packing pad_to_sequence_len eval_batch_size
        eval_sequence_len pretrain_multipack_attn pretrain_multipack_buffer_size streaming
        streaming_multipack_buffer_size sample_packing_group_size sample_packing_bin_size sample_packing_sequentially
        sample_packing_eff_est sample_packing_seq_len_multiplier total_num_tokens total_supervised_tokens
        max_packed_sequence_len
        """,
    ),
    **rows_of(TEMPLATE, "chat_template_jinja chat_template_kwargs default_system_message"),
    "chat_template": replace(TEMPLATE, harmless=("tokenizer_default",)),
    "special_tokens": _special_tokens,
    **rows_of(
        TOKENS,
        """
        tokens added_tokens_overrides resize_token_embeddings_to_32x shrink_embeddings eot_tokens
        tokenizer_config fix_untrained_tokens
        """,
    ),
    **rows_of(
        INIT,
        """
        lora_modules_to_save lora_target_parameters lora_model_dir lora_rank_pattern lora_alpha_pattern loftq_bits peft
        peft_layers_to_transform peft_layers_pattern peft_init_lora_weights peft_trainable_token_indices
        peft_layer_replication
        """,
    ),
    "peft_use_dora": TRANSFORMERS_ROWS["use_dora"],
    "peft_use_rslora": TRANSFORMERS_ROWS["use_rslora"],
    **rows_of(
        Impossible("one learning rate for all weights"),
        "loraplus_lr_ratio loraplus_lr_embedding embedding_lr embedding_lr_scale lr_groups",
    ),
    **rows_of(_LAYERS, "unfrozen_parameters freeze_mm_modules lisa_n_layers lisa_step_interval lisa_layers_attribute"),
    **rows_of(NO_SCHEDULE, "cosine_min_lr_ratio cosine_constant_lr_ratio lr_quadratic_warmup eta_min lr_div_factor"),
    "adam_eps": usual(1e-8),
    **rows_of(LOSS, "use_eaft eaft_alpha eaft_k train_on_last_step_only"),
    **rows_of(
        Impossible("the evaluation takes eval_split of the dataset"),
        "test_datasets do_bench_eval do_causal_lm_eval eval_causal_lm_metrics eval_max_new_tokens",
    ),
    **rows_of(
        Impossible("the precision is float32, bf16-mixed or fp16-mixed; QLoRA has weights in nf4"),
        "fp8 fp8_enable_fsdp_float8_all_gather quantize_moe_experts",
    ),
    **rows_of(
        Impossible("it belongs to weights that are quantized otherwise"),
        "gptq_groupsize gptq_model_v1 gptq_disable_exllama nvfp4_merge_aware model_quantization_config_kwargs",
    ),
    "model_quantization_config": Impossible("weights are loaded as they are, or in nf4"),
    "model_config": Impossible("the model is configured by its folder"),
    "revision_of_model": Impossible("the newest revision is fetched: give the folder of another one as base model"),
    "reinit_weights": Impossible("a run begins with the weights of the model"),
    "min_sample_len": Impossible("short samples are trained, too"),
    "dataset_exact_deduplication": Impossible("samples are not compared: remove copies from the dataset"),
    "curriculum_sampling": Impossible("the seed defines the order of samples"),
    "push_dataset_to_hub": TRANSFORMERS_ROWS["push_to_hub"],
    "full_finetune": Unused("a file without adapter trains all weights"),
    **rows_of(
        Missing("reinforcement learning or this training on preferences"),
        "trl ebft",
    ),
    "rl": _rl,
    **rows_of("preference_beta", "rl_beta dpo_beta orpo_alpha"),
    "kto_desirable_weight": "kto_desirable_weight",
    "kto_undesirable_weight": "kto_undesirable_weight",
    **rows_of(PREFERENCES, "reward_model process_reward_model num_labels center_rewards_coefficient"),
    **rows_of(_MEDIA, "processor_type processor_kwargs image_size"),
    **rows_of(Missing("training of a quantized model"), "qat quantization use_onebitllms llmcompressor"),
    **rows_of(
        Missing("ReLoRA"),
        """
        relora relora_steps relora_prune_ratio relora_cpu_offload jagged_restart_steps jagged_restart_warmup_steps
        jagged_restart_anneal_steps
        """,
    ),
    "diffusion": Missing("diffusion"),
    "gptq": Missing("training of adapters on weights in GPTQ"),
}
AXOLOTL = Tool(
    "axolotl",
    ROWS,
    {
        "seq_length": 512,
        "precision": "bf16-mixed",
        "eval_split": 0.0,
        "epochs": 1,
        "batch_size": 1,
        "schedule": "cosine",
        "packing": False,
        "seed": 42,
        "train_on": "answer",
    },
    _finish,
)
