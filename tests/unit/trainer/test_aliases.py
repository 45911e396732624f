"""Command lines and files of other tools: every name is understood or refused with one true line."""

import contextlib
import itertools
import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
import yaml
from ansible.vars.reserved import get_reserved_names
from tables import table

from trainer.common.errors import UserError
from trainer.config import ALIASES, FIELDS, SUGGESTED, is_known, parse_flags, parse_mapping
from trainer.config.aliases import ACCUMULATION, resolve_aliases, takes_no_value
from trainer.config.fields import is_off, metadata
from trainer.config.methods import METHODS
from trainer.config.run_spec import RunSpec
from trainer.config.strategies import STRATEGIES
from trainer.spec import make_spec, read_spec
from trainyard.cli.command_flags import parse
from trainyard.commands.groups import SPEC
from trainyard.extra_vars import known_variables, read_run_spec
from trainyard.run.launch_options import OPTIONS, make_options

TOP = Path(__file__).resolve().parents[3]


def spec_of(line: str, ranks: int | None = None) -> tuple[dict[str, Any], list[str]]:
    """Return the fields that a command line changes, and its notes."""
    notes: list[str] = []
    spec = read_spec(None, parse_flags(shlex.split(line)), "the flags", ranks=ranks, report=notes.append)
    changed = {name: value for name, value in spec if value != getattr(make_spec({}, ""), name)}
    changed.pop("automatic", None)  # the fields that the line does not set
    return changed, notes


def test_no_name_is_a_variable_of_ansible_or_of_the_project() -> None:
    assert not {*ALIASES} & get_reserved_names()
    assert not {*ALIASES} & known_variables(TOP)


def test_every_name_sets_fields_that_exist() -> None:
    for name, alias in ALIASES.items():
        assert alias.field in FIELDS, name
        for fields in alias.words.values():
            assert make_spec(fields, "").model_fields_set >= set(fields), name


def test_torchrun_passes_every_name_but_run() -> None:
    """torchrun's parser refuses an argument of the program that abbreviates several of its own options."""
    from torch.distributed.run import parse_args

    def passes(name: str) -> bool:
        try:
            return parse_args(["-m", "trainer", f"--{name}", "x"]).training_script_args == [f"--{name}", "x"]
        except SystemExit:
            return False

    names = [*FIELDS, *ALIASES]
    refused = {name for each in names for name in (each, each.replace("_", "-")) if not passes(name)}
    assert refused <= {"run"} and passes("run-name")


# Command lines and files ------------------------------------------------------------------------------------------------


def test_the_command_lines_of_the_guides() -> None:
    changed, notes = spec_of(
        "--per-device-train-batch-size 8 --total-batch-size 64 --lr 1e-2 --path-model org/llama --metric-logger-type dummy "
        "--no-torch-compile --fake-data --max-steps 5 --hv.local-steps 2 --hv.outer-lr 0.5 --sharding-strategy FULL_SHARD"
    )
    assert changed.items() >= (table("aliases")["the_command_lines"] | {"loggers": ("none",)}).items()
    assert notes == ["options of OpenDiLoCo imply strategy=diloco"]
    assert read_spec(None, {"hv.outer_lr": 0.5, "strategy": "ddp"}, "-e").strategy == "ddp"
    assert resolve_aliases({"hv.outer_lr": 0.5}, {"strategy": "ddp"}) == ({"outer_lr": 0.5}, [])
    with pytest.raises(UserError, match=r"unknown name 'hv.world_rank' in the flags"):
        spec_of("--hv.local_steps 5 --hv.world-rank 0")
    flags = "--metric-logger-type wandb --precision fp16-mixed --zero_stage 3 --bf16=false --seq-length 512"
    changed, _ = spec_of(flags)
    assert changed == {"loggers": ("wandb",), "precision": "fp16-mixed", "deepspeed_stage": 3, "seq_length": 512}


