"""strategy=pipeline on two hosts with the options of precision, memory and the result: the losses of ddp or of the defaults."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.testing import assert_close
from trainer_runs import Cluster, Here, losses

from trainer import final_export as export
from trainer.errors import UserError
from trainer.spec import make_spec

# Five rows in micro-batches of two: three micro-batches of different sizes.
STEPS: dict[str, Any] = {
    "total_batch_size": 5,
    "batch_size": 2,
    "max_steps": 8,
    "epochs": 100,
    "checkpoint_interval": 100,
}
PIPELINE = STEPS | {"strategy": "pipeline"}
FULL = {"lora_r": 0, "lr": 3e-3}


@pytest.mark.slow
@pytest.mark.parametrize("full", [{}, FULL], ids=["adapters", "full weights"])
def test_hidden_states_in_bfloat16_train_nearly_as_in_32_bits(
    full: dict[str, Any], cluster: Cluster, here: Here
) -> None:
    assert here("ddp", **STEPS, **full) == 0, here.err
    found = cluster.run(2, pipeline_comm_dtype="bf16", **PIPELINE, **full)
    expected = here.losses("ddp")
    assert found == pytest.approx(expected, rel=0.02)
    assert found != pytest.approx(expected, rel=1e-6), "the hidden states were rounded"


@pytest.mark.slow
@pytest.mark.parametrize("full", [{}, FULL], ids=["adapters", "full weights"])
def test_recomputed_activations_do_not_change_the_losses(full: dict[str, Any], cluster: Cluster, here: Here) -> None:
    assert here("ddp", **STEPS, **full) == 0, here.err
    found = cluster.run(2, gradient_checkpointing=True, **PIPELINE, **full)
    assert found == pytest.approx(here.losses("ddp"), abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("full", [{}, FULL], ids=["adapters", "full weights"])
def test_mixed_precision_trains_as_with_ddp(full: dict[str, Any], cluster: Cluster, here: Here) -> None:
    """Hidden states of a frozen bfloat16 model travel as they are; those of float32 weights are rounded by matrices only."""
    fields = full | {"precision": "bf16-mixed"}
    assert here("ddp", **STEPS, **fields) == 0, here.err
    found = cluster.run(2, **PIPELINE, **fields)
    assert found == pytest.approx(here.losses("ddp"), rel=0.01)
    assert losses(cluster.run_dir(1)) == found


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
    (model / "model.safetensors.index.json").write_text(f'{{"weight_map": {{{weights}}}}}')
    with pytest.raises(UserError, match=r"^merge: this host lacks weight files of .*: copy them to the first host"):
        export.merge_adapter(spec, cluster.run_dir())
    assert len(list((cluster.run_dir() / "merged").glob("*.safetensors"))) == len(parts), "the earlier result remains"
