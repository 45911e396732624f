"""Command lines and files of other tools: every name is understood or refused with one true line."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible.vars.reserved import get_reserved_names

from trainer.common.errors import UserError
from trainer.config import ALIASES, DEPRECATED, FIELDS, SUGGESTED, is_known, parse_flags, parse_mapping
from trainer.config.alias_table import ACCUMULATION, REFUSED
from trainer.config.aliases import resolve_aliases, takes_no_value
from trainer.spec import make_spec, read_spec
from trainyard.extra_vars import known_variables, read_run_spec
from trainyard.run.launch_options import OPTIONS, make_options

TOP = Path(__file__).resolve().parents[3]
OTHER = {*ALIASES, *REFUSED}


def spec_of(line: str, ranks: int | None = None) -> tuple[dict[str, Any], list[str]]:
    """Return the fields that a command line changes, and its notes."""
    notes: list[str] = []
    spec = read_spec(None, parse_flags(shlex.split(line)), "the flags", ranks=ranks, report=notes.append)
    changed = {name: value for name, value in spec if value != getattr(make_spec({}, ""), name)}
    changed.pop("automatic", None)  # the fields that the line does not set
    return changed, notes


def test_no_name_is_a_variable_of_ansible_or_of_the_project() -> None:
    assert not OTHER & get_reserved_names()
    assert not OTHER & known_variables(TOP)


def test_every_name_sets_fields_that_exist() -> None:
    for name, alias in ALIASES.items():
        assert alias.field in FIELDS, name
        for fields in (alias.words or {}).values():
            assert make_spec(fields, "").model_fields_set >= set(fields), name


def test_torchrun_passes_every_name_but_run() -> None:
    """torchrun's parser refuses an argument of the program that abbreviates several of its own options."""
    from torch.distributed.run import parse_args

    def passes(name: str) -> bool:
        try:
            return parse_args(["-m", "trainer", f"--{name}", "x"]).training_script_args == [f"--{name}", "x"]
        except SystemExit:
            return False

    names = [*FIELDS, *OTHER, *DEPRECATED]
    refused = {name for each in names for name in (each, each.replace("_", "-")) if not passes(name)}
    assert refused <= {"run"} and passes("run-name")


# Command lines and files ------------------------------------------------------------------------------------------------


def test_names_of_opendiloco() -> None:
    changed, notes = spec_of(
        "--per-device-train-batch-size 16 --total-batch-size 2048 --total-steps 88_000 --hv.local_steps 500 "
        "--path_model org/llama --warmup-steps 1000 --hv.averaging_timeout 1800 "
        "--metric-logger-type dummy --sharding-strategy FULL_SHARD --no-torch-compile"
    )
    expected = {
        "model": "org/llama",
        "batch_size": 16,
        "total_batch_size": 2048,
        "max_steps": 88_000,
        "local_steps": 500,
    }
    expected |= {"warmup": 1000.0, "collective_timeout": 1800.0, "loggers": ("none",)}
    expected |= {"strategy": "diloco", "replica_strategy": "fsdp"}
    assert changed.items() >= expected.items()
    assert "options of OpenDiLoCo imply strategy=diloco" in notes
    assert read_spec(None, {"hv.outer_lr": 0.5, "strategy": "ddp"}, "-e").strategy == "ddp"
    assert resolve_aliases({"hv.outer_lr": 0.5}, {"strategy": "ddp"}) == ({"outer_lr": 0.5}, [])
    with pytest.raises(UserError, match=r"unknown name 'hv.world_rank' in the flags"):
        spec_of("--hv.local_steps 5 --hv.world-rank 0")


