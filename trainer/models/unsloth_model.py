"""The model of the backend unsloth, with LoRA."""

from typing import Any

import torch

from trainer.common.errors import UserError, first_line
from trainer.config import RunSpec
from trainer.model_files.base_weights import load_causal_model
from trainer.models.model import require_targets, target_names

_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def load_unsloth(spec: RunSpec, dtype: torch.dtype) -> Any:
    """Return the model with LoRA for training, as unsloth loads it on the current CUDA device in `dtype`. Raises UserError."""
    from unsloth import FastLanguageModel

    torch.manual_seed(spec.seed)
    # unsloth does not say which weights it drew at random. The files are mapped into memory, and hardly read.
    load_causal_model(spec.model, dtype="auto")
    targets = list(_TARGETS if spec.lora_targets == ("all-linear",) else spec.lora_targets)
    try:
        model, _ = FastLanguageModel.from_pretrained(
            spec.model, max_seq_length=spec.seq_length, load_in_4bit=spec.quantize == "nf4", dtype=dtype
        )
        layers = sorted(target_names(model))
        adapted = FastLanguageModel.get_peft_model(
            model,
            r=spec.lora_r,
            lora_alpha=spec.lora_alpha,
            lora_dropout=spec.lora_dropout,
            target_modules=targets,
            use_gradient_checkpointing="unsloth" if spec.gradient_checkpointing else False,
            random_state=spec.seed,
        )
    except Exception as error:  # of many kinds, for a model that it does not support
        raise UserError(f"backend: unsloth cannot load {spec.model} ({first_line(error)}): set backend=peft") from None
    require_targets(spec, adapted.base_model.targeted_module_names, targets, layers)
    adapted.train()
    return adapted
