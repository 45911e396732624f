"""From a spec to a model with its trainable part, a tokenizer, and the module that turns a micro-batch into its loss."""

import importlib.util
import os
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

from trainer.config import RunSpec
from trainer.errors import UserError
from trainer.optim import bitsandbytes
from trainer.strategy import plan_of


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def load_tokenizer(name: str) -> Any:
    """Load the model's tokenizer; a missing padding token is made the end token.

    Raises:
        UserError: no such model, or no tokenizer in it.
    """
    if _looks_like_a_path(name) and not Path(name).expanduser().is_dir():
        raise UserError(f"model: no folder {name}: give 'tiny', a local model folder, or a hub id (org/name)")
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except Exception as error:
        offline = " (offline: HF_HUB_OFFLINE is set)" if os.environ.get("HF_HUB_OFFLINE") == "1" else ""
        raise UserError(f"model: cannot load the tokenizer of {name}{offline}: {_first_line(error)}") from None
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def _looks_like_a_path(name: str) -> bool:
    return name.startswith((".", "/", "~")) or name.count("/") > 1


def base_dtype(spec: RunSpec) -> torch.dtype:
    """Return of what kind the weights are that are not adapters: what is trained is float32.

    Under bf16-mixed a frozen base is kept in bfloat16, which autocast would make of it anyway.
    """
    half = spec.lora_r > 0 and spec.precision == "bf16-mixed" and not plan_of(spec).uniform_dtype
    return torch.bfloat16 if half else torch.float32


def load_model(spec: RunSpec, device: torch.device) -> nn.Module:
    """Load the model on `device`, with LoRA unless lora_r is 0. Equal on every rank: the seed makes the fresh weights.

    Weights are of `base_dtype`, or as they are in its files where the strategy makes that of its part of them.

    Raises:
        UserError: the model, its backend or its LoRA targets cannot be had.
    """
    torch.manual_seed(spec.seed)
    if spec.backend == "unsloth":
        return _load_unsloth(spec, device)
    # As they are in its files weights stay there, mapped, until somebody reads them: FSDP takes its part and leaves the rest.
    how: dict[str, Any] = {"dtype": "auto" if plan_of(spec).reads_own_shard(spec) else base_dtype(spec)}
    fast = fast_kernels(spec, device)
    if "flash attention" in fast:
        how["attn_implementation"] = "flash_attention_2"
    if spec.quantize == "nf4":
        how |= _four_bits(spec, device)
    try:
        model = AutoModelForCausalLM.from_pretrained(spec.model, **how)
    except Exception as error:
        raise UserError(f"model: cannot load {spec.model}: {_first_line(error)}") from None
    places = getattr(model.config, "max_position_embeddings", None)
    if places and spec.seq_length > places:
        raise UserError(
            f"seq_length: {spec.model} has {places} positions, got {spec.seq_length}: set seq_length={places}"
        )
    if "liger" in fast:
        from transformers.integrations.liger import apply_liger_kernel

        # The loss is summed here, over tokens that have one: liger's own would take the mean.
        apply_liger_kernel(model, {"cross_entropy": False, "fused_linear_cross_entropy": False})
    if spec.quantize == "nf4":
        for part in model.modules():
            # At the first pass in eval mode it would lay the weights out anew on some CPUs, and round their scales: not
            # the model any more that is trained, and an error where a width is no multiple of 64.
            if hasattr(part, "support_avx512bf16_for_cpu"):
                part.support_avx512bf16_for_cpu = False
        model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    if spec.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if spec.lora_r:
        model = add_lora(spec, model)
    if spec.quantize == "none" and not plan_of(spec).sharded_weights(spec):
        # Else it need not fit the device whole: the strategy takes it apart first.
        model.to(device)
    model.train()
    return model


def fast_kernels(spec: RunSpec, device: torch.device) -> list[str]:
    """Return which faster kernels this process takes: those that are installed, on CUDA alone, unless kernels=torch."""
    if device.type != "cuda" or spec.kernels == "torch" or spec.backend == "unsloth":
        return []
    if not plan_of(spec).supports_fast_kernels(spec):
        return []
    # Flash attention knows 16-bit numbers only.
    wanted = {"liger": "liger_kernel"} | ({"flash attention": "flash_attn"} if spec.precision == "bf16-mixed" else {})
    return [name for name, package in wanted.items() if importlib.util.find_spec(package)]


def _four_bits(spec: RunSpec, device: torch.device) -> dict[str, Any]:
    """Return how from_pretrained makes the frozen base NF4, as QLoRA does (https://arxiv.org/abs/2305.14314)."""
    bitsandbytes("quantize: nf4")
    quantization = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16 if spec.precision == "bf16-mixed" else torch.float32,
    )
    return {"quantization_config": quantization, "device_map": {"": device}}


