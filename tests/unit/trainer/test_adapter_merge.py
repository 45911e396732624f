"""A merged model answers as the base model with the adapter, in many architectures, with tied embeddings or without."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import Linear
from peft.tuners.lora.layer import ParamWrapper
from safetensors.torch import load_file
from tables import table
from torch.testing import assert_close
from transformers import AutoConfig, AutoModelForCausalLM

from trainer.common.errors import UserError
from trainer.loop import final_export
from trainer.models import adapter_merge
from trainer.models.model import load_model
from trainer.spec import make_spec

KINDS = (
    "bloom", "gemma2", "gemma3_text", "gpt2", "gpt_neox", "granite", "llama", "mistral", "olmo2", "phi3", "qwen2", "qwen3", "qwen3_moe",
)  # fmt: skip
# Names of dimensions in the configurations of transformers; a configuration takes those that it has.
SMALL: dict[str, Any] = table("adapter_merge")["small"]
IDS = torch.randint(96, (2, 12), generator=torch.Generator().manual_seed(3))


@pytest.fixture(autouse=True)
def no_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokenizer of a merged model has tests of its own."""
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", lambda *_, **_more: None)
    monkeypatch.setattr("trainer.models.tokenizer_output.save_tokenizer", lambda *_: None)
    monkeypatch.setattr("trainer.models.tokenizer_output.add_end_token", lambda *_: False)


def adapted(folder: Path, kind: str, tied: bool, targets: str = "layers,embed,head", **adapter: Any) -> Any:
    """Write a random model and an adapter of what `targets` names; return both together, as peft computes them."""
    default = AutoConfig.for_model(kind)
    sizes = {name: value for name, value in SMALL.items() if hasattr(default, name) or name == "head_dim"}
    torch.manual_seed(1)
    base = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(kind, **sizes, vocab_size=96, tie_word_embeddings=tied)
    ).eval()
    base.save_pretrained(folder / "base")
    ends = {"embed": base.get_input_embeddings(), "head": base.get_output_embeddings()}
    names = {what: name for name, module in base.named_modules() for what, end in ends.items() if module is end}
    linear = [name for name, module in base.named_modules() if type(module).__name__ in ("Linear", "Conv1D")]
    wanted = {what: [name] for what, name in names.items()}
    wanted["layers"] = [name for name in linear if name not in names.values()]
    chosen = [name for what in targets.split(",") for name in wanted[what]]
    config = LoraConfig(r=4, lora_alpha=8, target_modules=chosen, init_lora_weights=False, **adapter)
    model = get_peft_model(base, config).eval()
    for name, value in model.named_parameters():
        if "lora_" in name:
            value.data.mul_(0.3)
    model.save_pretrained(folder / "adapter", save_embedding_layers=False)
    return model


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS, use_cache=False).logits


def merged(folder: Path, **fields: Any) -> Any:
    """Merge as a run does; return the model as others load it."""
    spec = make_spec({"model": str(folder / "base"), "seq_length": 64, **fields}, "here")
    return AutoModelForCausalLM.from_pretrained(final_export.merge_adapter(spec, folder), dtype="auto").eval()


@pytest.mark.parametrize("kind", KINDS)
def test_merged_equals_base_with_adapter(kind: str, tmp_path: Path) -> None:
    for tied in (False, True):
        folder = tmp_path / str(tied)
        expected = logits(adapted(folder, kind, tied))
        found = merged(folder, precision="32-true")
        assert not found.config.tie_word_embeddings
        assert_close(logits(found), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("kind", "strategy"), [("llama", "pipeline"), ("gpt2", "auto")])
