"""The names of LLaMA-Factory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainer.common.formats import printable
from trainer.config.alias_table import ALIASES, Alias, as_text
from trainyard.import_file.hugging_face import (
    INIT,
    KERNELS,
    LOADER,
    LOGS,
    LOSS,
    MODEL_LOADER,
    PREFERENCES,
    TEMPLATE,
    TOKENS,
    TRANSFORMERS_ROWS,
    attention,
    drop_adapter,
    every_epochs,
    loggers_of_project,
    run_name,
)
from trainyard.import_file.parallelism import HOSTS, deepspeed
from trainyard.import_file.record_shapes import factory_datasets, factory_file
from trainyard.import_file.translation import Impossible, Missing, Rows, Section, Tool, Translation, Unused, rows_of

_MEDIA = Unused("it concerns images, video and sound")
_OPTIMIZERS = Impossible("the optimizer is AdamW")
_LOSSES = ("sigmoid", "ipo", "hinge", "orpo")


def _method(found: Translation, key: str, value: Any) -> None:
    """Handle what is trained: adapters, or all weights."""
    word = as_text(value)
    if word == "lora":
        found.ignore(key, value, "adapters are LoRA")
    elif word == "full":
        found.ignore(key, value, "all weights are trained")
    else:
        found.apply(Missing(f"finetuning_type {word}"), key, value)


def _stage(found: Translation, key: str, value: Any) -> None:
    """Handle the kind of training: supervised, on plain text, or on preferences."""
    word = as_text(value)
    loss = as_text(found.seen.get("pref_loss") or "sigmoid")
    if word == "kto" or (word == "dpo" and loss == "orpo"):
        found.set("method", "kto" if word == "kto" else "orpo", key, value)
        return
    if word == "dpo" and loss in _LOSSES:
        found.set("method", "dpo", key, value)
        return
    if word == "pt":
        found.set("train_on", "all", key, value)
        found.set_default("packing", True, "LLaMA-Factory for stage pt")
    elif word == "sft":
        found.ignore(key, value, "supervised fine-tuning")
    else:
        found.apply(PREFERENCES, key, value)


def _preference_loss(found: Translation, key: str, value: Any) -> None:
    """Handle the loss of a pair, which counts in the stage dpo."""
    word = as_text(value)
    if word not in _LOSSES:
        found.apply(PREFERENCES, key, value)
    elif word in ("sigmoid", "orpo") or as_text(found.seen.get("stage")) != "dpo":
        found.ignore(key, value, "the stage decides")
    else:
        found.set("preference_loss", word, key, value)


def _targets(found: Translation, key: str, value: Any) -> None:
    words = value if isinstance(value, list) else [word.strip() for word in str(value).split(",")]
    found.set("lora_targets", ["all-linear"] if words == ["all"] else words, key, value)


def _bits(found: Translation, key: str, value: Any) -> None:
    if as_text(value) == "4":
        found.set("quantize", "nf4", key, value)
    else:
        found.refuse(key, value, "weights are in 4 bits (nf4) or whole")


def _distribution(found: Translation, key: str, value: Any) -> None:
    """Translate `dist_config`, the name of a strategy or its options."""
    options = value if isinstance(value, Mapping) else {"name": value}
    for name, each in options.items():
        if each is None:
            found.unset.append(printable(f"{key}.{name}"))
        elif name == "name" and each in ("fsdp2", "fsdp"):
            found.set("strategy", "fsdp", f"{key}.{name}", each)
        elif name == "config_file" and options.get("name") == "deepspeed":
            deepspeed(found, f"{key}.{name}", each)
        elif name == "name" and each in ("ddp", "deepspeed"):
            found.set("strategy", each, f"{key}.{name}", each)
        else:
            found.refuse(f"{key}.{name}", each, "a model is divided by strategy=fsdp, deepspeed or pipeline alone")


def _finish(found: Translation) -> None:
    loggers_of_project(found)
    if as_text(found.seen.get("finetuning_type")) == "full":
        drop_adapter(found, "all weights are trained", "LLaMA-Factory, with finetuning_type full")
        return
    found.set_default("lora_r", 8, "LLaMA-Factory")
    found.set_default("lora_alpha", 2 * found.values.get("lora_r", 16), "LLaMA-Factory, twice lora_rank")


def _finish_v1(found: Translation) -> None:
    if not found.seen.get("peft_config"):
        drop_adapter(found, "without peft_config, all weights are trained", "LLaMA-Factory v1")


_PEFT: Rows = {
    "name": _method,
    "r": "lora_r",
    "lora_alpha": "lora_alpha",
    "lora_dropout": "lora_dropout",
    "target_modules": _targets,
    "use_dora": TRANSFORMERS_ROWS["use_dora"],
    "use_rslora": TRANSFORMERS_ROWS["use_rslora"],
    **rows_of(INIT, "adapter_name_or_path modules_to_save init_lora_weights bias export_dir export_size"),
    **rows_of(
        Missing("training of some layers"),
        "freeze_trainable_layers freeze_trainable_modules freeze_extra_modules",
    ),
}
_QUANTIZATION: Rows = {
    "name": Unused("bitsandbytes"),
    "quantization_bit": _bits,
    "double_quantization": Unused("nf4 quantizes once"),
}
ROWS: Rows = {
    **TRANSFORMERS_ROWS,
    "output_dir": run_name,
    "stage": _stage,
    "finetuning_type": _method,
    "dataset": factory_datasets,
    "cutoff_len": "seq_length",
    "packing": "packing",
    "neat_packing": "packing",
    "val_size": "eval_split",
    "lora_rank": "lora_r",
    "lora_alpha": "lora_alpha",
    "lora_dropout": "lora_dropout",
    "lora_target": _targets,
    "quantization_bit": _bits,
    "quantization_type": Alias("quantize", {"nf4": {}}),
    "flash_attn": attention,
    "pure_bf16": Alias(
        "precision", {"true": {"precision": "bf16-mixed"}, "false": {}}, note="trained weights stay in float32"
    ),
    "train_on_prompt": Alias("train_on", {"true": {"train_on": "all"}, "false": {"train_on": "answer"}}),
    "disable_gradient_checkpointing": Alias(
        "gradient_checkpointing", {"true": {"gradient_checkpointing": False}, "false": {"gradient_checkpointing": True}}
    ),
    "enable_liger_kernel": ALIASES["use_liger_kernel"],
    "use_unsloth": Alias("backend", {"true": {"backend": "unsloth"}, "false": {}}),
    "template": TEMPLATE,
    **rows_of(TEMPLATE, "tool_format default_system enable_thinking preserve_thinking"),
    **rows_of(
        TOKENS,
        "resize_vocab add_tokens add_special_tokens new_special_tokens_config init_special_tokens split_special_tokens",
    ),
    "quantization_method": Alias("quantize", {"bnb": {}, "bitsandbytes": {}}),
    "double_quantization": Unused("nf4 quantizes once"),
    "dataset_dir": Unused("the names in dataset are looked up in it"),
    **rows_of(
        LOADER,
        """
        preprocessing_num_workers preprocessing_batch_size overwrite_cache tokenized_path streaming buffer_size
        media_dir data_shared_file_system
        """,
    ),
    **rows_of(LOGS, "plot_loss print_param_status include_effective_tokens_per_second compute_accuracy"),
    **rows_of(
        KERNELS,
        "use_v1_kernels use_reentrant_gc upcast_layernorm upcast_lmhead_output use_unsloth_gc shift_attn use_kv_cache",
    ),
    **rows_of(
        MODEL_LOADER,
        "cache_dir use_fast_tokenizer low_cpu_mem_usage offload_folder hf_hub_token ms_hub_token om_hub_token infer_dtype",
    ),
    **rows_of(
        HOSTS,
        "ray_num_workers ray_run_name ray_storage_path resources_per_worker placement_strategy master_addr master_port",
    ),
    "max_samples": Impossible("all samples of a dataset are trained: set a weight below 1, or max_steps"),
    **rows_of(
        Impossible("samples are taken from all datasets in the order of the seed"),
        "mix_strategy interleave_probs disable_shuffling",
    ),
    **rows_of(Impossible("every answer is trained"), "mask_history"),
    **rows_of(
        Impossible("the evaluation takes eval_split of the dataset"),
        "eval_dataset eval_on_each_dataset eval_num_beams predict_with_generate",
    ),
    **rows_of(INIT, "additional_target adapter_name_or_path create_new_adapter pissa_init pissa_iter pissa_convert"),
    **rows_of(Impossible("one learning rate for all weights"), "loraplus_lr_ratio loraplus_lr_embedding"),
    **rows_of(LOSS, "use_dft_loss use_asft_loss asft_alpha use_eaft_loss eaft_alpha moe_aux_loss_coef"),
    **rows_of(
        _MEDIA,
        """
        image_max_pixels image_min_pixels video_max_pixels video_min_pixels video_fps video_maxlen freeze_vision_tower
        freeze_multi_modal_projector freeze_language_model
        """,
    ),
    **rows_of(
        Impossible("the precision is float32, bf16-mixed or fp16-mixed"),
        "fp8 fp8_backend fp8_enable_fsdp_float8_all_gather",
    ),
    **rows_of(
        _OPTIMIZERS,
        """
        use_galore use_apollo use_badam use_adam_mini use_muon galore_layerwise galore_target galore_rank galore_scale
        apollo_layerwise apollo_target apollo_rank apollo_scale apollo_scale_type badam_mode badam_switch_mode
        badam_switch_interval badam_verbose
        """,
    ),
    **rows_of(
        Missing("training of some layers, or of other adapters"),
        """
        use_llama_pro mixture_of_depths freeze_trainable_layers freeze_trainable_modules oft_block_size oft_target
        oft_rank
        """,
    ),
    **rows_of(
        Missing("training with ktransformers"),
        "use_kt kt_cpu_activation kt_config kt_weight_path kt_non_expert_weight_path kt_optimize_rule",
    ),
    **rows_of(
        Missing("training with Megatron"),
        "use_mca use_megatron_bridge tensor_model_parallel_size pipeline_model_parallel_size expert_model_parallel_size",
    ),
    "pref_loss": _preference_loss,
    "pref_beta": "preference_beta",
    "kto_chosen_weight": "kto_desirable_weight",
    "kto_rejected_weight": "kto_undesirable_weight",
    "ref_model": Impossible("the reference is the model before the training"),
    **rows_of(PREFERENCES, "pref_ftx dpo_label_smoothing simpo_gamma"),
    **rows_of(Missing("generation or export by this file"), "do_predict export_dir infer_backend"),
    **rows_of(
        Unused("it belongs to the export"),
        "export_size export_device export_legacy_format export_quantization_bit export_quantization_dataset",
    ),
}
_SHARED = (
    "output_dir cutoff_len learning_rate num_train_epochs max_steps max_grad_norm bf16 seed full_determinism resume_from_checkpoint "
    "save_steps save_total_limit logging_steps eval_dataset trust_remote_code flash_attn pref_loss pref_beta pref_ftx simpo_gamma "
    "dpo_label_smoothing"
)
_V1: Rows = {
    **{name: ROWS[name] for name in _SHARED.split()},
    "model": "model",
    "train_dataset": factory_file,
    "micro_batch_size": "batch_size",
    "global_batch_size": "total_batch_size",
    "enable_activation_checkpointing": "gradient_checkpointing",
    "peft_config": Section(_PEFT),
    "quant_config": Section(_QUANTIZATION),
    "dist_config": _distribution,
    "kernel_config": KERNELS,
    "init_config": MODEL_LOADER,
    "model_class": Alias("model", {"llm": {}}),
    "optim_config": Impossible("the optimizer is AdamW"),
    "lr_scheduler_config": Impossible("set schedule and warmup"),
    "custom_chat_template": TEMPLATE,
    "batching_strategy": Unused("packing=auto packs samples"),
    "batching_workers": LOADER,
    "save_epochs": every_epochs("checkpoint_interval"),
    "save_ckpt_as_hf": Unused("the result is in the format of Hugging Face"),
    "dist_timeout": ROWS["ddp_timeout"],
    **rows_of(
        Impossible("a model is divided by strategy=fsdp, deepspeed or pipeline alone", ("1",)), "cp_size mp_shard_size"
    ),
    **rows_of(HOSTS, "dp_size mp_replicate_size cp_mode"),
    **rows_of(Unused("a run trains and evaluates only"), "sample_backend max_new_tokens"),
}
_SFT = {
    "packing": False,
    "train_on": "answer",
    "eval_split": 0.0,
    "seed": 42,
    "epochs": 3,
    "seq_length": 2048,
    "warmup": 0.0,
}
_COMMON: dict[str, Any] = {**_SFT, "gradient_checkpointing": True}
LLAMA_FACTORY = Tool(
    "LLaMA-Factory",
    ROWS,
    {**_COMMON, "schedule": "linear", "batch_size": 8, "checkpoint_interval": 500, "lr": 5e-5},
    _finish,
)
LLAMA_FACTORY_V1 = Tool(
    "LLaMA-Factory v1",
    _V1,
    {**_COMMON, "schedule": "constant", "batch_size": 1, "lr": 1e-4, "precision": "bf16-mixed"},
    _finish_v1,
)
