"""Load the model, its adapters and its tokenizer; compute the loss of a micro-batch."""

import importlib.util
import os
from collections.abc import Sequence
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoTokenizer
from transformers.pytorch_utils import Conv1D

from trainer.common.errors import UserError, first_line
from trainer.config import RunSpec
from trainer.data.plain_template import PLAIN_TEMPLATE
from trainer.data.text_tokenizer import naming_panics
from trainer.data.token_ids import set_padding
from trainer.model_files.base_weights import embedding_rows, load_causal_model
from trainer.model_files.model_name import check_model_name
from trainer.model_files.model_shape import target_error, unknown_targets
from trainer.models.expert_adapters import add_parameters, is_router, left_out, matches, matrices
from trainer.models.fused_lora import fuse_adapters
from trainer.models.quantized import defer_quantization, nf4_config, prepare_quantized

# Mamba's kernels read the weights of these layers directly: peft rejects adapters of them for these models.
_MAMBA = {"falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h"}
_MAMBA_UNUSED = {"conv1d", "out_proj"}


def load_tokenizer(name: str, setting: str = "model") -> Any:
    """Load the tokenizer of a model; the end token is the default padding token, the plain template the default one.

    `setting`: the field of the run spec that names the model. Raises UserError: the model does not exist or has no
    tokenizer.
    """
    check_model_name(name, setting)
    with naming_panics(name):
        try:
            tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
        except Exception as error:
            offline = " (offline: HF_HUB_OFFLINE is set)" if os.environ.get("HF_HUB_OFFLINE") == "1" else ""
            raise UserError(f"{setting}: cannot load the tokenizer of {name}{offline}: {first_line(error)}") from None
    set_padding(tokenizer, embedding_rows(name))
    if not tokenizer.chat_template:
        tokenizer.chat_template = PLAIN_TEMPLATE
    return tokenizer


def base_dtype(spec: RunSpec, *, uniform: bool = False) -> torch.dtype:
    """Return the dtype of the base model's weights; trained weights are always float32.

    With bf16-mixed a frozen base is stored in bfloat16: autocast would convert it anyway. `uniform`: all weights must have
    the same dtype.
    """
    half = spec.lora_r > 0 and spec.precision == "bf16-mixed" and not uniform
    return torch.bfloat16 if half else torch.float32


def load_model(
    spec: RunSpec,
    device: torch.device,
    *,
    dtype: torch.dtype | None = None,
    sharded: bool = False,
    kernels: Sequence[str] = (),
) -> nn.Module:
    """Load the model on `device`, with LoRA unless lora_r is 0. It is equal on every rank: the seed defines new weights.

    `dtype`: of the base model's weights; None: `base_dtype`. `sharded`: leave the model in host memory, because the
    strategy shards it first. `kernels`: the fast kernels to use (see `fast_kernels`). Raises UserError: the model or
    its LoRA targets are unavailable.
    """
    torch.manual_seed(spec.seed)
    # With dtype "auto" weights stay memory-mapped until they are read: FSDP reads only its shard.
    options: dict[str, Any] = {"dtype": "auto" if sharded else dtype or base_dtype(spec)}
    if "flash attention" in kernels:
        options["attn_implementation"] = "flash_attention_2"
    quantized = spec.quantize == "nf4"
    if quantized and not sharded:
        options |= {"quantization_config": nf4_config(spec), "device_map": {"": device}}
    model = load_causal_model(spec.model, **options)
    if "liger" in kernels:
        apply_liger(model)
    if quantized:
        model = defer_quantization(spec, model) if sharded else prepare_quantized(model)
    if spec.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if spec.lora_r:
        model = add_lora(spec, model)
    if not quantized and not sharded:  # the full model of a sharded one need not fit on the device
        model.to(device)
    model.train()
    return model


def fast_kernels(spec: RunSpec, device: torch.device) -> list[str]:
    """Return the faster kernels that a strategy with support for them uses here: the installed ones, on CUDA only."""
    if device.type != "cuda" or spec.kernels == "torch" or spec.backend == "unsloth":
        return []
    wanted = {"liger": "liger_kernel"}
    if spec.precision == "bf16-mixed":  # flash attention supports only 16-bit numbers
        wanted["flash attention"] = "flash_attn"
    return [name for name, package in wanted.items() if importlib.util.find_spec(package)]


