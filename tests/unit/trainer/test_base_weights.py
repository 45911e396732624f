"""Base models whose files do not match their config.json, and adapter folders: every way to load a model refuses them by name."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, MllamaConfig, MllamaForConditionalGeneration

from trainer.common.errors import UserError
from trainer.config import RunSpec
from trainer.data.samples import read_samples
from trainer.distributed.world import World
from trainer.model_files.adapter_folder import refuse_adapter
from trainer.model_files.base_weights import load_causal_model
from trainer.model_files.model_shape import shape_of
from trainer.models.model import load_model
from trainer.spec import make_spec
from trainer.strategy.pipeline_stage import Division, load_stage
from trainyard.run.prepare.model_files import check_names, model_folder

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "vocab_size": 60, "pad_token_id": 0}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 60, "n_positions": 64, "bos_token_id": 0}
CPU = torch.device("cpu")
ALONE = World(0, 1, 0, 0, CPU)
DOWN = "model.layers.1.mlp.down_proj.weight"
Tensors = dict[str, torch.Tensor]


def saved(folder: Path, kind: str = "llama", change: Callable[[Tensors], object] = len, *, tied: bool = False) -> Path:
    """Write a small model whose tensors are changed afterwards."""
    torch.manual_seed(3)
    sizes = GPT2 if kind == "gpt2" else SIZES
    config = AutoConfig.for_model(kind, **sizes, tie_word_embeddings=tied)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    change(tensors := load_file(folder / "model.safetensors"))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def in_shards(folder: Path) -> Path:
    """Divide a model into two files, of which the index names the second one for all tensors of the last layer."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    places = {name: "b.safetensors" if ".layers.1." in name else "a.safetensors" for name in {*tensors, DOWN}}
    for file in ("a.safetensors", "b.safetensors"):
        part = {name: value for name, value in tensors.items() if places[name] == file}
        save_file(part, folder / file, metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return folder


def spec_of(folder: Path, **fields: str) -> RunSpec:
    return make_spec({"model": str(folder), "seq_length": 16} | fields, "here")


def refusals(folder: Path) -> set[str]:
    """Return the errors of the ways to load a model: there must be one."""
    found = set()
    pipeline = spec_of(folder, strategy="pipeline")
    for load in (
        lambda: load_causal_model(str(folder), dtype=torch.float32),
        lambda: load_model(spec_of(folder), CPU),
        lambda: load_model(spec_of(folder), CPU, sharded=True),
        lambda: load_stage(pipeline, Division((1, 1), 0), ALONE),  # also a stage that does not need the tensor
        lambda: load_stage(pipeline, Division((1, 1), 1), ALONE),
    ):
        with pytest.raises(UserError) as error:
            load()
        found.add(str(error.value))
    return found


def renamed(prefix: str) -> Callable[[Tensors], object]:
    def change(tensors: Tensors) -> None:
        for name in list(tensors):
            tensors[prefix + name] = tensors.pop(name)

    return change


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda tensors: tensors.pop(DOWN), f"the files lack {DOWN}: copy or download the model again"),
        (lambda tensors: tensors.update({DOWN: torch.zeros(32, 40)}), "has the shape [32, 40], expected [32, 48]: "),
        (lambda tensors: tensors.update({"v_head.bias": torch.zeros(1)}), "the model has no v_head.bias: "),
        (renamed("base_model.model."), " and 18 more; the model has no base_model.model.lm_head.weight, "),
    ],
    ids=["missing", "shape", "unexpected", "prefix"],
)
def test_tensors_that_differ_are_refused_by_name_on_every_way(
    change: Callable[[Tensors], object], why: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = saved(tmp_path / "model", change=change)
    (line,) = refusals(folder)
    assert line.startswith(f"model: the weights of {folder} do not match its config.json: ") and why in line
    assert "LOAD REPORT" not in caplog.text


def test_a_shard_that_lacks_a_tensor_of_the_index(tmp_path: Path) -> None:
    folder = in_shards(saved(tmp_path / "model", change=lambda tensors: tensors.pop(DOWN)))
    (line,) = refusals(folder)
    assert f"the files lack {DOWN}: " in line


def test_two_values_for_a_tied_weight(tmp_path: Path) -> None:
    def untie(tensors: Tensors) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1

    (line,) = refusals(saved(tmp_path / "model", change=untie, tied=True))
    assert "config.json ties lm_head.weight, and the files hold other values for it: " in line


def copy_head(tensors: Tensors) -> None:
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()


def older(tensors: Tensors) -> None:
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    tensors["model.position_ids"] = torch.ones(4)


def of_the_hub(tensors: Tensors) -> None:
    """Name the tensors as in the files of gpt2 on the hub."""
    for name in list(tensors):
        tensors[name.removeprefix("transformer.")] = tensors.pop(name)
    tensors["h.0.attn.bias"], tensors["h.0.attn.masked_bias"] = torch.ones(1, 1, 64, 64), torch.ones(())


@pytest.mark.parametrize(
    ("kind", "change"), [("llama", len), ("llama", copy_head), ("llama", older), ("gpt2", of_the_hub)]
)
def test_what_models_compute_is_no_difference(kind: str, change: Callable[[Tensors], object], tmp_path: Path) -> None:
    folder = saved(tmp_path / "model", kind, change, tied=True)
    spec = spec_of(folder, strategy="pipeline")
    assert load_model(spec_of(folder), CPU)
    assert load_stage(spec, Division((1, 1), 1), ALONE)


def test_the_language_model_of_a_model_for_images(tmp_path: Path) -> None:
    text = {**SIZES, "cross_attention_layers": [1], "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    vision = {"hidden_size": 32, "num_hidden_layers": 1, "num_global_layers": 1, "attention_heads": 4, "image_size": 28}
    vision |= {"vision_output_dim": 64, "intermediate_layers_indices": [0], "supported_aspect_ratios": [[1, 1]]}
    config = MllamaConfig(vision_config=vision | {"intermediate_size": 48}, text_config=text)
    MllamaForConditionalGeneration(config).save_pretrained(tmp_path)
    assert load_causal_model(str(tmp_path))
    save_file(
        (tensors := load_file(tmp_path / "model.safetensors")) | {"v_head.bias": torch.ones(1)},
        tmp_path / "model.safetensors",
    )
    with pytest.raises(UserError, match=r": the model has no v_head.bias: "):
        load_causal_model(str(tmp_path))
    assert any("vision_model" in name for name in tensors)


# Adapters -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("whole", [False, True], ids=["adapter", "adapter in the folder of a model"])
def test_an_adapter_as_a_model_is_refused_in_the_same_words(whole: bool, tmp_path: Path) -> None:
    folder = saved(tmp_path / "adapter") if whole else tmp_path / "adapter"
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "/base\x1b[31m", "r": 4}))
    lines = refusals(folder) if whole else set()  # without a config.json the others are not reached
    for load in (
        lambda: refuse_adapter(str(folder)),
        lambda: load_causal_model(str(folder)),
        lambda: shape_of(spec_of(folder)),
        lambda: model_folder(spec_of(folder), [], tmp_path, print),
    ):
        with pytest.raises(UserError) as error:
            load()
        lines.add(str(error.value))
    (line,) = lines
    assert line.startswith(f"model: {folder} holds an adapter of /base\\x1b[31m (adapter_config.json), and a run ")
    assert line.endswith("or set model=/base\\x1b[31m")
    with pytest.raises(UserError, match=r"^teacher: /m on the hosts holds an adapter .*, .* set teacher to"):
        check_names(["adapter_config.json", "adapter_model.safetensors"], "/m on the hosts", "remedy", "teacher")


def test_a_pointer_of_git_lfs_is_no_weights(tmp_path: Path) -> None:
    folder = saved(tmp_path / "model")
    (folder / "model.safetensors").write_text(
        f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 12345\n"
    )
    (line,) = refusals(folder)
    assert line.startswith(f"model: {folder}/model.safetensors is a pointer of Git LFS, not the file: run git lfs pull")
    pointer = (folder / "model.safetensors").rename(tmp_path / "data.csv")
    with pytest.raises(UserError, match=r"^dataset: .*data.csv is a pointer of Git LFS"):
        read_samples(pointer)


def test_an_adapter_in_the_cache_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository = tmp_path / "models--org--adapter"
    (repository / "snapshots/1").mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text("1")
    (repository / "snapshots/1/adapter_config.json").write_text('{"base_model_name_or_path": "org/base"}')
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(UserError, match=r"^model: org/adapter holds an adapter of org/base .* or set model=org/base$"):
        load_causal_model("org/adapter")
    refuse_adapter("org/base")
    (tmp_path / "adapter_config.json").write_text("[")
    with pytest.raises(UserError, match="or set model to its base model"):
        refuse_adapter(str(tmp_path))