def test_the_files_of_the_guides(tmp_path: Path) -> None:
    zero, fsdp, file = tmp_path / "ds.json", tmp_path / "fsdp.json", tmp_path / "config.yaml"
    zero.write_text('{"zero_optimization": {"stage": 3}, "zero_force_ds_cpu_optimizer": false}')
    fsdp.write_text(
        '{"fsdp_transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"], "fsdp_sharding_strategy": "SHARD_GRAD_OP", '
        '"fsdp_state_dict_type": "SHARDED_STATE_DICT", "fsdp_cuda_graphs": false, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP", '
        '"fsdp_sync_module_states": true, "fsdp_use_orig_params": false, "fsdp_backward_prefetch_policy": "BACKWARD_PRE", '
        '"fsdp_forward_prefetch": false, "fsdp_cpu_ram_efficient_loading": true, "fsdp_mixed_precision": "BFLOAT16"}'
    )
    file.write_text(
        f"distributed: {{use_deepspeed: true, deepspeed_config: {zero}, gradient_accumulation_steps: 16}}\n"
        "training: {gradient_checkpointing: true, mixed_precision: bf16}\nreport_to: tensorboard\n"
    )
    spec = read_spec(file, {}, "the flags", ranks=2)
    assert (spec.strategy, spec.deepspeed_stage, spec.gradient_accumulation) == ("deepspeed", 3, 32)
    assert (spec.gradient_checkpointing, spec.precision, spec.loggers) == (True, "bf16-mixed", ("tensorboard",))
    assert spec_of(f"--deepspeed {zero}")[0].items() >= {"strategy": "deepspeed", "deepspeed_stage": 3}.items()
    file.write_text(f"distributed: {{use_fsdp: true, fsdp_config: {fsdp}, use_deepspeed: false}}\n")
    notes: list[str] = []
    spec = read_spec(file, {"deepspeed_config": {"fp16": {"loss_scale": 3}}}, "the flags", report=notes.append)
    assert (spec.strategy, spec.fsdp_shard, spec.precision) == ("fsdp", "gradients", "bf16-mixed")
    assert [note.partition(": ")[0] for note in notes] == ["fsdp_config", "deepspeed_config"]
    assert "fsdp_state_dict_type, fsdp_auto_wrap_policy" in notes[0] and "use_orig" not in notes[0]
    assert notes[1] == "deepspeed_config: without effect here: fp16.loss_scale"
    (tmp_path / "group_vars/all").mkdir(parents=True)
    (tmp_path / "group_vars/all/mine.yml").write_text("max_restarts: 3\nlr: 0.1\n")
    assert read_run_spec("", {}, tmp_path, notes.append).lr != 0.1 and notes[2].startswith(
        "group_vars: without effect there: lr: give"
    )
    file.write_text("training: {lr: 1}\nlr: 2\n")
    with pytest.raises(UserError, match=r"run spec: lr is 1 and 2: remove one of them"):
        read_spec(file, {}, "the flags")


@pytest.mark.parametrize(("options", "message"), table("aliases")["options_of_fsdp_that_cannot_be_honoured"])
def test_options_of_fsdp_that_cannot_be_honoured(options: Any, message: str, tmp_path: Path) -> None:
    file = tmp_path / "fsdp.json"
    file.write_text(json.dumps(options))
    with pytest.raises(UserError, match=message):
        spec_of(f"--fsdp_config {file}")


EFFECTS = table("field_effects")


def another_value(name: str) -> Any:
    """Return a value that a field accepts, and that differs from its default and from off."""
    field = RunSpec.model_fields[name]
    for value in [*(get_args(field.annotation) if get_origin(field.annotation) is Literal else ()), *EFFECTS["values"]]:
        with contextlib.suppress(ValueError):
            found = getattr(RunSpec.model_validate({name: value}), name)
            if not (is_off(found) or found == field.default):
                return value
    raise AssertionError(f"no value of {name}")


@pytest.mark.slow
def test_a_field_without_effect_is_refused_with_every_method_and_strategy() -> None:
    only = {name: set(users) for names, users in EFFECTS["only_with"].items() for name in names.split()}
    given, tried = {name: another_value(name) for name in FIELDS.keys() - EFFECTS["not_tried"]}, 0
    choices = [*((each, "ddp") for each in STRATEGIES), ("diloco", "fsdp"), ("diloco", "pipeline")]
    for method, (strategy, replica) in itertools.product(METHODS, choices):
        base = {"model": "m", "dataset": "d.jsonl", "method": method, "strategy": strategy, "collective_timeout": 9e4}
        base |= {"replica_strategy": replica} if strategy == "diloco" else {}
        base |= {"reward": "exact"} if method == "grpo" else {}
        try:
            make_spec(base, "the test")
        except UserError:  # the method needs another strategy
            continue
        tried += 1
        for name, value in given.items():
            said, users = "", only.get(name)
            try:
                read_spec(None, base | {name: value}, "the test", strict=True)
            except UserError as error:
                said = str(error)
            used = users is None or not users.isdisjoint({method, strategy, replica if strategy == "diloco" else ""})
            right = f": {name} has no effect" not in said if used else said.startswith(f"run spec: {name}")
            assert right, (base, name, said)
    assert tried > 25