def test_names_of_trl_and_transformers() -> None:
    changed, notes = spec_of(
        "--model_name_or_path Qwen/Qwen2-0.5B --dataset_name trl-lib/Capybara --learning_rate 2.0e-4 --num_train_epochs 3.0 "
        "--packing --per_device_train_batch_size 2 --gradient_accumulation_steps 8 --gradient_checkpointing "
        "--eval_strategy steps --eval_steps 50 --use_peft --lora_r 32 --lora_alpha 16 --output_dir out/Qwen2-SFT "
        "--save_steps 100 --bf16 True --fp16 False --max_seq_length 512 --report_to none "
        "--lora_target_modules q_proj v_proj --optim adamw_torch --lr_scheduler_type constant_with_warmup "
        "--warmup_ratio 0.1 --attn_implementation sdpa --seed 42 --save_total_limit 3 --load_in_4bit",
        ranks=2,
    )
    expected = {
        "run": "Qwen2-SFT",
        "model": "Qwen/Qwen2-0.5B",
        "dataset": "trl-lib/Capybara",
        "epochs": 3,
        "packing": True,
    }
    expected |= {"batch_size": 2, "gradient_accumulation": 16, "total_batch_size": None, "seq_length": 512, "lr": 2e-4}
    expected |= {
        "schedule": "constant",
        "warmup": 0.1,
        "lora_r": 32,
        "lora_alpha": 16.0,
        "lora_targets": ("q_proj", "v_proj"),
    }
    expected |= {
        "quantize": "nf4",
        "precision": "bf16-mixed",
        "kernels": "torch",
        "gradient_checkpointing": True,
        "seed": 42,
    }
    expected |= {"eval_interval": 50, "checkpoint_interval": 100, "checkpoint_keep": 3, "loggers": ("none",)}
    assert changed == expected
    assert "bf16=True is understood as precision=bf16-mixed: trained weights stay in float32" in notes
    assert not any(line.startswith(("fp16", "learning_rate", "lora_target")) for line in notes), (
        "they change no meaning"
    )


def test_a_file_of_a_trainer(tmp_path: Path) -> None:
    file = tmp_path / "run.yml"
    file.write_text(
        "model_name_or_path: m\nuse_peft: false\nmax_length: 2048\ntrust_remote_code: false\n"
        "ddp_timeout: 1800\nresume_from_checkpoint: null\nbf16: true\n"
    )
    spec = read_spec(file, {"bf16": "false"}, "-e")
    assert (spec.lora_r, spec.seq_length, spec.precision) == (0, 2048, "32-true")
    assert (spec.collective_timeout, spec.resume) == (1800.0, "auto")


# Extra variables ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "fields"),
    [
        ({"fsdp": "full_shard auto_wrap", "fsdp_config": {"fsdp_offload_params": False}}, {"strategy": "fsdp"}),
        ({"fsdp_sharding_strategy": "SHARD_GRAD_OP", "cpu_offload": {"offload_params": True}, "forward_prefetch": True},
         {"strategy": "fsdp", "fsdp_shard": "gradients", "fsdp_offload": True}),
        ({"mixed_precision": {"param_dtype": "torch.bfloat16", "reduce_dtype": "bfloat16"}, "activation_checkpointing": True},
         {"strategy": "fsdp", "precision": "bf16-mixed", "gradient_checkpointing": True}),
        ({"reshard_after_forward": False, "xla": False, "auto_wrap_policy": {"min_num_params": 1e8}},
         {"strategy": "fsdp", "fsdp_shard": "gradients"}),
        ({"sharding_strategy": "NO_SHARD"}, {}),
        ({"min_num_params": 0, "xla": False, "xla_fsdp_v2": False}, {}),
    ],
)  # fmt: skip
def test_options_of_fsdp(options: dict[str, Any], fields: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "fsdp.json"
    file.write_text(json.dumps(options))
    changed, (note,) = spec_of(f"--fsdp_config {file}")
    assert changed == fields and "FSDP2 implies the other options" in note
    assert spec_of(f"--fsdp_config '{json.dumps(options)}'")[0] == fields


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"xla": True}, "options of FSDP without xla, which FSDP2 does not have"),
        ({"sharding_strategy": "FULL_SHARD", "reshard_after_forward": False}, "options of FSDP with one value of fsdp_shard"),
        ({"mixed_precision": {"param_dtype": "bfloat16", "reduce_dtype": "float32"}}, "one of no, fp32, float32, bf16"),
        (["x"], "is not JSON|expected an object|options of FSDP, or the path"),
    ],
)  # fmt: skip
def test_options_of_fsdp_that_cannot_be_honoured(options: Any, message: str, tmp_path: Path) -> None:
    file = tmp_path / "fsdp.json"
    file.write_text(json.dumps(options))
    with pytest.raises(UserError, match=message):
        spec_of(f"--fsdp_config {file}")


