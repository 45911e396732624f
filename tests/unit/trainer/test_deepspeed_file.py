"""A user's own configuration of DeepSpeed: read from a file, checked against the spec, and passed on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trainer.common.errors import UserError
from trainer.spec import make_spec, read_spec
from trainer.strategy.deepspeed_config import engine_config, file_config
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
        ({"optimizer": {"type": "Lamb"}}, "optimizer.type is 'Lamb', but the run has 'AdamW': set optimizer"),
        ({"bf16": {"enabled": True}}, "bf16.enabled is True, but the run has False: set precision"),
        ({"zero_optimization": {"offload_optimizer": {"device": "nvme", "nvme_path": "/x"}}}, "set deepspeed_offload"),
        ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps: expected an integer >= 1, got 0"),
        ({"scheduler": {"params": {"warmup_num_steps": 5}}}, "warmup_num_steps is 5, but the run has 0.0: set warmup"),
        ({"tensorboard": {"enabled": True, "output_path": "/etc"}}, "tensorboard.enabled is not supported: remove it"),
        ({"zero_optimization": {"reduce_bucket_size": 0.5}}, "expected an integer >= 0, got 0.5"),
        ({"zero_optimization": {"overlap_comm": 1}}, "expected true or false, got 1"),
        ({"a": {"b": {"c": {"d": {"e": {"f": 1}}}}}}, "the mappings are too deep"),
    ],
    ids=lambda value: "" if isinstance(value, str) else json.dumps(value)[:40],
)
def test_options_that_differ_from_the_spec_are_refused_by_name(options: dict[str, Any], why: str) -> None:
    """The spec sets all fields."""
    fields = {"strategy": "deepspeed", "deepspeed_stage": 3, "warmup": 0, "total_batch_size": 16}
    explicit = make_spec(fields, "here").model_dump(mode="json")
    with pytest.raises(UserError, match="deepspeed_config: ") as caught:
        make_spec(explicit | {"deepspeed_config": options}, "here")
    assert why in str(caught.value) and "\n" not in str(caught.value)


# https://huggingface.co/docs/transformers/deepspeed, ZeRO-3
TRANSFORMERS: dict[str, Any] = {
    "fp16": {
        "enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16, "hysteresis": 2,
        "min_loss_scale": 1,
    },
    "bf16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")},
    "scheduler": {
        "type": "WarmupLR",
        "params": dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "warmup_num_steps"), "auto"),
    },
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "cpu", "pin_memory": True},
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 1e9,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "steps_per_print": 2000,
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "wall_clock_breakdown": False,
}  # fmt: skip


@pytest.mark.parametrize(
    ("options", "fields"),
    [
        (TRANSFORMERS, {"deepspeed_stage": 3, "deepspeed_offload": "all", "schedule": "constant", "precision": "32-true"}),
        ({"train_micro_batch_size_per_gpu": 2, "train_batch_size": 64}, {"batch_size": 2, "rows_per_step": 64}),
        ({"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4}, {"rows_per_step": 2 * 4 * 3}),
        ({"gradient_clipping": 0.5, "bf16": {"enabled": True}}, {"max_grad_norm": 0.5, "precision": "bf16-mixed"}),
        ({"optimizer": {"type": "Adam", "params": {"lr": 1e-5, "weight_decay": 0.1}}}, {"lr": 1e-5, "weight_decay": 0.1}),
        ({"communication_data_type": "bfp16"}, {"comm_dtype": "bf16"}),
        ({"fp16": {"enabled": True, "loss_scale": 0}}, {"precision": "fp16-mixed"}),
        ({"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}, {"deepspeed_offload": "optimizer"}),
        (
            {"scheduler": {"type": "WarmupDecayLR", "params": {
                "warmup_num_steps": 10, "total_num_steps": 90, "warmup_max_lr": 0.001, "warmup_min_lr": 0,
            }}},
            {"schedule": "linear", "warmup": 10, "max_steps": 90, "lr": 0.001},
        ),
    ],
    ids=lambda value: json.dumps(value)[:40],
)  # fmt: skip
def test_the_file_sets_the_fields_that_the_spec_does_not(
    options: dict[str, Any], fields: dict[str, Any], tmp_path: Path
) -> None:
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(options))
    spec = read_spec(None, {"deepspeed": str(file)}, "the flags", ranks=3)
    assert {name: getattr(spec, name) for name in fields} == fields
    assert make_spec(spec.model_dump(mode="json"), "spec.yml") == spec


def test_floats_of_json_become_integers() -> None:
    zero = {"stage": 3, "reduce_bucket_size": 2e8, "sub_group_size": 1e9}
    spec = make_spec({"strategy": "deepspeed", "deepspeed_config": {"zero_optimization": zero}}, "here")
    written = file_config(spec, 1)["zero_optimization"]
    assert (written["reduce_bucket_size"], written["sub_group_size"]) == (200_000_000, 10**9)
    assert type(written["reduce_bucket_size"]) is int and engine_config(spec, 10, 10)["steps_per_print"] > 10**9


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"zero_optimization": {"stage": 0}}, "zero_optimization.stage: expected an integer >= 1 and <= 3, got 0"),
        ({"gradient_accumulation_steps": 4}, "set total_batch_size to 4 x batch_size x ranks"),
    ],
    ids=lambda value: "" if isinstance(value, str) else json.dumps(value)[:40],
)
def test_values_of_the_file_that_no_field_takes(options: dict[str, Any], why: str) -> None:
    with pytest.raises(UserError) as caught:
        make_spec({"strategy": "deepspeed", "deepspeed_config": options}, "here")
    assert why in str(caught.value) and "\n" not in str(caught.value)


def test_micro_batches_that_contradict_the_rows_of_a_step() -> None:
    fields = {"strategy": "deepspeed", "total_batch_size": 16, "deepspeed_config": {"gradient_accumulation_steps": 4}}
    spec = make_spec(fields, "here")
    assert file_config(spec, 1)["gradient_accumulation_steps"] == 4
    with pytest.raises(UserError, match="gradient_accumulation_steps is 4, but 16 rows of a step on 2 processes"):
        file_config(spec, 2)


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


def test_the_words_of_fsdp() -> None:
    found = {
        word: make_spec({"sharding_strategy": word}, "here")
        for word in ("FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "NO_SHARD")
    }
    assert [(spec.strategy, spec.fsdp_shard) for spec in found.values()] == [
        ("fsdp", "all"), ("fsdp", "gradients"), ("fsdp", "host"), ("ddp", "all"),
    ]  # fmt: skip
