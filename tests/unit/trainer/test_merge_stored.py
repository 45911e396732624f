"""An adapter that is merged into the files of a model tensor by tensor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from trainer.config import make_spec
from trainer.errors import UserError
from trainer.merge_stored import stored_merge


def gpt2_with_adapter(folder: Path, *targets: str) -> Any:
    """Write a GPT-2 and an adapter of these modules; return the model that peft merges."""
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

    torch.manual_seed(1)
    config = GPT2Config(n_layer=2, n_embd=32, n_head=4, vocab_size=300, n_positions=128)
    GPT2LMHeadModel(config).save_pretrained(folder / "base")
    adapted = get_peft_model(
        AutoModelForCausalLM.from_pretrained(folder / "base"),
        LoraConfig(r=4, lora_alpha=8, target_modules=list(targets), init_lora_weights=False),
    )
    adapted.save_pretrained(folder / "adapter")
    base = AutoModelForCausalLM.from_pretrained(folder / "base")
    merged: Any = PeftModel.from_pretrained(base, str(folder / "adapter"))
    return merged.merge_and_unload()


def test_layers_whose_weights_are_transposed(tmp_path: Path) -> None:
    expected = gpt2_with_adapter(tmp_path, "c_attn", "c_proj", "c_fc").state_dict()
    spec = make_spec({"model": str(tmp_path / "base"), "strategy": "pipeline", "seq_length": 64}, "here")
    found = dict(stored_merge(spec, tmp_path / "adapter")[1])
    assert expected.keys() - found.keys() == {"lm_head.weight"}, "the head is tied to the embedding"
    for name, value in found.items():
        assert_close(value, expected[name], msg=name)


def test_a_tied_head_is_refused(tmp_path: Path) -> None:
    gpt2_with_adapter(tmp_path, "c_attn", "lm_head")
    spec = make_spec({"model": str(tmp_path / "base"), "strategy": "pipeline", "seq_length": 64}, "here")
    with pytest.raises(UserError, match=r"^merge: lm_head shares its weights with the embedding: set merge=false"):
        stored_merge(spec, tmp_path / "adapter")
