"""Merging adapters and models: the exact mean of updates, what is saved, and votes."""

import io
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from peft import PeftModel, get_peft_model
from safetensors.torch import load_file
from trainer_runs import records, write_jsonl
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from trainer.common.errors import UserError
from trainer.models.model import lora_config
from trainer.offline import merge
from trainer.spec import make_spec

CHAT = [{"role": "user", "content": "What follows 3?"}]


@pytest.fixture(scope="module")
def runs(model_folder: Path, tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """Three finished runs with adapters of rank 4 whose updates are not zero."""
    top = tmp_path_factory.mktemp("runs")
    dataset = write_jsonl(top / "data.jsonl", records(40))
    found = []
    for number in range(3):
        spec = make_spec(
            {"model": str(model_folder), "dataset": str(dataset), "lora_r": 4, "lora_alpha": 8, "seq_length": 64},
            "test",
        )
        model = get_peft_model(AutoModelForCausalLM.from_pretrained(model_folder), lora_config(spec))
        torch.manual_seed(number)
        for name, weight in model.named_parameters():
            if "lora_" in name:
                torch.nn.init.normal_(weight, std=0.05)
        folder = top / f"run{number}"
        model.save_pretrained(folder / "adapter")
        tokenizer.save_pretrained(folder / "adapter")
        (folder / "spec.yml").write_text(spec.model_copy(update={"run": folder.name}).to_yaml())
        found.append({"run": folder.name, "folder": str(folder)})
    return found


def request(runs: list[dict[str, str]], target: Path, method: str = "cat", **more: Any) -> dict[str, Any]:
    values = {"parts": runs, "method": method, "weights": [], "density": 0.5, "target": str(target)}
    return values | more


def weights_of(model: Any) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def merged_weights(base: Path, adapter: Path) -> dict[str, torch.Tensor]:
    model = AutoModelForCausalLM.from_pretrained(base)
    return weights_of(PeftModel.from_pretrained(model, str(adapter)).merge_and_unload())


@pytest.mark.parametrize("weights", [[], [0.5, 0.3, 0.2]])
def test_cat_is_the_exact_mean_of_the_updates(
    runs: list[dict[str, str]], model_folder: Path, tmp_path: Path, weights: list[float]
) -> None:
    result = merge.merge(merge.read_request(request(runs, tmp_path / "merged", weights=weights)))
    base = weights_of(AutoModelForCausalLM.from_pretrained(model_folder))
    parts = [merged_weights(model_folder, Path(run["folder"]) / "adapter") for run in runs]
    together = merged_weights(model_folder, tmp_path / "merged/adapter")
    shares = weights or [1 / 3] * 3
    for name, start in base.items():
        mean = start + sum(share * (part[name] - start) for share, part in zip(shares, parts, strict=True))
        torch.testing.assert_close(together[name], mean, rtol=0, atol=1e-5)
    assert any(not torch.equal(parts[0][name], start) for name, start in base.items())
    assert result["rank"] == 12
    assert json.loads((tmp_path / "merged/result.json").read_text())["eval_loss"] == result["eval_loss"] > 0
    assert [part["run"] for part in result["parts"]] == ["run0", "run1", "run2"]
    assert len({result["base_loss"], result["eval_loss"], *(part["eval_loss"] for part in result["parts"])}) == 5


def test_weights_add_up_to_1(runs: list[dict[str, str]], tmp_path: Path) -> None:
    made = merge.read_request(request(runs[:2], tmp_path / "soup", "soup", weights=[1, 3]))
    assert (
        made.weights == merge.read_request(request(runs[:2], tmp_path / "cat", weights=[1, 3])).weights == [0.25, 0.75]
    )


def test_soup_equals_cat(runs: list[dict[str, str]], model_folder: Path, tmp_path: Path) -> None:
    """The mean of the full weights is the base with the mean of the updates."""
    soup = merge.merge(merge.read_request(request(runs, tmp_path / "soup", "soup")))
    cat = merge.merge(merge.read_request(request(runs, tmp_path / "cat")))
    assert soup["eval_loss"] == pytest.approx(cat["eval_loss"], rel=1e-4)
    one = weights_of(AutoModelForCausalLM.from_pretrained(tmp_path / "soup/model"))
    other = merged_weights(model_folder, tmp_path / "cat/adapter")
    for name, value in one.items():
        torch.testing.assert_close(value, other[name], rtol=0, atol=1e-5)


def test_adapters_of_tied_embeddings(runs: list[dict[str, str]], tokenizer: Any, tmp_path: Path) -> None:
    """The mean of full weights has a head of its own, and answers as the base with the mean of the updates."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(**sizes, vocab_size=len(tokenizer), max_position_embeddings=128, tie_word_embeddings=True)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "base")
    parts = []
    for number, targets in enumerate((("lm_head", "q_proj"), ("embed_tokens", "lm_head"), ("q_proj",))):
        spec = yaml.safe_load((Path(runs[0]["folder"]) / "spec.yml").read_text())
        changes = {"model": str(tmp_path / "base"), "lora_targets": targets, "run": f"tied{number}"}
        values = make_spec(spec | changes, "test")
        model = get_peft_model(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), lora_config(values))
        for name, weight in model.named_parameters():
            if "lora_" in name:
                torch.nn.init.normal_(weight, std=0.2)
        folder = tmp_path / f"tied{number}"
        model.save_pretrained(folder / "adapter", save_embedding_layers=False)
        tokenizer.save_pretrained(folder / "adapter")
        (folder / "spec.yml").write_text(values.to_yaml())
        parts.append({"run": folder.name, "folder": str(folder)})
    merge.merge(merge.read_request(request(parts, tmp_path / "soup", "soup")))
    soup = AutoModelForCausalLM.from_pretrained(tmp_path / "soup/model")
    assert not soup.config.tie_word_embeddings
    ids = torch.arange(12)[None]
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base").get_input_embeddings().weight
    delta = load_file(tmp_path / "tied1/adapter/adapter_model.safetensors")
    a, b = (delta[f"base_model.model.model.embed_tokens.lora_embedding_{side}"] for side in "AB")
    mean = base + 2 / 3 * (b @ a).T
    torch.testing.assert_close(soup.get_input_embeddings().weight, mean, rtol=0, atol=1e-5)
    same = parts[:1] * 2
    merge.merge(merge.read_request(request(same, tmp_path / "cat")))
    merge.merge(merge.read_request(request(same, tmp_path / "one", "soup")))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    adapted = PeftModel.from_pretrained(model, str(tmp_path / "cat/adapter"))
    one = AutoModelForCausalLM.from_pretrained(tmp_path / "one/model")
    torch.testing.assert_close(one(input_ids=ids).logits, adapted(input_ids=ids).logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize("method", ["linear", "ties", "dare_ties"])
def test_methods_of_peft(runs: list[dict[str, str]], tmp_path: Path, method: str) -> None:
    result = merge.merge(merge.read_request(request(runs, tmp_path / method, method)))
    assert result["rank"] == 4
    assert torch.isfinite(torch.tensor(result["eval_loss"]))


def test_vote(runs: list[dict[str, str]], tmp_path: Path) -> None:
    same = [runs[0], {**runs[0], "run": "twin"}, runs[1]]
    prompts = [CHAT, [{"role": "user", "content": "Why?"}]]
    result = merge.vote(merge.read_request(request(same, tmp_path / "vote", "vote", prompts=prompts, max_tokens=8)))
    assert result["answers"] == 2
    assert all(answer["votes"] >= 2 and answer["logprob"] < 0 for answer in result["first"])
    lines = (tmp_path / "vote/answers.jsonl").read_text().splitlines()
    assert json.loads(lines[0])["messages"][0] == CHAT[0]


def test_what_does_not_go_together(
    runs: list[dict[str, str]], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "other"
    config = json.loads((Path(runs[0]["folder"]) / "adapter/adapter_config.json").read_text())
    (other / "adapter").mkdir(parents=True)
    (other / "adapter/adapter_config.json").write_text(json.dumps(config | {"r": 8}))
    spec = yaml.safe_load((Path(runs[0]["folder"]) / "spec.yml").read_text())
    values = {}
    twin = shutil.copytree(spec["model"], tmp_path / "twin" / Path(spec["model"]).name)
    (twin / "config.json").write_text((twin / "config.json").read_text().replace("{", '{"note": 1,', 1))
    for change, method, message in (
        ({}, "linear", r"needs adapters of one rank, got \[4, 8\]"),
        ({"model": "/another"}, "cat", r"has another base model \(/another\)"),
        ({"model": str(twin)}, "cat", r"has another base model \(.*/twin/.*\) than run0"),
        ({"experts": True}, "cat", "cannot merge adapters of experts, which run other has: use method=soup"),
        ({"lora_r": 0}, "cat", "run other has no model"),
    ):
        experts = {"target_parameters": ["mlp.experts.down_proj"]} if change.pop("experts", False) else {}
        (other / "adapter/adapter_config.json").write_text(json.dumps(config | {"r": 8} | experts))
        (other / "spec.yml").write_text(yaml.safe_dump(spec | change))
        values = request([runs[0], {"run": "other", "folder": str(other)}], tmp_path / "merged", method)
        with pytest.raises(UserError, match=message):
            merge.read_request(values)
    monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps(values)))
    assert merge.main() == 1
    assert "has no model" in json.loads(capsys.readouterr().out)["error"]


def test_equal_parts_are_found(runs: list[dict[str, str]], tmp_path: Path) -> None:
    asked = merge.read_request(request([runs[0], runs[1], runs[0]], tmp_path / "merged"))
    assert merge.equal_parts(asked.parts) == [[0, 2]]