def test_sections_of_a_file(tmp_path: Path) -> None:
    file, zero = tmp_path / "run.yml", tmp_path / "ds.json"
    zero.write_text('{"zero_optimization": {"stage": 3}, "zero_force_ds_cpu_optimizer": false}')
    file.write_text(
        f"distributed: {{strategy: deepspeed, backend: nccl, num_nodes: 2, deepspeed_config: {zero}}}\n"
        "training: {num_train_epochs: 2, learning_rate: 1.0e-4}\n"
    )
    notes: list[str] = []
    spec = read_spec(file, {}, "the flags", report=notes.append)
    assert (spec.strategy, spec.deepspeed_stage, spec.epochs, spec.lr) == ("deepspeed", 3, 2, 1e-4)
    assert [note.partition("=")[0] for note in notes] == ["distributed.backend", "distributed.num_nodes"]
    file.write_text("training: {lr: 1}\nlr: 2\n")
    with pytest.raises(UserError, match=r"run spec: training\.lr is 1, and 2 elsewhere: remove one of them"):
        read_spec(file, {}, "the flags")


@pytest.mark.parametrize("source", ["flags", "file", "-e"])
@pytest.mark.parametrize(
    ("fields", "unused"),
    [
        ({"strategy": "pipeline", "deepspeed_stage": 2}, "deepspeed_stage has no effect with strategy=pipeline: set strategy=deepspeed"),
        ({"pipeline_layers": "2,2"}, "pipeline_layers has no effect with strategy=ddp"),
        ({"strategy": "fsdp", "replica_hosts": 2}, "replica_hosts has no effect with strategy=fsdp: set strategy=diloco"),
        ({"strategy": "diloco", "replica_strategy": "fsdp", "fsdp_shard": "gradients"}, ""),
        ({"strategy": "auto", "fsdp_shard": "host"}, ""),
        ({"strategy": "averaging", "replica_hosts": 2}, ""),
        ({"deepspeed_offload": "none", "fsdp_offload": False}, ""),
    ],
)  # fmt: skip
def test_a_field_that_the_strategy_does_not_use_is_refused(
    source: str, fields: dict[str, Any], unused: str, tmp_path: Path
) -> None:
    file = tmp_path / "spec.yml"
    file.write_text(yaml.safe_dump(fields))

    def read() -> None:
        if source == "-e":
            read_run_spec("", fields, TOP)
        elif source == "file":
            read_spec(file, {}, "x", strict=True)
        else:
            read_spec(None, {name: str(value) for name, value in fields.items()}, "the flags", strict=True)

    if unused:
        with pytest.raises(UserError, match=unused):
            read()
        file.write_text(make_spec(fields, "").to_yaml())  # of a run, which has all fields
        read_spec(file, {}, "x", strict=True)
    else:
        read()


def test_a_file_of_another_tool_is_for_the_import(tmp_path: Path) -> None:
    file = tmp_path / "run.yml"
    file.write_text("base_model: m\n")
    with pytest.raises(
        UserError, match=r"unknown name 'base_model' in .*; `trainyard import` turns a file of another tool"
    ):
        read_run_spec(str(file), {}, TOP)
    file.write_text("lr: -1\n")
    with pytest.raises(UserError, match=r"lr: expected a number > 0 .*, got -1 \(.*\)$"):
        read_run_spec(str(file), {}, TOP)


