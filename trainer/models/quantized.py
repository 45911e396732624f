"""A frozen base model in NF4, as in QLoRA (https://arxiv.org/abs/2305.14314), quantized by bitsandbytes."""

from __future__ import annotations

from typing import Any

import torch
from peft import prepare_model_for_kbit_training
from torch import nn
from transformers import BitsAndBytesConfig

from trainer.config import RunSpec
from trainer.models.optim import import_bitsandbytes


def nf4_config(spec: RunSpec) -> BitsAndBytesConfig:
    """Return the configuration of an NF4 base. Raises UserError if bitsandbytes is unavailable."""
    import_bitsandbytes("quantize: nf4")
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16 if spec.precision == "bf16-mixed" else torch.float32,
    )


def prepare_quantized(model: Any) -> Any:
    """Freeze a model with a quantized base; what is not quantized becomes float32."""
    for module in model.modules():
        # On some CPUs the first pass in eval mode would repack the weights and round their scales. The model would then
        # differ from the trained one, and fail where a width is not a multiple of 64.
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    return prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)


class Quantizer:
    """Quantizes the matrices of a model one at a time, so that no more than one of them is in memory in another data type."""

    def __init__(self, spec: RunSpec, model: Any) -> None:
        """Replace the linear layers of a model without memory for its weights by those of bitsandbytes.

        Raises:
            UserError: bitsandbytes is unavailable.
        """
        config = nf4_config(spec)
        from transformers.quantizers.quantizer_bnb_4bit import Bnb4BitHfQuantizer

        self._quantizer = Bnb4BitHfQuantizer(config, pre_quantized=False)
        self._quantizer.preprocess_model(model=model, device_map=None)
        self._operation = self._quantizer.get_quantize_ops()

    def parameter(self, model: Any, name: str, value: torch.Tensor, device: torch.device) -> nn.Parameter:
        """Return the parameter `name` of the model with `value`, on `device`; quantized if it is a matrix of such a layer."""
        if not self._quantizer.param_needs_quantization(model, name):
            return nn.Parameter(value.to(device), requires_grad=False)
        quantized = self._operation.convert({name: value.to(device)}, full_layer_name=name, model=model)[name]
        assert isinstance(quantized, nn.Parameter)
        return quantized

    def finish(self, model: Any) -> Any:
        """Return the model, once its weights are read, ready for adapters."""
        return prepare_quantized(self._quantizer.postprocess_model(model))
