"""Tokens that the tokenizer has and the embedding has not."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from trainer.data.token_ids import set_padding, usable_tokens
from trainer.models.model import load_tokenizer


def with_rows(model: Path, folder: Path, rows: int) -> Path:
    """Return a copy of a model whose embedding has only the first rows."""
    shutil.copytree(model, folder)
    tensors = load_file(folder / "model.safetensors")
    cut = {
        name: value[:rows].clone() if "embed_tokens" in name or "lm_head" in name else value
        for name, value in tensors.items()
    }
    save_file(cut, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": rows}))
    return folder


def test_padding_uses_an_id_of_the_embedding(model_folder: Path, tmp_path: Path) -> None:
    words = load_tokenizer(str(model_folder))
    assert (words.pad_token_id, usable_tokens(words, 10**6), usable_tokens(words, None)) == (2, len(words), len(words))
    words.add_special_tokens({"pad_token": "[PAD]"})
    outside = tmp_path / "outside"
    shutil.copytree(model_folder, outside)
    words.save_pretrained(outside)
    found = load_tokenizer(str(outside))
    assert found.pad_token_id == found.eos_token_id == 1 and usable_tokens(found, len(words) - 1) == len(found) - 1
    set_padding(found, 1)  # the end token is outside too
    assert found.pad_token_id == 0
    found.pad_token = found.eos_token = None
    set_padding(found, 1)
    assert found.pad_token_id is None


def test_a_run_with_a_smaller_embedding(here: Any, tmp_path: Path) -> None:
    rows = len(load_tokenizer(str(here.model)))
    whole, here.model = here.model, with_rows(here.model, tmp_path / "less", 40)
    assert here(max_steps=1) == 1
    assert (
        here.err.count("error: ") == 1 and "train.jsonl:1: has the token '" in here.err and "has 40 rows: " in here.err
    )
    assert here("fake", fake_data=True, max_steps=1, eval_split=0) == 0, here.err
    assert rows > 40 and whole != here.model