def test_names_of_other_tools_as_extra_variables() -> None:
    given = {"per-device-train-batch-size": "2", "learning_rate": "1e-3", "hv.local-steps": 7, "max-steps": 5}
    notes: list[str] = []
    spec = read_run_spec("", given | {"min_nodes": 2}, TOP, notes.append)
    assert (spec.batch_size, spec.lr, spec.local_steps, spec.max_steps) == (2, 1e-3, 7, 5)
    assert (spec.strategy, notes) == ("diloco", ["options of OpenDiLoCo imply strategy=diloco"])
    with pytest.raises(
        UserError, match=r"gradient_accumulation_steps in -e counts .* set total_batch_size to 4 x batch_size x"
    ):
        read_run_spec("", {"gradient_accumulation_steps": 4}, TOP)


# Errors ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--lr 1e-3 --learning_rate 1e-4", "lr and learning_rate set lr to different values in the flags: set only lr"),
        ("--bf16 --fp16", "bf16 and fp16 set precision to different values in the flags: set only precision"),
        ("--bf16 auto", "bf16: expected true or false, got 'auto' in the flags"),
        ("--resume_from_checkpoint out/step-5", "so set run= to the name of that run instead of a path"),
        ("--hv.all_reduce_strategy NO_WAIT", "hv.all_reduce_strategy: expected one of wait_for_all, got 'NO_WAIT'"),
        ("--load_in_8bit", "load_in_8bit in the flags: weights in 8 bits are not supported: set quantize=nf4"),
        ("--hv.local_step 5", "unknown name 'hv.local_step' in the flags; did you mean 'hv.local_steps'?"),
        ("--output_dir /", "output_dir: expected a path whose last part consists of letters"),
        ("--report_to comet_ml", "report_to: expected none, or some of tensorboard, wandb, trackio, mlflow"),
        ("--gradient_accumulation_steps -1", "gradient_accumulation_steps: expected an integer >= 1, got '-1'"),
        ("--gradient_accumulation_steps many", "gradient_accumulation_steps: expected an integer >= 1, got 'many'"),
    ],
)
def test_a_value_without_a_counterpart_is_one_line(line: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        spec_of(line)
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "train_on"),
    [
        ({"completion_only_loss": False}, "all"),
        ({"completion_only_loss": None, "assistant_only_loss": True}, "answer"),
        ({"completion_only_loss": True, "assistant_only_loss": False}, "answer"),
        ({"train_on": "all", "assistant_only_loss": False}, "all"),
        ({"assistant_only_loss": None}, None),
    ],
)
def test_what_contributes_to_the_loss_in_trl(given: dict[str, Any], train_on: str | None) -> None:
    assert resolve_aliases(given)[0].get("train_on") == train_on


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"assistant-only-loss": "no"}, "set train_on=all or train_on=answer in f.yml instead"),
        ({"assistant_only_loss": True, "completion_only_loss": False}, "set only train_on"),
        ({"quantize": "nf4", "load_in_4bit": False}, "set only quantize"),
    ],
)
def test_values_that_contradict_each_other_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        resolve_aliases(given, source="f.yml")
    assert message in str(caught.value)


def test_equal_values_of_two_names_are_no_conflict() -> None:
    assert make_spec({"lr": 1e-3, "learning_rate": "0.001"}, "").lr == 1e-3
    assert spec_of("--no-bf16 --fp16")[0]["precision"] == "fp16-mixed"
    assert "precision" not in spec_of("--no-load_in_8bit --bf16 false")[0]


