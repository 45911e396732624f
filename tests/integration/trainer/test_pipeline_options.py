"""strategy=pipeline on two hosts with the options of precision, memory and the result: the losses of ddp or of the defaults."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tables import table
from torch.testing import assert_close
from trainer_runs import Cluster, Here, losses

from trainer.common.errors import UserError
from trainer.loop import final_export as export
from trainer.spec import make_spec

# Five rows in micro-batches of two: three micro-batches of different sizes.
STEPS: dict[str, Any] = table("pipeline_options")["steps"]
PIPELINE = STEPS | {"strategy": "pipeline"}
FULL = {"lora_r": 0, "lr": 3e-3}


@pytest.mark.slow
@pytest.mark.parametrize("full", [{}, pytest.param(FULL, marks=pytest.mark.long)], ids=["adapters", "full weights"])
@pytest.mark.parametrize(
    ("fields", "close"),
    table("pipeline_options")["options_keep_the_losses_of_ddp"],
    ids=["rounded hidden states", "recomputed activations", "mixed precision"],
)
def test_options_keep_the_losses_of_ddp(
    fields: dict[str, Any], close: dict[str, float], full: dict[str, Any], cluster: Cluster, here: Here
) -> None:
    same = {name: value for name, value in fields.items() if name == "precision"}
    assert here("ddp", **STEPS, **full, **same) == 0, here.err
    found, expected = cluster.run(2, **PIPELINE, **full, **fields), here.losses("ddp")
    assert found == pytest.approx(expected, **close) and losses(cluster.run_dir(1)) == found
    if "comm_dtype" in fields:
        assert found != pytest.approx(expected, rel=1e-6), "the hidden states were rounded"


@pytest.mark.slow
def test_the_adapter_is_merged_into_the_files_of_the_model(
    cluster: Cluster, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first host merges tensor by tensor: the result is that of peft, in files of limited size, or a message if files are missing."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    cluster.run(2, merge=True, **PIPELINE)
    base = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    expected = PeftModel.from_pretrained(base, str(cluster.run_dir() / "adapter")).merge_and_unload().state_dict()
    merged = AutoModelForCausalLM.from_pretrained(cluster.run_dir() / "merged", dtype="auto")
    for name, value in merged.state_dict().items():
        assert_close(value, expected[name], msg=name)

    monkeypatch.setattr(export, "EXPORT_PART", 20_000)
    model = shutil.copytree(model_folder, cluster.folder / "copy")
    spec = make_spec({"model": str(model), "strategy": "pipeline", "seq_length": 64}, "here")
    parts = sorted(export.merge_adapter(spec, cluster.run_dir()).glob("*.safetensors"))
    assert len(parts) > 3
    found = {name: value for part in parts for name, value in load_file(part).items()}
    assert found.keys() == merged.state_dict().keys()
    for name, value in found.items():
        assert_close(value, expected[name], msg=name)

    (model / "model.safetensors").rename(model / "model-1.safetensors")
    weights = ", ".join(f'"{name}": "lost.safetensors"' for name in found)
    (model / "model.safetensors.index.json").write_text(f'{{"metadata": {{}}, "weight_map": {{{weights}}}}}')
    with pytest.raises(UserError, match=r"^model: cannot load .*lost.safetensors"):
        export.merge_adapter(spec, cluster.run_dir())
    assert len(list((cluster.run_dir() / "merged").glob("*.safetensors"))) == len(parts), "the earlier result remains"
