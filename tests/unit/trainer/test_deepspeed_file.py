"""A user's own configuration of DeepSpeed: read from a file, checked against the spec, and passed on."""

import json
from pathlib import Path
from typing import Any

import pytest
from tables import table

from trainer.common.errors import UserError
from trainer.spec import make_spec, read_spec
from trainer.strategy.deepspeed_config import engine_config, file_config
from trainyard.extra_vars import read_run_spec

TOP = Path(__file__).parents[3]
OWN: dict[str, Any] = table("deepspeed_file")["own"]


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
    table("deepspeed_options")["differ"],
    ids=lambda value: "" if isinstance(value, str) else json.dumps(value)[:40],
)
def test_options_that_differ_from_the_spec_are_refused_by_name(options: dict[str, Any], why: str) -> None:
    """The spec sets all fields."""
    fields = {"strategy": "deepspeed", "deepspeed_stage": 3, "warmup": 0, "total_batch_size": 16}
    explicit = make_spec(fields, "here").model_dump(mode="json")
    with pytest.raises(UserError, match="deepspeed_config: ") as caught:
        make_spec(explicit | {"deepspeed_config": options}, "here")
    assert why in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "fields"), table("deepspeed_options")["fields"], ids=lambda value: json.dumps(value)[:40]
)
def test_the_file_sets_what_the_spec_does_not(options: dict[str, Any], fields: dict[str, Any], tmp_path: Path) -> None:
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
    table("deepspeed_file")["values"],
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