def test_every_name_is_a_flag_and_a_variable() -> None:
    texts = {"run": "x", "lora_targets": "a", "precision": "bf16", "dataset": "d", "model": "m"}
    for name, alias in ALIASES.items():
        value = "true" if takes_no_value(name) else texts.get(alias.field, "0.5")
        for given in ({name: value}, {name.replace("_", "-"): value}):
            try:
                values, _ = resolve_aliases(given, ranks=2)
            except UserError as error:  # the value is not one of this name: the message says so
                assert str(error).startswith(f"run spec: {next(iter(given))}: expected "), error
                continue
            assert set(values) <= set(FIELDS), name
        assert is_known(name) and name not in SUGGESTED
    assert ACCUMULATION in ALIASES


# Words that YAML reads as booleans, and -1 ---------------------------------------------------------------------------------


def outcome(make: Callable[[], Any]) -> tuple[Any, str]:
    """Return what `make` returns, or None, and its error message."""
    try:
        return make(), ""
    except UserError as error:
        return None, str(error)


@pytest.mark.parametrize("word", ["no", "none", "on", "OFF"])
def test_a_word_means_the_same_in_yaml_and_in_a_flag(word: str) -> None:
    for name in [*FIELDS, *ALIASES, *DEPRECATED]:
        flag, _ = outcome(lambda name=name: read_spec(None, parse_flags([f"--{name}={word}"]), "flags"))
        text = f"{name}: {word}"
        spec, error = outcome(lambda text=text: read_spec(None, parse_mapping(text, "spec.yml"), "spec.yml"))
        assert spec == flag or "in quotes" in error, text


@pytest.mark.parametrize(
    "text", ["run: no", "lora_targets: [no]", "columns: {prompt: yes}", "dataset: [{path: off}]", "output_dir: no"]
)
def test_a_word_that_is_a_name_needs_quotes(text: str) -> None:
    with pytest.raises(UserError, match="write the word in quotes"):
        read_spec(None, parse_mapping(text, "spec.yml"), "spec.yml")


@pytest.mark.parametrize("word", ["no", "yes"])
def test_a_word_means_the_same_in_yaml_and_as_a_launch_option(word: str) -> None:
    for name in OPTIONS:
        said, _ = outcome(lambda name=name: make_options({name: word}))
        read, error = outcome(lambda name=name: make_options(parse_mapping(f"{name}: {word}", "hosts.yml")))
        assert read == said or "in quotes" in error or name == "run_env", name


@pytest.mark.parametrize("word", ["no", "off", "false", "none", "false "])
@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("eval_strategy", "eval_split", 0.0),
        ("mixed_precision", "precision", "32-true"),
        ("quantize", "quantize", "none"),
        ("deepspeed_offload", "deepspeed_offload", "none"),
        ("ddp_comm_hook", "gradient_comm_dtype", "32"),
        ("report_to", "loggers", ("none",)),
        ("loggers", "loggers", ("none",)),
        ("fsdp", "strategy", FIELDS["strategy"].default),
        ("deepspeed", "deepspeed_config", {}),
        ("save_strategy", "checkpoint_interval", 0),
    ],
)
def test_every_option_with_a_word_for_no_takes_all_of_them(name: str, field: str, value: Any, word: str) -> None:
    for given in (word, False):
        assert getattr(read_spec(None, {name: given}, "-e"), field) == value


@pytest.mark.parametrize("value", [-1, "-1", -1.0])
@pytest.mark.parametrize(
    ("names", "field", "all_of_them"),
    [
        (("max_steps", "total_steps", "max_train_steps"), "max_steps", 0),
        (("checkpoint_keep", "save_total_limit", "ckpt.topk"), "checkpoint_keep", 10**9),
        (("max_grad_norm", "gradient_clipping"), "max_grad_norm", 0),
    ],
)
def test_minus_one_is_no_limit(names: tuple[str, ...], field: str, all_of_them: int, value: Any) -> None:
    for name in names:
        spec = read_spec(None, {name: value}, "-e")
        assert getattr(spec, field) == all_of_them
        assert make_spec({"max_steps": -1}, "").digest() == make_spec({}, "").digest()
    assert read_spec(None, {"save_total_limit": 0}, "-e").checkpoint_keep == 10**9
