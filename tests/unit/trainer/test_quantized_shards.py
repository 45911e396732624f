"""Weights in 4 bits that FSDP shards: quantized layer by layer as bitsandbytes quantizes a whole model, and as large as planned."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM

from trainer.common.errors import UserError
from trainer.costs.cost import Layout, scale_bytes
from trainer.distributed.world import World
from trainer.model_files.model_shape import shape_of
from trainer.models.model import base_dtype, load_model
from trainer.models.quantized import nf4_config, quantize_layers
from trainer.spec import make_spec
from trainer.strategy import plan_of
from trainer.strategy.base import autocast
from trainer.strategy.fsdp import FSDP

CPU = torch.device("cpu")
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "vocab_size": 60, "pad_token_id": 0}
GPT2 = {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 60, "n_positions": 64, "bos_token_id": 0}

pytest.importorskip("bitsandbytes")


def saved(folder: Path, kind: str, dtype: torch.dtype = torch.float32) -> Path:
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **(GPT2 if kind == "gpt2" else SIZES)))
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.data.normal_(0, 0.1)
    model.to(dtype).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["llama", "gpt2", "qwen2"])
def test_layers_are_quantized_as_a_whole_model(kind: str, dtype: torch.dtype, precision: str, tmp_path: Path) -> None:
    """Also transposed weights and biases, and adapters that are drawn beside weights of any data type."""
    folder = saved(tmp_path / "model", kind, dtype)
    fields = {"model": str(folder), "seq_length": 16, "lora_r": 4, "quantize": "nf4", "precision": precision}
    spec = make_spec(fields, "here")
    whole, parts = load_model(spec, CPU).eval(), load_model(spec, CPU, sharded=True).eval()
    layers = [module for module in parts.modules() if hasattr(module, "unquantized")]
    assert layers and all(layer.unquantized.dtype == dtype for layer in layers), "weights stay as they are in the files"
    quantize_layers(parts, base_dtype(spec), CPU)
    assert not any(hasattr(module, "unquantized") for module in parts.modules())
    for (name, mine), wanted in zip(parts.named_parameters(), whole.parameters(), strict=True):
        value = mine if mine.dtype == torch.uint8 else mine.to(base_dtype(spec)) if not mine.requires_grad else mine
        assert type(mine) is torch.nn.Parameter and torch.equal(value.to(wanted.dtype), wanted), name
        mine.data = value.to(wanted.dtype)
    ids = torch.randint(1, 60, (2, 12))
    with autocast(spec, CPU):
        assert torch.equal(parts(input_ids=ids).logits, whole(input_ids=ids).logits)


def test_a_rank_holds_the_planned_bytes(tmp_path: Path) -> None:
    spec = make_spec(
        {"model": str(saved(tmp_path / "model", "llama")), "strategy": "fsdp", "quantize": "nf4", "seq_length": 16}, "x"
    )
    plan, shape, world = plan_of(spec), shape_of(spec), World(0, 1, 0, 0, CPU)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        module = plan.load_module(spec, world)
        parts = FSDP(spec, world, module).model
        held = sum(p.to_local().nbytes for p in parts.parameters() if not p.requires_grad)
        states = [module.quant_state for module in parts.modules() if getattr(module, "quant_state", None)]
    finally:
        dist.destroy_process_group()
    base = plan.state(spec, shape, Layout((1,)), cuda=False).base
    assert held == base
    scales = sum(state.absmax.nbytes + state.state2.absmax.nbytes for state in states)
    assert scales == pytest.approx(shape.layers * scale_bytes(spec, shape), rel=0.05)
    two, four = (plan.state(spec, shape, Layout((1,) * ranks), cuda=False) for ranks in (2, 4))
    assert two.base == base // 2 and four.base == base // 4
    # What every rank has in full: the root, three layers without their scales, and the scales of all layers.
    root = 4 * (shape.parameters - shape.layers * shape.layer_parameters)
    assert two.gathered == four.gathered == pytest.approx(root + 3 * (base - root) / shape.layers + scales, rel=0.01)


def test_weights_that_are_quantized_already_are_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path / "model", "llama")
    spec = make_spec({"model": str(tmp_path / "packed"), "seq_length": 16, "quantize": "nf4"}, "here")
    AutoModelForCausalLM.from_pretrained(folder, quantization_config=nf4_config(spec)).save_pretrained(spec.model)
    with pytest.raises(UserError, match=r"^model: .* is quantized already, which strategy=fsdp cannot load"):
        load_model(spec, CPU, sharded=True)
