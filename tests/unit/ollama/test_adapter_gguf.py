"""Adapters as GGUF: equal to llama.cpp's, refused where GGUF cannot express them."""

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import save_file
from tables import table

from trainer.common.errors import UserError
from trainer.gguf.gguf_adapter import ARCHITECTURES, AdapterError, write_adapter
from trainyard.deploy import converter

SHAPE = table("adapter_gguf")["shape"]
TYPES = table("adapter_gguf")["types"]
PARTS = table("adapter_gguf")["parts"]


def make_adapter(folder: Path, arch: str = "LlamaForCausalLM", **settings: Any) -> dict[str, Any]:
    """Write an adapter of random weights as peft does; return the base model's configuration."""
    folder.mkdir()
    rng, tensors = np.random.default_rng(1), {}
    parts = dict(PARTS)
    if arch == "Starcoder2ForCausalLM":
        parts = {name: shape for name, shape in parts.items() if "mlp" not in name}
        parts |= {"mlp.c_fc": (48, 32), "mlp.c_proj": (32, 48)}
    for layer in range(2):
        for part, (rows, columns) in parts.items():
            name = f"base_model.model.model.layers.{layer}.{part}"
            tensors[f"{name}.lora_A.weight"] = rng.standard_normal((4, columns)).astype(np.float32)
            tensors[f"{name}.lora_B.weight"] = rng.standard_normal((rows, 4)).astype(np.float32)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "bias": "none", **settings}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return SHAPE | {"architectures": [arch], "model_type": TYPES[arch]}


def read(path: Path) -> tuple[dict[str, tuple[Any, bytes]], dict[str, Any]]:
    reader = gguf.GGUFReader(path)
    tensors = {t.name: ((t.tensor_type, tuple(t.shape)), t.data.tobytes()) for t in reader.tensors}
    keys = {k: f.contents() for k, f in reader.fields.items() if not k.startswith("GGUF.")}
    return tensors, keys


@pytest.mark.slow
@pytest.mark.parametrize(
    "arch", [pytest.param(a, marks=[pytest.mark.long] * (i % 3 > 0)) for i, a in enumerate(ARCHITECTURES)]
)
def test_adapter_equals_llama_cpps(arch: str, tmp_path: Path) -> None:
    try:
        script = converter.converter_folder() / "convert_lora_to_gguf.py"
    except UserError as error:
        pytest.skip(str(error))
    config = make_adapter(tmp_path / "adapter", arch)
    base = tmp_path / "base"
    base.mkdir()
    (base / "config.json").write_text(json.dumps(config))
    write_adapter(tmp_path / "adapter", config, tmp_path / "mine.gguf")
    words = [sys.executable, script, "--base", base, "--outfile", tmp_path / "theirs.gguf", tmp_path / "adapter"]
    subprocess.run(words, check=True, capture_output=True)
    mine, my_keys = read(tmp_path / "mine.gguf")
    theirs, their_keys = read(tmp_path / "theirs.gguf")
    assert mine == theirs
    for key in ("general.architecture", "general.type", "adapter.type", "adapter.lora.alpha"):
        assert my_keys[key] == their_keys[key]


def test_rank_stabilized_scale_and_16_bit_types(tmp_path: Path) -> None:
    config = make_adapter(tmp_path / "a", use_rslora=True)
    write_adapter(tmp_path / "a", config, tmp_path / "a.gguf")
    _, keys = read(tmp_path / "a.gguf")
    assert keys["adapter.lora.alpha"] == pytest.approx(8 * math.sqrt(4))
    first = (tmp_path / "a.gguf").read_bytes()
    write_adapter(tmp_path / "a", config, tmp_path / "a.gguf")
    assert first == (tmp_path / "a.gguf").read_bytes()
    import torch
    from safetensors.torch import load_file
    from safetensors.torch import save_file as save_torch

    weights = load_file(file := tmp_path / "a/adapter_model.safetensors")
    save_torch({name: value.to(torch.bfloat16) for name, value in weights.items()}, file)
    write_adapter(tmp_path / "a", config, tmp_path / "b.gguf")
    value = weights["base_model.model.model.layers.0.mlp.up_proj.lora_A.weight"].to(torch.bfloat16).float().numpy()
    assert read(tmp_path / "b.gguf")[0]["blk.0.ffn_up.weight.lora_a"][1] == value.tobytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "a.gguf", "b.gguf"]


@pytest.mark.parametrize(("settings", "reason"), table("adapter_gguf")["adapter_that_gguf_cannot_express_is_refused"])
def test_adapter_that_gguf_cannot_express_is_refused(settings: dict[str, Any], reason: str, tmp_path: Path) -> None:
    config = make_adapter(tmp_path / "a", **settings)
    with pytest.raises(AdapterError, match=reason):
        write_adapter(tmp_path / "a", config, tmp_path / "a.gguf")
    assert not (tmp_path / "a.gguf").exists()


@pytest.mark.parametrize(("arch", "tied", "refused"), table("adapter_gguf")["the_head_has_an_adapter_unless_it"])
def test_the_head_has_an_adapter_unless_it_is_tied(arch: str, tied: bool | None, refused: bool, tmp_path: Path) -> None:
    config = make_adapter(tmp_path / "a", arch) | ({} if tied is None else {"tie_word_embeddings": tied})
    factors = {f"base_model.model.lm_head.lora_{x}.weight": shape for x, shape in (("A", (4, 32)), ("B", (64, 4)))}
    save_file(
        {name: np.ones(size, np.float32) for name, size in factors.items()}, tmp_path / "a/adapter_model.safetensors"
    )
    if refused:
        with pytest.raises(AdapterError, match=r"'lm_head' that shares its weights .*; set deploy_as=merged"):
            write_adapter(tmp_path / "a", config, tmp_path / "a.gguf")
        return
    write_adapter(tmp_path / "a", config, tmp_path / "a.gguf")
    assert set(read(tmp_path / "a.gguf")[0]) == {"output.weight.lora_a", "output.weight.lora_b"}


def test_swapped_factors_unknown_models_and_damaged_files_are_refused(tmp_path: Path) -> None:
    config = make_adapter(tmp_path / "a")
    with pytest.raises(AdapterError, match="adapters of 'BertModel'"):
        write_adapter(tmp_path / "a", {"architectures": ["BertModel"]}, tmp_path / "x.gguf")
    with pytest.raises(AdapterError, match="num_hidden_layers is -1"):
        write_adapter(tmp_path / "a", config | {"num_hidden_layers": -1}, tmp_path / "x.gguf")
    with pytest.raises(AdapterError, match=r"no adapter for .model\.layers\.1"):
        write_adapter(tmp_path / "a", config | {"num_hidden_layers": 1}, tmp_path / "x.gguf")
    path = tmp_path / "a" / "adapter_model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole.replace(b"lora_A", b"lora_X").replace(b"lora_B", b"lora_A").replace(b"lora_X", b"lora_B"))
    with pytest.raises(AdapterError, match="expected"):
        write_adapter(tmp_path / "a", config, tmp_path / "x.gguf")
    path.write_bytes(whole[:-9])
    with pytest.raises(AdapterError):
        write_adapter(tmp_path / "a", config, tmp_path / "x.gguf")
    path.write_bytes(whole.replace(b"layers.1.mlp.up_proj.lora_A", b"layers.1.mlp.up_proj.lora_E"))
    with pytest.raises(AdapterError, match="tensor"):
        write_adapter(tmp_path / "a", config, tmp_path / "x.gguf")