def need_compiler(device: torch.device) -> None:
    """Raise UserError unless torch.compile finds what it needs, before anything is trained."""
    if device.type == "cuda":
        return
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        get_cpp_compiler()
    except Exception:
        raise UserError(
            "torch_compile: there is no C++ compiler here: install g++, or set torch_compile=false"
        ) from None


def lora_config(spec: RunSpec) -> LoraConfig:
    """Return peft's form of the spec's LoRA fields."""
    targets: Any = "all-linear" if spec.lora_targets == ("all-linear",) else list(spec.lora_targets)
    return LoraConfig(
        r=spec.lora_r,
        lora_alpha=spec.lora_alpha,  # type: ignore[arg-type]
        lora_dropout=spec.lora_dropout,
        target_modules=targets,
        task_type="CAUSAL_LM",
    )


def add_lora(spec: RunSpec, model: Any) -> nn.Module:
    """Return the model with the spec's adapters. Raises UserError: a target is no layer of it."""
    try:
        adapted: nn.Module = get_peft_model(model, lora_config(spec))
    except ValueError as error:
        layers = sorted(
            {name.rpartition(".")[2] for name, part in model.named_modules() if isinstance(part, nn.Linear)}
        )
        raise UserError(
            f"lora_targets: {_first_line(error)}; this model's linear layers are {', '.join(layers)}, or say all-linear"
        ) from None
    return adapted


def _load_unsloth(spec: RunSpec, device: torch.device) -> nn.Module:
    if device.type != "cuda":
        raise UserError("backend: unsloth needs an NVIDIA GPU with CUDA, and there is none here: take backend=peft")
    try:
        from unsloth import FastLanguageModel
    except Exception as error:  # it raises more than ImportError where it finds no GPU it likes
        raise UserError(
            f"backend: unsloth cannot be had ({_first_line(error)}): install the extra, or backend=peft"
        ) from None
    model, _ = FastLanguageModel.from_pretrained(
        spec.model, max_seq_length=spec.seq_length, load_in_4bit=spec.quantize == "nf4"
    )
    targets = list(spec.lora_targets)
    if targets == ["all-linear"]:
        targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    return FastLanguageModel.get_peft_model(
        model,
        r=spec.lora_r,
        lora_alpha=spec.lora_alpha,
        lora_dropout=spec.lora_dropout,
        target_modules=targets,
        use_gradient_checkpointing="unsloth" if spec.gradient_checkpointing else False,
        random_state=spec.seed,
    )


class TokenLoss(nn.Module):
    """A causal language model whose forward gives the *sum* of its tokens' losses, so that shares can be weighed exactly."""

    def __init__(self, model: nn.Module, *, compiled: bool = False) -> None:
        super().__init__()
        self.model = model
        self._run = torch.compile(model) if compiled else model
        self._places: torch.Tensor | None = None
        base = model.get_base_model() if hasattr(model, "get_base_model") else model
        # Flash attention tells packed samples apart by their positions in one long row only.
        self._one_row = getattr(base.config, "_attn_implementation", "") == "flash_attention_2"
        head = base.get_output_embeddings() if hasattr(base, "get_output_embeddings") else None
        if head is not None and not compiled:
            head.register_forward_pre_hook(self._pick)

    def _pick(self, _: nn.Module, hidden: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """Hand the model's head only the places that have a loss: logits are the largest tensor of all."""
        if self._places is None:
            return hidden
        return (hidden[0].flatten(0, -2)[self._places][None],)

    def forward(self, ids: torch.Tensor, positions: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the summed cross entropy of next tokens, a float32 scalar.

        Args:
            ids, positions, labels: int64 [rows, T]; labels are -100 where no loss is; positions start again at 0
                with every packed sample, which is how transformers keeps them apart (it needs ``use_cache=False``).
        """
        targets = F.pad(labels[:, 1:], (0, 1), value=-100).flatten()
        places = (targets != -100).nonzero().squeeze(1)
        if not len(places):
            places = places.new_zeros(1)
        if self._one_row:
            ids, positions = ids.view(1, -1), positions.view(1, -1)
        self._places = places
        try:
            logits = self._run(input_ids=ids, position_ids=positions, use_cache=False).logits.flatten(0, 1)
        finally:
            self._places = None
        if len(logits) == len(targets):  # a model whose head is not called as a module, or a compiled one
            places = torch.arange(len(targets), device=places.device)
        return F.cross_entropy(logits.float(), targets[places], ignore_index=-100, reduction="sum")


@torch.no_grad()
def keeps_samples_apart(model: nn.Module, vocabulary: int) -> bool:
    """Find out whether this model keeps packed samples apart: the second one's logits must not know the first."""
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