def test_a_field_that_only_some_methods_or_strategies_read_needs_them() -> None:
    """A field whose only readers, beside the plan of a run, are files of methods and strategies has an effect with these alone."""
    readers: dict[str, set[str]] = {name: set() for name in FIELDS}
    for path in (TOP / "trainer").rglob("*.py"):
        if path.parent.name not in ("config", "costs", "planner", "tools"):
            for name in set(re.findall(r"\.(\w+)\b", path.read_text())) & FIELDS.keys():
                readers[name].add(path.stem)
    for name, found in readers.items():
        if found and found <= {*METHODS, *STRATEGIES}:
            assert metadata(FIELDS[name])["needs"], f"{name}: only {found} read it: declare what it needs"


@pytest.mark.parametrize("source", ["flags", "file", "-e"])
@pytest.mark.parametrize(("fields", "unused"), table("aliases")["a_field_that_the_strategy_does_not_use_is_refused"])
def test_a_field_without_effect_is_refused(source: str, fields: dict[str, Any], unused: str, tmp_path: Path) -> None:
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
    with pytest.raises(UserError, match=r"unknown name 'base_model' in .*; `trainyard import` turns a file of"):
        read_run_spec(str(file), {}, TOP)
    file.write_text("lr: -1\n")
    with pytest.raises(UserError, match=r"lr: expected a number > 0 .*, got -1 \(.*\)$"):
        read_run_spec(str(file), {}, TOP)


def test_names_of_other_tools_as_extra_variables() -> None:
    given = {"per-device-train-batch-size": "2", "hv.local-steps": 7, "max-steps": 5}
    notes: list[str] = []
    spec = read_run_spec("", given | {"min_nodes": 2}, TOP, notes.append)
    assert (spec.batch_size, spec.local_steps, spec.max_steps) == (2, 7, 5)
    assert (spec.strategy, notes) == ("diloco", ["options of OpenDiLoCo imply strategy=diloco"])
    with pytest.raises(UserError, match=r"gradient_accumulation_steps in -e counts .* set total_batch_size to 4 x"):
        read_run_spec("", {"gradient_accumulation_steps": 4}, TOP)


@pytest.mark.parametrize(("name", "hint"), table("aliases")["a_name_of_another_tool_names_the_field"])
def test_a_name_of_another_tool_names_the_field(name: str, hint: str) -> None:
    with pytest.raises(UserError, match=re.escape(f"-e {name}: unknown name; {hint}")):
        read_run_spec("", {name: 1}, TOP)
    with pytest.raises(UserError, match=rf"unknown flag --{name}; {re.escape(hint).replace('mean .', 'mean --')[:12]}"):
        parse("train", [SPEC], "", [f"--{name}", "1"])


# Errors ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("line", "message"), table("aliases")["a_value_without_a_counterpart_is_one_line"])
def test_a_value_without_a_counterpart_is_one_line(line: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        spec_of(line)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_equal_values_of_two_names_are_no_conflict() -> None:
    assert make_spec({"batch_size": 2, "per_device_train_batch_size": "2"}, "").batch_size == 2


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
    for name in [*FIELDS, *ALIASES]:
        flag, _ = outcome(lambda name=name: read_spec(None, parse_flags([f"--{name}={word}"]), "flags"))
        text = f"{name}: {word}"
        spec, error = outcome(lambda text=text: read_spec(None, parse_mapping(text, "spec.yml"), "spec.yml"))
        assert spec == flag or "in quotes" in error, text


@pytest.mark.parametrize("text", ["run: no", "lora_targets: [no]", "columns: {prompt: yes}", "dataset: [{path: off}]"])
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
@pytest.mark.parametrize(("name", "field", "value"), table("aliases")["a_word_for_no"])
def test_every_option_with_a_word_for_no_takes_all_of_them(name: str, field: str, value: Any, word: str) -> None:
    for given in (word, False):
        found = getattr(read_spec(None, {name: given}, "-e"), field)
        assert (list(found) if field == "loggers" else found) == value


@pytest.mark.parametrize("value", [-1, "-1", -1.0])
@pytest.mark.parametrize(("names", "field", "all_of_them"), table("aliases")["minus_one_is_no_limit"])
def test_minus_one_is_no_limit(names: tuple[str, ...], field: str, all_of_them: int, value: Any) -> None:
    for name in names:
        spec = read_spec(None, {name: value}, "-e")
        assert getattr(spec, field) == all_of_them
        assert make_spec({"max_steps": -1}, "").digest() == make_spec({"max_steps": 0}, "").digest()
