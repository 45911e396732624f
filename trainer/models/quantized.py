"""A frozen base model in NF4, as in QLoRA (https://arxiv.org/abs/2305.14314), quantized by bitsandbytes."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import BitsAndBytesConfig
from transformers.pytorch_utils import Conv1D

from trainer.common.errors import UserError
from trainer.config import RunSpec
from trainer.models.optim import import_bitsandbytes

_COMPUTED = {"bf16-mixed": torch.bfloat16, "fp16-mixed": torch.float16}


def nf4_config(spec: RunSpec) -> BitsAndBytesConfig:
    """Return the configuration of an NF4 base. Raises UserError if bitsandbytes is unavailable."""
    import_bitsandbytes("quantize: nf4")
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=_COMPUTED.get(spec.precision, torch.float32),
    )


def prepare_quantized(model: Any) -> Any:
    """Freeze a model with a quantized base. What is not quantized keeps its data type: float32 would double the embedding."""
    _keep_packing(model)
    return model.requires_grad_(False)


def _keep_packing(model: Any) -> None:
    for module in model.modules():
        # On some CPUs the first pass in eval mode would repack the weights and round their scales. The model would then
        # differ from the trained one, and fail where a width is not a multiple of 64.
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False


class Quantizer:
    """Quantizes the matrices of a model one at a time, so that no more than one of them is in memory in another data type."""

    def __init__(self, spec: RunSpec, model: Any) -> None:
        """Replace the linear layers of a model without memory for its weights by those of bitsandbytes.

        Raises UserError: bitsandbytes is unavailable.
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

    def defer(self, model: Any, weights: Mapping[str, nn.Parameter]) -> Any:
        """Return the model ready for adapters, with weights that `quantize_layers` quantizes. `weights`: those before `__init__`."""
        for name, module in model.named_modules():
            if not hasattr(module, "quant_storage"):
                continue
            module.unquantized = weights[f"{name}.weight"].data
            # Without numbers, but with the data type of packed ones: adapters are float32 then, as those of strategy=ddp.
            empty = torch.empty(0, dtype=module.quant_storage)
            module.weight = type(module.weight)(empty, **module.weight.__dict__)
            if module.bias is not None:
                module.bias = weights[f"{name}.bias"]
        _keep_packing(model)
        return self._quantizer.postprocess_model(model)


def defer_quantization(spec: RunSpec, model: Any) -> Any:
    """Return a loaded model with linear layers of bitsandbytes, whose weights stay as they are until `quantize_layers`.

    Weights that are mapped into memory are then read and quantized layer by layer, by a strategy that shards them.
    Raises UserError: the weights are quantized already, or bitsandbytes is unavailable.
    """
    if getattr(model.config, "quantization_config", None):
        raise UserError(f"model: {spec.model} is quantized already, which strategy=fsdp cannot load: set strategy=ddp")
    weights = dict(model.named_parameters())
    return Quantizer(spec, model).defer(model, weights)


def quantize_layers(module: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
    """Quantize the layers in `module` that `defer_quantization` left, on `device`, as if their weights were loaded in `dtype`.

    The packed weights, uint8 [in * out / 2, 1], are plain parameters: FSDP cannot shard those of bitsandbytes, whose layers take both.
    """
    for layer in module.modules():
        if not hasattr(layer, "unquantized"):
            continue
        value: Any = layer.unquantized
        value = (value.T if issubclass(layer.source_cls, Conv1D) else value).to(device, dtype)
        packed = type(layer.weight)(value, **layer.weight.__dict__).to(
            device
        )  # also sets the scales, `layer.quant_state`
        layer.weight = nn.Parameter(packed.data.as_subclass(torch.Tensor), requires_grad=False)
        del layer.unquantized
