"""Models of many architectures with random weights train, merge and reload with the default settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tables import table
from trainer_runs import Here, lines
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from trainer.costs.packing_forecast import KEEPS_APART, MIXES
from trainer.planner.measure import keeps_samples_apart
from trainer.spec import make_spec

# Names of dimensions in the configurations of transformers; a configuration takes those that it has.
SMALL: dict[str, Any] = table("architectures")["small"]
# Whether the samples of a packed row stay apart.
ARCHITECTURES = dict.fromkeys(sorted(KEEPS_APART), True) | dict.fromkeys(sorted(MIXES), False)


def random_model(kind: str, folder: Path, tokenizer: Path) -> Path:
    """Write a small model of an architecture with random weights, and the tokenizer in folder `tokenizer`."""
    words = AutoTokenizer.from_pretrained(tokenizer)
    default = AutoConfig.for_model(kind)
    sizes = {name: value for name, value in SMALL.items() if hasattr(default, name)}
    if "head_dim" in default.to_dict():
        sizes["head_dim"] = 8
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes, vocab_size=len(words)))
    model.save_pretrained(folder)
    words.save_pretrained(folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=() if kind in ("llama", "falcon", "mamba") else pytest.mark.long)
        for kind in ARCHITECTURES
    ],
)
def test_an_architecture_trains_merges_and_reloads(kind: str, here: Here, tmp_path: Path) -> None:
    here.model = random_model(kind, tmp_path / kind, here.model)
    assert here(max_steps=2, merge=True) == 0, here.err
    off = "packing: off, because this model mixes the samples of a packed row"
    assert (off in here.out) != ARCHITECTURES[kind] == here.result()["packing"]
    base = AutoModelForCausalLM.from_pretrained(here.model)
    merged = AutoModelForCausalLM.from_pretrained(here.run_dir() / "merged")
    changed = [name for name, value in base.named_parameters() if not torch.equal(value, merged.get_parameter(name))]
    assert changed, "the adapter is part of the merged model"
    ids = torch.arange(12)[None]
    assert torch.isfinite(merged(input_ids=ids).logits).all()


# The choice of `packing=auto` ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_model_that_mixes_samples_is_not_packed(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.models.packing_check.isolates_packed_samples", lambda *_: False)
    assert here(max_steps=1) == 0, here.err
    assert "packing: off" in here.out
    rows = [row for line in lines(here.run_dir() / "samples/rank0.jsonl") for row in line["rows"]]
    assert rows and all(len(row) == 1 for row in rows)
    assert here("refused", max_steps=1, packing=True) == 1
    assert "error: packing: this model mixes the samples of a packed row: set packing=auto or " in here.err


@pytest.mark.slow
def test_a_teacher_that_mixes_samples_decides_too(here: Here, tmp_path: Path) -> None:
    taught = {"teacher": random_model("opt", tmp_path / "opt", here.model), "distill_alpha": 0.5, "max_steps": 1}
    assert here("auto", **taught) == 0, here.err
    assert "packing: off, because the teacher mixes the samples of a packed row" in here.out
    rows = [row for line in lines(here.run_dir("auto") / "samples/rank0.jsonl") for row in line["rows"]]
    assert rows and all(len(row) == 1 for row in rows)
    assert here("strict", packing=True, **taught) == 1
    assert "error: packing: the teacher mixes the samples of a packed row: set packing=auto or " in here.err


@pytest.mark.parametrize("kind", ["llama", "opt", "falcon"])
def test_random_weights_suffice_for_the_plan(kind: str, tmp_path: Path, model_folder: Path) -> None:
    model = random_model(kind, tmp_path / kind, model_folder)
    spec = make_spec({"model": str(model), "precision": "bf16-mixed", "gradient_checkpointing": True}, "")
    assert keeps_samples_apart(spec) == ARCHITECTURES[kind]


@pytest.mark.parametrize("apart", [True, False])
def test_the_plan_says_whether_rows_are_packed(
    apart: bool, here: Here, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from trainer.__main__ import main

    monkeypatch.setattr("trainer.planner.measure.keeps_samples_apart", lambda _: apart)
    flags = [f"--model={here.model}", f"--dataset={here.dataset}", "--seq-length=64", f"--data-dir={here.folder}"]
    assert main(["plan", *flags]) == 0
    said = capsys.readouterr().out
    assert ("packing: off, because the model mixes the samples of a packed row" in said) != apart
    assert ("settings: rows packed (" in said) == apart
    assert main(["plan", "--no-measure", *flags]) == 0
    assert "settings: rows packed (" in capsys.readouterr().out