def apply_liger(model: Any) -> None:
    """Replace modules of the model by Liger kernels."""
    from transformers.integrations.liger import apply_liger_kernel

    # ModelWithLoss sums over the tokens with loss; liger's own loss would average.
    apply_liger_kernel(model, {"cross_entropy": False, "fused_linear_cross_entropy": False})


def require_compiler(device: torch.device) -> None:
    """Check that torch.compile has a C++ compiler if `device` is a CPU. Raises UserError."""
    if device.type == "cuda":
        return
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        get_cpp_compiler()
    except Exception:
        raise UserError("torch_compile: no C++ compiler found: install g++, or set torch_compile=false") from None


def lora_config(spec: RunSpec) -> LoraConfig:
    targets: Any = "all-linear" if spec.lora_targets == ("all-linear",) else list(spec.lora_targets)
    return LoraConfig(
        r=spec.lora_r,
        lora_alpha=spec.lora_alpha,  # type: ignore[arg-type]
        lora_dropout=spec.lora_dropout,
        target_modules=targets,
        task_type="CAUSAL_LM",
    )


def add_lora(spec: RunSpec, model: Any, *, partial: bool = False) -> nn.Module:
    """Return the model with the adapters of the spec.

    `partial`: the model lacks layers of the spec's model, so that a target may match none of its layers. Raises
    UserError: a target is not a layer of the model, or of a kind that cannot have an adapter.
    """
    config = lora_config(spec)
    unused = _MAMBA_UNUSED if getattr(model.config, "model_type", "") in _MAMBA else set()
    routers = {name for name, part in model.named_modules() if is_router(part)}
    config.exclude_modules = routers | (unused if config.target_modules == "all-linear" else set()) or None
    layers = sorted(target_names(model) - unused - {name.rpartition(".")[2] for name in routers})
    every = matrices(model)
    covered = add_parameters(spec, every, model, config)
    try:
        adapted: Any = get_peft_model(model, config)
    except ValueError as error:
        if "lora_dropout" in str(error):
            raise UserError(
                f"lora_dropout: the adapters of the experts of {spec.model} have none: set 0, or lora_targets without them"
            ) from None
        raise target_error(first_line(error), layers) from None
    found = adapted.base_model
    if not partial:
        wanted = [target for target in config.target_modules or () if target not in covered]
        require_targets(spec, found.targeted_module_names, wanted, layers)
    adapted.left_out = left_out(spec, every, [*found.targeted_module_names, *found.targeted_parameter_names])
    fuse_adapters(adapted)
    return adapted


def target_names(model: Any) -> set[str]:
    """Return the names of the layers that can have an adapter, without their places."""
    kinds = (nn.Linear, nn.Embedding, Conv1D)
    return {name.rpartition(".")[2] for name, part in model.named_modules() if isinstance(part, kinds)}


def require_targets(spec: RunSpec, adapted: Sequence[str], targets: Any, layers: Sequence[str]) -> None:
    """Check that every one of `lora_targets` gave an adapter to some layer: peft only requires that one of them does.

    `adapted`: names of the layers with an adapter. `targets`: those of the spec as peft reads them, which replaces
    names of experts that transformers has fused. `layers`: what a target can be, for the message. Raises UserError: a
    target gave none.
    """
    missing = [each for each in targets if not any(matches(name, [each]) for name in adapted)]
    if spec.lora_targets != ("all-linear",) and (lost := [each for each in spec.lora_targets if each in missing]):
        raise unknown_targets(spec, lost, layers)


@torch.no_grad()
def isolates_packed_samples(model: nn.Module, vocabulary: int) -> bool:
    """Return whether the model isolates packed samples: the logits of a second sample must not depend on the first."""
    config: Any = getattr(model, "config", None)
    if getattr(getattr(config, "text_config", config), "attention_chunk_size", None):  # chunks are parts of the row
        return False
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    flash = getattr(getattr(model, "config", None), "_attn_implementation", "") == "flash_attention_2"
    step = max(1, vocabulary // 16)
    second = torch.arange(8, device=device) * step % vocabulary
    outputs = []
    for shift in (1, 5):
        ids = torch.cat([(second + shift) % vocabulary, second])[None]
        positions = torch.arange(8, device=device).repeat(2)[None]
        with torch.autocast(device.type, torch.bfloat16, enabled=flash or torch.is_autocast_enabled(device.type)):
            outputs.append(model(input_ids=ids, position_ids=positions, use_cache=False).logits[0, 8:].float())
    model.train(was_training)
    return torch.allclose(outputs[0], outputs[1], rtol=1e-3, atol=1e-3)
