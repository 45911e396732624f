"""Stages of a pipeline: together they compute the loss and the gradients of the whole model, for every supported model type."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tables import table
from transformers import AutoConfig, AutoModelForCausalLM

from trainer.common.errors import UserError
from trainer.config import RunSpec
from trainer.distributed.world import World
from trainer.method.module_with_loss import ModelWithLoss
from trainer.models.model import isolates_packed_samples, load_model
from trainer.spec import make_spec
from trainer.strategy.base import Batch, autocast
from trainer.strategy.pipeline_measure import layer_seconds
from trainer.strategy.pipeline_stage import PARTS, Division, StageLoss, load_stage
from trainer.strategy.pipeline_weights import WeightFiles

SIZES: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "vocab_size": 60, "head_dim": 8, "pad_token_id": 0, "sliding_window": 6}
GPT2 = table("pipeline_stages")["gpt2"]
CPU = torch.device("cpu")
ALONE = World(0, 1, 0, 0, CPU)


def saved(folder: Path, kind: str, **options: Any) -> Path:
    torch.manual_seed(3)
    config = AutoConfig.for_model(kind, **((GPT2 if kind == "gpt2" else SIZES) | options))
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def spec_of(folder: Path, **fields: Any) -> RunSpec:
    return make_spec({"model": str(folder), "strategy": "pipeline", "seq_length": 16} | fields, "here")


def batch() -> Batch:
    """Return two rows, the first one packed from two samples."""
    torch.manual_seed(5)
    ids = torch.randint(1, 60, (2, 12))
    positions = torch.stack([torch.cat([torch.arange(7), torch.arange(5)]), torch.arange(12)])
    labels = ids.clone()
    labels[:, :3] = -100
    return Batch(ids, positions, labels)


def undivided_model(spec: RunSpec) -> ModelWithLoss:
    """Return the whole model as strategy=ddp loads it, without dropout."""
    return ModelWithLoss(load_model(spec.model_copy(update={"strategy": "ddp"}), CPU)).eval()


def run(stages: list[StageLoss]) -> torch.Tensor:
    """Return the loss of the stages one after the other, after its backward pass."""
    hidden, part = None, batch()
    for stage in stages:
        hidden = stage.eval().run_stage(hidden, part)
    assert hidden is not None
    hidden.backward()
    return hidden.detach()


@pytest.mark.parametrize("lora", [0, 4])
@pytest.mark.parametrize("kind", list(PARTS))
def test_stages_compute_what_the_whole_model_computes(kind: str, lora: int, tmp_path: Path) -> None:
    tied = bool(lora) == (kind == "llama")  # both forms, regardless of the default of the model type
    spec = spec_of(saved(tmp_path / "model", kind, tie_word_embeddings=not tied), lora_r=lora)
    stages = [load_stage(spec, Division((1, 2), rank), ALONE) for rank in range(2)]
    expected = undivided_model(spec)
    loss = expected(*batch())
    loss.backward()
    torch.testing.assert_close(run(stages), loss.detach(), rtol=1e-6, atol=1e-5)

    found: dict[str, torch.Tensor] = {}
    for stage in stages:
        for name, parameter in stage.held.items():
            assert parameter.grad is not None, name
            found[name] = found.get(name, 0) + parameter.grad
    wanted = {name: p for name, p in expected.model.named_parameters() if p.requires_grad}
    assert list(stages[0].trained_weights) == list(wanted)
    assert found.keys() == wanted.keys()
    for name, parameter in wanted.items():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-4, atol=1e-5, msg=name)
        for stage in stages:
            if name in stage.held:
                assert torch.equal(stage.held[name], parameter), "the weights of both strategies are equal"
    assert all(isolates_packed_samples(stage.model, 60) for stage in stages)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("kind", ["llama", "gpt2", "phi3"])
def test_stages_quantize_their_layers_as_the_whole_model_does(kind: str, precision: str, tmp_path: Path) -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes")
    sizes = {} if kind == "gpt2" else {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
    spec = spec_of(saved(tmp_path / "model", kind, **sizes), lora_r=4, quantize="nf4", precision=precision)
    stages = [load_stage(spec, Division((1, 2), rank), ALONE) for rank in range(2)]
    expected = undivided_model(spec)
    with autocast(spec, CPU):
        loss = expected(*batch())
        loss.backward()
        torch.testing.assert_close(run(stages), loss.detach(), rtol=1e-6, atol=1e-5)

    packed = [
        [module for module in part.modules() if isinstance(module, bitsandbytes.nn.Linear4bit)]
        for part in (expected, *stages)
    ]
    assert len(packed[0]) == len(packed[1]) + len(packed[2]) and len(packed[0]) == 3 * len(packed[1])
    for whole, part in zip(packed[0], packed[1] + packed[2], strict=True):
        assert part.weight.dtype == torch.uint8 and torch.equal(whole.weight, part.weight)
        absmax = [each.weight.quant_state.absmax for each in (whole, part)]
        assert torch.equal(*absmax)
    wanted = {name: p for name, p in expected.model.named_parameters() if p.requires_grad}
    for stage in stages:
        for name, parameter in stage.held.items():
            torch.testing.assert_close(parameter.grad, wanted[name].grad, rtol=1e-4, atol=1e-5, msg=name)


def test_a_stage_holds_and_reads_its_own_layers_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = saved(tmp_path / "model", "llama", num_hidden_layers=4)
    tensors = load_file(folder / "model.safetensors")
    spec = spec_of(folder, lora_r=0)
    wanted: list[str] = []
    read = WeightFiles.read
    monkeypatch.setattr(WeightFiles, "read", lambda files, names: wanted.extend(names) or read(files, names))
    stages = [load_stage(spec, Division((1, 2, 1), rank), ALONE) for rank in range(2)]
    assert not any(".layers.3." in name for name in wanted)
    sizes = [sum(p.numel() for p in stage.parameters()) for stage in stages]
    layer = sum(value.numel() for name, value in tensors.items() if ".layers.0." in name)
    assert sizes == [layer + 60 * 32, 2 * layer]
    assert not any(p.is_meta for stage in stages for p in stage.parameters())
    assert len(wanted) == 1 + 3 * sum(".layers.0." in name for name in tensors)


def test_the_layers_of_a_sharded_model_are_found_by_its_index(tmp_path: Path) -> None:
    folder = saved(tmp_path / "model", "llama", num_hidden_layers=2)
    tensors = load_file(folder / "model.safetensors")
    first = {name: value for name, value in tensors.items() if ".layers.1." not in name}
    rest = {name: value for name, value in tensors.items() if name not in first}
    (folder / "model.safetensors").unlink()
    save_file(first, folder / "a.safetensors")
    save_file(rest, folder / "b.safetensors")
    places = dict.fromkeys(first, "a.safetensors") | dict.fromkeys(rest, "../b.safetensors")  # the folder alone counts
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    stage = load_stage(spec_of(folder, lora_r=0), Division((1, 1), 1), ALONE)
    assert torch.equal(stage.held["model.layers.1.mlp.up_proj.weight"], rest["model.layers.1.mlp.up_proj.weight"])


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": [1]}', "[" * 100_000])
def test_a_damaged_index_is_reported(text: str, tmp_path: Path) -> None:
    folder = saved(tmp_path / "model", "llama")
    (folder / "model.safetensors.index.json").write_text(text)
    with pytest.raises(UserError, match=r"model.safetensors.index.json of .* is damaged: copy or download the model"):
        load_stage(spec_of(folder), Division((3,), 0), ALONE)
    (folder / "model.safetensors.index.json").unlink()
    (folder / "model.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(UserError, match=r"cannot read model.safetensors of "):
        load_stage(spec_of(folder), Division((3,), 0), ALONE)


def test_models_that_a_pipeline_does_not_support_are_refused(tmp_path: Path) -> None:
    spec = spec_of(saved(tmp_path / "model", "granite"))
    with pytest.raises(UserError, match=r"strategy: pipeline does not support the model type granite"):
        load_stage(spec, Division((3,), 0), ALONE)
    few = spec_of(saved(tmp_path / "few", "llama", num_hidden_layers=1))
    with pytest.raises(UserError, match=r"pipeline has 2 ranks, but the model has 1 layers"):
        load_stage(few, Division((1, 0), 0), ALONE)
    (tmp_path / "few" / "model.safetensors").rename(tmp_path / "few" / "weights.safetensors")
    with pytest.raises(UserError, match=r"has no model.safetensors, which strategy=pipeline needs"):
        load_stage(few, Division((1,), 0), ALONE)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma3_text"])
def test_the_speed_of_a_layer_is_measured(kind: str, tmp_path: Path) -> None:
    began = time.perf_counter()
    seconds = layer_seconds(spec_of(saved(tmp_path / "model", kind)), CPU)
    # A process with half of a core by a quota runs at full speed for the first part of every slice of 100 ms.
    assert seconds > 0 and time.perf_counter() - began >= 0.5


def test_weights_that_are_quantized_already_are_refused(tmp_path: Path) -> None:
    """The tensors of such a model have scales beside them."""
    folder = saved(tmp_path / "model", "qwen3")
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.down_proj.weight"
    save_file(tensors | {name: tensors[name].to(torch.float8_e4m3fn)}, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=f"^model: {name} of .* has the data type torch.float8_e4m3fn, expected 16 to"):
        load_stage(spec_of(folder), Division((3,), 0), ALONE)
    config = json.loads((folder / "config.json").read_text())
    quantized = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantized}))
    with pytest.raises(UserError, match=r"^model: .* is quantized already, which strategy=pipeline cannot load"):
        load_stage(spec_of(folder), Division((3,), 0), ALONE)


def test_a_damaged_file_of_weights_is_one_line(tmp_path: Path) -> None:
    folder = saved(tmp_path / "model", "llama")
    file = folder / "model.safetensors"
    index = {"weight_map": dict.fromkeys(load_file(file), "part.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    for content in (file.read_bytes()[:-1000], b"version https://git-lfs.github.com/spec/v1\n"):
        (folder / "part.safetensors").write_bytes(content)
        with pytest.raises(
            UserError, match=r"^model: (cannot read part|.*part.safetensors is a pointer of Git LFS)"
        ) as raised:
            load_stage(spec_of(folder), Division((3,), 0), ALONE)
        assert "\n" not in str(raised.value)
    (folder / "part.safetensors").unlink()
    index["weight_map"] = dict.fromkeys(index["weight_map"], "x" * 300)
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match=r"^model: .* has no x+\.*: copy or download the model again"):
        load_stage(spec_of(folder), Division((3,), 0), ALONE)


@pytest.mark.parametrize("wrong", [{"hidden_act": "no_such"}, {"num_key_value_heads": 3, "head_dim": None}])
def test_a_model_that_cannot_be_created_is_one_line(wrong: dict[str, Any], tmp_path: Path) -> None:
    folder = saved(tmp_path / "model", "llama")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | wrong))
    with pytest.raises(UserError, match=r"^model: ") as raised:
        load_stage(spec_of(folder), Division((3,), 0), ALONE)
    assert "\n" not in str(raised.value)
    if "hidden_act" in wrong:  # with the other one a model can be created, which cannot compute
        with pytest.raises(UserError, match=r"^model: cannot create "):
            layer_seconds(spec_of(folder), CPU)
