"""A plain Llama model as GGUF without torch: equal to llama.cpp's converter; every other model is left to that converter."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tables import table

from trainer.common.errors import UserError
from trainer.data.shapes import Sample
from trainer.data.tiny import make_tiny
from trainer.gguf.llama import UnsupportedModelError, write_llama
from trainyard.deploy import converter
from trainyard.run.prepare.smollm2 import smollm2_folder

TOP = Path(__file__).resolve().parents[2]
# In one process: the imports of torch and transformers take most of the time.
CONVERT = table("gguf_llama")["convert"]


def make_model(folder: Path) -> Path:
    make_tiny([Sample(pieces=[("The sea is blue. " * 20, True)])], folder, 1)
    return folder


def make_adapter(base: Path, folder: Path, **settings: Any) -> Path:
    """Write an adapter of two ranks for the query projections and the head."""
    folder.mkdir()
    rng, tensors = np.random.default_rng(1), {}
    parts = {f"model.layers.{n}.self_attn.q_proj": (192, 8 if n else 4) for n in range(4)} | {"lm_head": (4096, 4)}
    for part, (rows, rank) in parts.items():
        name = f"base_model.model.{part}"
        tensors[f"{name}.lora_A.weight"] = rng.standard_normal((rank, 192)).astype(np.float32) / 8
        tensors[f"{name}.lora_B.weight"] = rng.standard_normal((rows, rank)).astype(np.float32) / 8
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 6, "bias": "none"}
    ranks = {f"layers.{n}.self_attn.q_proj": 8 for n in (1, 2, 3)}
    config |= {"target_modules": ["q_proj", "lm_head"], "rank_pattern": ranks}
    (folder / "adapter_config.json").write_text(json.dumps(config | settings))
    for file in base.glob("tokenizer*"):
        shutil.copy(file, folder)
    return folder


def read(path: Path) -> tuple[dict[str, tuple[Any, ...]], dict[str, Any]]:
    """Return the tensors, and the fields but those of the model card."""
    reader = gguf.GGUFReader(path)
    tensors = {t.name: (t.tensor_type, tuple(t.shape), t.data.tobytes()) for t in reader.tensors}
    fields = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    for name in ("name", "size_label", "tags", "version", "basename"):
        fields.pop(f"general.{name}", None)
    return tensors, fields


def rounded_and_tied(folder: Path) -> None:
    """Change a model: weights in bfloat16, one matrix for embedding and head, fewer tokens than rows, other fields."""
    weights = load_file(folder / "model.safetensors")
    del weights["lm_head.weight"]
    import torch
    from safetensors.torch import save_file as save_torch

    rounded = {name: torch.from_numpy(value).to(torch.bfloat16) for name, value in weights.items()}
    save_torch(rounded, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    del config["head_dim"], config["rope_theta"]
    config |= {"tie_word_embeddings": True, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
    (folder / "config.json").write_text(json.dumps(config))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "chat_template.jinja").write_text(settings.pop("chat_template"))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"add_prefix_space": False}))


@pytest.mark.slow
def test_equals_llama_cpps_converter(tmp_path: Path) -> None:
    try:
        folder = converter.converter_folder()
    except UserError as error:
        pytest.skip(str(error))
    plain, other = make_model(tmp_path / "plain"), make_model(tmp_path / "other")
    rounded_and_tied(other)
    adapter, merged = make_adapter(plain, tmp_path / "adapter"), tmp_path / "merged"
    mine = {"plain": (plain, plain, None, "f16"), "other": (other, other, None, "q8_0")}
    mine["merged"] = (plain, adapter, adapter, "f16")
    for name, arguments in mine.items():
        write_llama(*arguments[:3], tmp_path / f"{name}-mine.gguf", arguments[3])
    models = [(str(tmp_path / name), str(tmp_path / f"{name}.gguf"), mine[name][3]) for name in mine]
    words = {"adapter": [str(plain), str(adapter), str(merged)], "models": models}
    command = [sys.executable, "-P", "-c", CONVERT, str(folder), json.dumps(words)]
    subprocess.run(command, check=True, capture_output=True, env={"PYTHONPATH": str(TOP), "HF_HUB_OFFLINE": "1"})
    for name in mine:
        (tensors, fields), (expected, known) = read(tmp_path / f"{name}-mine.gguf"), read(tmp_path / f"{name}.gguf")
        assert fields == known, name
        if name != "merged":
            assert tensors == expected, name
            continue
        assert {key: value[:2] for key, value in tensors.items()} == {key: value[:2] for key, value in expected.items()}
        changed = [key for key in tensors if tensors[key] != expected[key]]
        assert all("attn_q" in key or key == "output.weight" for key in changed)
        for key in ("output.weight", *(f"blk.{n}.attn_q.weight" for n in range(4))):  # torch adds in another order
            one, two = (np.frombuffer(each[key][2], np.float16).astype(np.float32) for each in (tensors, expected))
            assert np.abs(one - two).max() < 2e-3 * np.abs(two).max()


@pytest.mark.slow
@pytest.mark.long
def test_the_file_of_smollm2_equals_that_of_the_converter(tmp_path: Path) -> None:
    try:
        model, folder = smollm2_folder(TOP / ".trainyard", print), converter.converter_folder()
    except UserError as error:
        pytest.skip(str(error))
    write_llama(model, model, None, tmp_path / "mine.gguf", "f16")
    words = {"adapter": None, "models": [(str(model), str(tmp_path / "converted.gguf"), "f16")]}
    command = [sys.executable, "-P", "-c", CONVERT, str(folder), json.dumps(words)]
    subprocess.run(command, check=True, capture_output=True, env={"PYTHONPATH": str(TOP), "HF_HUB_OFFLINE": "1"})
    mine, converted = read(tmp_path / "mine.gguf"), read(tmp_path / "converted.gguf")
    assert mine == converted
    assert mine[1]["tokenizer.ggml.pre"] == "smollm" and mine[1]["tokenizer.ggml.add_bos_token"] is False


def edit(name: str, **values: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / name
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return change


def without_a_tensor(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, folder / "model.safetensors")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        *((edit(file, **change), reason) for file, change, reason in table("gguf_llama")["left_to_the_converter"]),
        (lambda folder: (folder / "tokenizer.json").write_text("["), "tokenizer.json"),
        (lambda folder: (folder / "tokenizer.model").touch(), "not a plain byte-level one"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"x"), "Error while deserializing"),
        (without_a_tensor, "its tensors are not those of config.json"),
    ],
)  # fmt: skip
def test_other_models_are_left_to_the_converter(
    model: Path, change: Callable[[Path], None], reason: str, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(model, folder)
    change(folder)
    with pytest.raises(UnsupportedModelError, match=reason):
        write_llama(folder, folder, None, tmp_path / "model.gguf", "f16")


def test_other_adapters_are_left_to_peft(model: Path, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="use_dora"):
        adapter = make_adapter(model, tmp_path / "dora", use_dora=True)
        write_llama(model, adapter, adapter, tmp_path / "model.gguf", "f16")
    huge = make_adapter(model, tmp_path / "huge", lora_alpha=1e40)
    with np.errstate(over="ignore", invalid="ignore"), pytest.raises(UnsupportedModelError, match="not finite"):
        write_llama(model, huge, huge, tmp_path / "model.gguf", "f16")


def test_torch_is_not_imported(model: Path, tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; import trainer.launch.gguf_export; from trainer.gguf.llama import write_llama; "
        "path = Path(sys.argv[1]); write_llama(path, path, None, Path(sys.argv[2]), 'f16'); "
        "print({'torch', 'transformers', 'peft', 'pydantic'} & set(sys.modules))"
    )
    words = [sys.executable, "-P", "-c", program, str(model), str(tmp_path / "model.gguf")]
    done = subprocess.run(words, check=True, capture_output=True, text=True, env={"PYTHONPATH": str(TOP)})
    assert done.stdout == "set()\n"