@pytest.mark.parametrize("targets", ["head", "embed", "layers", "layers,head"])
def test_each_side_of_tied_embeddings(
    targets: str, kind: str, strategy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(final_export, "EXPORT_PART", 5_000)  # several files
    expected = logits(adapted(tmp_path, kind, True, targets))
    found = merged(tmp_path, precision="32-true", strategy=strategy)
    assert found.config.tie_word_embeddings == (targets == "layers")
    names = [name for file in (tmp_path / "merged").glob("*.safetensors") for name in load_file(file)]
    assert len(names) == len(set(names)) and ("lm_head.weight" in names) == (targets != "layers")
    assert_close(logits(found), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("adapter", table("adapter_merge")["other_adapters"], ids=lambda adapter: next(iter(adapter)))
def test_other_adapters_of_peft(adapter: dict[str, Any], tmp_path: Path) -> None:
    model = adapted(tmp_path, "qwen2", True, "layers", **adapter)
    for name, value in model.named_parameters():
        if ("bias" in adapter and ".bias" in name) or "modules_to_save" in name:
            value.data.add_(0.1)
    model.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    assert_close(logits(merged(tmp_path, precision="32-true")), logits(model), rtol=0, atol=1e-5)


EXPERTS: dict[str, dict[str, Any]] = table("adapter_merge")["experts"]


def experts(folder: Path, kind: str) -> Any:
    """Write a random model with experts and an adapter of the default targets, as the trainer makes it; return both."""
    torch.manual_seed(1)
    sizes = SMALL | EXPERTS.get(kind, {})
    config = AutoConfig.for_model(kind, **sizes, vocab_size=96)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "base")
    spec = make_spec({"model": str(folder / "base"), "seq_length": 64, "lora_r": 4, "precision": "32-true"}, "here")
    model: Any = load_model(spec, torch.device("cpu")).eval()
    for name, value in model.named_parameters():
        if "lora_" in name:
            value.data.normal_(0, 0.1)
    model.save_pretrained(folder / "adapter", save_embedding_layers=False)
    return model


@pytest.mark.parametrize("kind", [*EXPERTS, "olmoe"])
def test_merged_experts_equal_base_with_adapter(kind: str, tmp_path: Path) -> None:
    model = experts(tmp_path, kind)
    changed = [layer.parameter_name for layer in model.modules() if hasattr(layer, "parameter_name")]
    assert {"gate_up_proj", "down_proj"} <= set(changed)
    assert_close(logits(merged(tmp_path, precision="32-true")), logits(model), rtol=0, atol=1e-5)
    merged(tmp_path, precision="bf16-mixed")  # compares itself
    spec = make_spec({"model": str(tmp_path / "base"), "seq_length": 64}, "here")
    in_memory = adapter_merge.merge_into_base(adapter_merge.adapted_model(spec, tmp_path / "adapter"))
    assert_close(logits(in_memory), logits(model), rtol=0, atol=1e-5)


def test_a_wrong_merge_of_experts_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    experts(tmp_path, "mixtral")
    right = ParamWrapper.get_delta_weight
    monkeypatch.setattr(ParamWrapper, "get_delta_weight", lambda layer, name: 1.01 * right(layer, name))
    with pytest.raises(UserError, match=r"^merge: a logit of the merged model differs"):
        merged(tmp_path, precision="32-true")


def test_sixteen_bits_are_rounded_once(tmp_path: Path) -> None:
    expected = (
        adapted(tmp_path, "llama", True, "layers,head")
        .merge_and_unload()
        .get_parameter("model.layers.0.mlp.up_proj.weight")
    )
    found = merged(tmp_path, precision="bf16-mixed")
    assert found.dtype == torch.bfloat16 and not found.config.tie_word_embeddings
    assert torch.equal(found.get_parameter("model.layers.0.mlp.up_proj.weight"), expected.to(torch.bfloat16))


# What goes wrong ----------------------------------------------------------------------------------------------------------


def wrong_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Linear.get_delta_weight
    monkeypatch.setattr(Linear, "get_delta_weight", lambda layer, name: 2 * right(layer, name))


def stays_tied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_merge, "untie", lambda *_: None)


def a_config_that_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_merge, "_declare_untied", lambda *_: None)


def also_another_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    right = adapter_merge.merged_weights

    def wrong(*words: Any) -> Iterator[tuple[str, torch.Tensor]]:
        for name, value in right(*words):
            yield name, value + 0.1 if name.endswith("norm.weight") else value

    monkeypatch.setattr(adapter_merge, "merged_weights", wrong)


def a_wrong_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_merge, "merge_layer", lambda layer, dtype: layer.merged_adapters.append("default"))


@pytest.mark.parametrize(("size", "precision"), [(1.0, "bf16-mixed"), (0.1, "32-true")])
@pytest.mark.parametrize("fault", [wrong_updates, stays_tied, a_config_that_lies, also_another_weight, a_wrong_file])
def test_wrong_merge(fault: Any, size: float, precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = adapted(tmp_path, "llama", True, "layers,head")
    for name, value in model.named_parameters():
        if "lora_B" in name:
            value.data.mul_(size)
    model.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    fault(monkeypatch)
    with pytest.raises(UserError, match=r"^merge: .* (differs from the base model with|tied, but they differ)"):
        merged(tmp_path, precision=precision)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "base"], "no merged model remains"


def test_a_wrong_merge_in_memory_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    adapted(tmp_path, "llama", True, "layers,head")
    spec = make_spec({"model": str(tmp_path / "base"), "seq_length": 64}, "here")
    stays_tied(monkeypatch)
    with pytest.raises(UserError, match=r"^merge: a logit of the merged model differs"):
        adapter_merge.merge_into_base(adapter_merge.adapted_model(spec, tmp_path / "adapter"))


def test_layers_that_share_a_weight_otherwise_are_refused(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **SMALL, vocab_size=96))
    model.model.layers[1].mlp.up_proj.weight = model.model.layers[0].mlp.up_proj.weight
    with pytest.raises(UserError, match=r"mlp\.up_proj\.weight share one weight, .*: set merge=false, or leave them"):
        adapter_merge.untie(model, [model.model.layers[0].mlp.up_proj])


def test_a_file_of_the_base_is_missing(tmp_path: Path) -> None:
    adapted(tmp_path, "llama", False, "layers")
    (tmp_path / "base/model.safetensors").rename(tmp_path / "base/model-1.safetensors")
    (tmp_path / "base/model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": "lost.safetensors"}}))
    with pytest.raises(UserError, match=r"^model: cannot load .*: "):
        merged(tmp_path, strategy="pipeline")
