"""A user's own configuration of DeepSpeed: read from a file, checked against the spec, and passed on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trainer.config import make_spec, read_spec
from trainer.errors import UserError
from trainer.strategy.deepspeed import engine_config, file_config
from trainyard.extra_vars import read_run_spec

TOP = Path(__file__).parents[3]
OWN: dict[str, Any] = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": "auto",
    "bf16": {"enabled": False},
    "zero_optimization": {"stage": 3, "reduce_bucket_size": 5000000, "stage3_max_live_parameters": 1000, "overlap_comm": True},
}  # fmt: skip


@pytest.fixture
def own(tmp_path: Path) -> Path:
    file = tmp_path / "ds_config.json"
    file.write_text(json.dumps(OWN))
    return file


def test_a_file_becomes_part_of_the_spec(own: Path) -> None:
    values = {"deepspeed": str(own), "deepspeed_stage": "3"}
    for spec in (read_spec(None, values, "the flags"), read_run_spec("", values, TOP)):
        assert spec.strategy == "deepspeed" and spec.deepspeed_config == OWN
        again = make_spec(spec.model_dump(mode="json"), "spec.yml")
        assert again == spec, "a host needs no file"


def test_options_of_the_file_reach_deepspeed(own: Path) -> None:
    spec = read_spec(None, {"deepspeed": str(own), "deepspeed_stage": 3}, "the flags")
    for config in (engine_config(spec, 10**7, 10**7), file_config(spec, 1)):
        zero = config["zero_optimization"]
        assert zero["reduce_bucket_size"] == zero["allgather_bucket_size"] == 5000000
        assert zero["stage3_max_live_parameters"] == 1000 and zero["overlap_comm"] is True and zero["stage"] == 3
    assert engine_config(spec, 10**7, 10**7)["gradient_accumulation_steps"] == 1


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"zero_optimization": {"stage": 2}}, "zero_optimization.stage is 2, but the run has 3: set deepspeed_stage"),
        (
            {"train_micro_batch_size_per_gpu": 1},
            "train_micro_batch_size_per_gpu is 1, but the run has 4: set batch_size",
        ),
        ({"optimizer": {"type": "Lamb"}}, "optimizer.type is 'Lamb', but the run has 'AdamW': set optimizer"),
        ({"optimizer": {"params": {"lr": 1}}}, "optimizer.params.lr is 1, but the run has"),
        ({"bf16": {"enabled": True}}, "bf16.enabled is True, but the run has False: set precision"),
        ({"fp16": {"enabled": True}}, "fp16.enabled is True, but the run has False: set precision"),
        ({"gradient_clipping": 0.5}, "gradient_clipping is 0.5, but the run has 1.0: set max_grad_norm"),
        ({"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}, "set deepspeed_offload"),
        ({"zero_optimization": {"offload_optimizer": {"device": "nvme", "nvme_path": "/x"}}}, "set deepspeed_offload"),
        ({"gradient_accumulation_steps": 4}, "gradient_accumulation_steps: the number of ranks determines it"),
        ({"scheduler": {"type": "WarmupLR"}}, "scheduler.type: the fields schedule and warmup define"),
        ({"tensorboard": {"enabled": True, "output_path": "/etc"}}, "tensorboard.enabled is not supported: remove it"),
        ({"zero_optimization": {"reduce_bucket_size": "5e8"}}, "expected an integer >= 0, got '5e8'"),
        ({"zero_optimization": {"overlap_comm": 1}}, "expected true or false, got 1"),
        ({"a": {"b": {"c": {"d": {"e": {"f": 1}}}}}}, "the mappings are too deep"),
    ],
    ids=lambda value: "" if isinstance(value, str) else json.dumps(value)[:40],
)
def test_options_that_differ_from_the_spec_are_refused_by_name(options: dict[str, Any], why: str) -> None:
    with pytest.raises(UserError, match="deepspeed_config: ") as caught:
        make_spec({"strategy": "deepspeed", "deepspeed_stage": 3, "deepspeed_config": options}, "here")
    assert why in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["[1]", "not json", "[" * 100000, None])
def test_a_file_that_is_no_configuration(text: str | None, tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(UserError, match=r"deepspeed: (.* is not JSON|cannot read .*|.*expected an object)"):
        read_spec(None, {"deepspeed": str(file)}, "the flags")


def test_a_spec_of_a_host_reads_no_file(own: Path) -> None:
    for name in ("deepspeed", "deepspeed_config"):
        with pytest.raises(UserError):
            make_spec({name: str(own)}, "a host")


@pytest.mark.parametrize("name", ["sharding_strategy", "fsdp_sharding_strategy", "fsdp"])
def test_the_words_of_fsdp(name: str) -> None:
    found = {
        word: make_spec({name: word}, "here") for word in ("FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "NO_SHARD")
    }
    assert [(spec.strategy, spec.fsdp_shard) for spec in found.values()] == [
        ("fsdp", "all"), ("fsdp", "gradients"), ("fsdp", "host"), ("ddp", "all"),
    ]  # fmt: skip
