"""The run spec: valid values, and a one-line error for each invalid value."""

import contextlib
import math
import re
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tables import table

from trainer.common.errors import UserError
from trainer.config import (
    ALIASES,
    FIELDS,
    MUTABLE,
    PRESETS,
    SUGGESTED,
    RunSpec,
    parse_flags,
    parse_mapping,
    read_yaml,
    suggest,
)
from trainer.config import table as fields_table
from trainer.config.fields import metadata, mismatch
from trainer.config.reward_source import RewardSource
from trainer.spec import changed_fields, make_spec, read_spec


def error_of(values: dict[Any, Any]) -> str:
    with pytest.raises(UserError) as caught:
        make_spec(values, "the flags")
    text = str(caught.value)
    assert text.startswith("run spec: ") and "\n" not in text
    return text


def field_strings() -> list[tuple[str, str, Any]]:
    """Return (name, the value as a string of -e, the parsed value) for every field."""
    known = table("config")["good_values"] | {"reward": ("mine.py:0.5", (RewardSource(use="mine.py", weight=0.5),))}
    words = []
    for name, field in FIELDS.items():
        kind = field.annotation
        if name in known:
            text, value = known[name]
            value = tuple(value) if isinstance(value, list) else value
        elif get_origin(kind) is Literal:
            value = next((option for option in reversed(get_args(kind)) if option != field.default), field.default)
            text = value
        elif kind is bool or bool in get_args(kind):
            text, value = ("false", False) if field.default else ("true", True)
        elif kind is int or int in get_args(kind):
            text, value = "9", 9
        else:
            text, value = "2.5e-1", 0.25
        words.append((name, text, value))
    return words


# Fields that others require.
REQUIRED: dict[str, dict[str, Any]] = table("config")["required"]


@pytest.mark.parametrize(("name", "text", "value"), field_strings(), ids=list(FIELDS))
def test_every_field_accepts_a_string(name: str, text: str, value: Any, tmp_path: Path) -> None:
    spec = make_spec({**REQUIRED.get(name, {}), name: text}, "-e")
    assert getattr(spec, name) == value
    assert make_spec({**REQUIRED.get(name, {}), name: value}, "-e") == spec
    file = tmp_path / "spec.yml"
    file.write_text(spec.to_yaml())
    assert read_spec(file, {}, "the flags") == spec
    assert read_spec(file, parse_flags([f"--{name.replace('_', '-')}={text}"]), "the flags") == spec


BAD: dict[str, list[Any]] = table("config")["bad_values"] | {
    "float": ["", "fast", -1, math.inf, "nan", None, [], True, "-inf"]
}


def invalid_values() -> list[tuple[str, Any]]:
    pairs = []
    for name, field in FIELDS.items():
        kind: Any = field.annotation
        if get_origin(kind) is Literal:
            values = BAD["literal"]
        elif get_origin(kind) is tuple:
            values = BAD["list"] if field.default else [7, None, {}]
        elif kind is str:
            values = BAD["str"]
        elif name == "dataset":
            values = table("config")["bad_datasets"]
        elif name == "columns":
            values = ["x", [], 7, None, True, {"prompt": ""}, "prompt=", {"prompt": ["a"]}]
        else:
            kind = bool if bool in get_args(kind) else kind  # a switch that also accepts auto
            values = BAD[getattr(kind, "__name__", "int") if kind in (bool, int, float) else "int"]
            if type(None) in get_args(kind):
                values = [value for value in values if value is not None]
        no_limit = metadata(field)["minus_one"] is not None
        pairs += [(name, value) for value in values if not (no_limit and value == -1)]
    return pairs


@pytest.mark.parametrize(("name", "value"), invalid_values())
def test_an_invalid_value_names_the_field_and_the_expected_values(name: str, value: Any) -> None:
    assert error_of({name: value}) == f"run spec: {name}: {mismatch(FIELDS[name], value)} (the flags)"


# One of each kind of description, and the limits that keep values printable.
@pytest.mark.parametrize(("name", "value", "words"), table("config")["description_of_the_expected_values"])
def test_description_of_the_expected_values(name: str, value: Any, words: str) -> None:
    assert error_of({name: value}) == f"run spec: {name}: expected {words}, got {value!r} (the flags)"


def test_several_invalid_values_are_reported_together() -> None:
    text = error_of({"lr": "x", "epochs": 0})
    assert "lr: expected a number" in text and "epochs: expected an integer" in text


@pytest.mark.parametrize(("name", "near"), [("batchsize", "batch_size"), ("Learning-Rate", "lr"), *SUGGESTED.items()])
def test_an_unknown_name_suggests_the_nearest_name(name: str, near: str) -> None:
    assert error_of({name: 1}) == f"run spec: unknown name {name!r} in the flags; did you mean {near!r}?"


def test_an_unknown_name_without_a_near_name_has_no_suggestion() -> None:
    assert error_of({"zzzzqq": 1}) == "run spec: unknown name 'zzzzqq' in the flags"
    assert suggest("master_prt", ["master_port"]) == "; did you mean 'master_port'?"


def test_aliases_are_unambiguous_and_not_fields() -> None:
    kinds = ("suggested_names", "deprecated_names")
    names = [other for field in FIELDS.values() for kind in kinds for other in metadata(field)[kind]]
    names += ALIASES
    assert not set(names) & set(FIELDS)
    assert len(names) == len(set(names))


@pytest.mark.parametrize(("values", "why"), table("config")["conflicting_fields"])
def test_conflicting_fields(values: dict[str, Any], why: str) -> None:
    assert why in error_of(values)


def test_rows_of_a_step() -> None:
    assert make_spec({"model": "m"}, "").rows_per_step == 32
    assert make_spec({"model": "m", "total_batch_size": 7}, "").rows_per_step == 7
    assert make_spec({"gradient_accumulation": 3, "batch_size": 5}, "").rows_per_step == 15, "overrides the preset"


def test_explicit_values_override_presets() -> None:
    tiny = make_spec({}, "")
    assert all(getattr(tiny, name) == value for name, value in PRESETS["tiny"].items())
    assert make_spec({"seq_length": 99}, "").seq_length == 99
    assert (tiny.dataset, tiny.epochs, tiny.max_steps) == ("observatory", 15, 40)
    for more in ({"dataset": "a.jsonl"}, {"epochs": 1}, {"script": "a.py"}, {"fake_data": True}, {"model": "smollm2"}):
        assert make_spec(more, "").max_steps == 0 and make_spec({**more, "max_steps": 3}, "").max_steps == 3
    assert make_spec({"model": "m"}, "").seq_length == FIELDS["seq_length"].default


def test_names_and_digests() -> None:
    spec = make_spec({}, "")
    assert re.fullmatch(r"tiny-[0-9a-f]{6}", spec.named().run)
    assert make_spec({"run": "x"}, "").named().run == "x"
    assert make_spec({"model": "org/Näme 1"}, "").named().run.startswith("N-me-1-")
    assert make_spec({"model": "/"}, "").named().run.startswith("run-")
    for name, text, _ in field_strings():
        without = make_spec(REQUIRED.get(name, {}), "").digest()
        same = make_spec({**REQUIRED.get(name, {}), name: text}, "").digest() == without
        alone = get_origin(FIELDS[name].annotation) is Literal and len(get_args(FIELDS[name].annotation)) == 1
        assert alone or same == (name in MUTABLE), name


@pytest.mark.parametrize("dataset", table("config")["several_datasets"], ids=["list", "text"])
def test_several_datasets(dataset: Any, tmp_path: Path) -> None:
    spec = make_spec({"dataset": dataset, "dataset_split": "test", "columns": {"prompt": "q"}}, "-e")
    assert [(s.path, s.weight, s.split, s.columns) for s in spec.sources] == [
        ("a.jsonl", 1.0, "test", {"prompt": "q"}),
        ("b.csv", 0.3, "test", {"prompt": "q"}),
    ]
    assert spec.dataset_name == "a.jsonl, b.csv"
    assert make_spec(spec.model_dump(mode="json"), "JSON") == spec
    assert parse_flags([f"--dataset={dataset}"]) == {"dataset": str(dataset)}
    moved = spec.with_dataset_paths(["/x", "/y"])
    assert [(s.path, s.weight) for s in moved.sources] == [("/x", 1.0), ("/y", 0.3)]
    assert make_spec({"dataset": "a"}, "").with_dataset_paths(["/x"]).dataset == "/x"


def test_a_dataset_may_have_columns_of_its_own() -> None:
    spec = make_spec({"dataset": {"path": "a", "columns": "text=body", "split": "dev"}, "columns": "text=all"}, "")
    (source,) = spec.sources
    assert (source.columns, source.split) == ({"text": "body"}, "dev")


@pytest.mark.parametrize(("dataset", "why"), table("config")["an_entry_of_the_datasets_has_known_names"])
def test_an_entry_of_the_datasets_has_known_names(dataset: Any, why: str) -> None:
    said = error_of({"dataset": dataset})
    assert why in said and said.count("dataset:") == 1


@pytest.mark.parametrize(("columns", "why"), table("config")["columns_map_names_of_a_shape"])
def test_columns_map_names_of_a_shape(columns: dict[str, str], why: str) -> None:
    assert why in error_of({"columns": columns})
    assert why.replace("columns: expected names of a shape", "dataset: expected a path") in error_of(
        {"dataset": {"path": "a", "columns": columns}}
    )


def test_fields_that_a_resumed_run_may_change() -> None:
    spec = make_spec({}, "")
    assert changed_fields(spec, spec) == []
    later = {name: text for name, text, _ in field_strings() if name in MUTABLE}
    required = {key: value for name in later for key, value in REQUIRED.get(name, {}).items()}
    assert changed_fields(make_spec(required, ""), make_spec(required | later, "")) == []
    later = changed_fields(spec, make_spec({"lr": 0.5, "seed": 3}, ""))
    assert later == ["lr: was 0.003, now 0.5", "seed: was 1, now 3"]


@pytest.mark.parametrize(
    ("text", "why"), [*table("config")["invalid_files"], ("a: " + "[" * 5000, "not YAML: nested too deeply")]
)
def test_an_invalid_file_is_named(text: str, why: str, tmp_path: Path) -> None:
    file = tmp_path / "spec.yml"
    file.write_bytes(text.encode("latin-1"))  # \xe9 is no UTF-8
    with pytest.raises(UserError) as caught:
        read_spec(file, {}, "the flags")
    assert str(file) in str(caught.value) and why in str(caught.value) and "\n" not in str(caught.value)


def test_files(tmp_path: Path) -> None:
    file = tmp_path / "spec.yml"
    file.write_text("")
    assert read_yaml(file) == {}
    file.write_text("run: '0123'\nmodel: '1.10'\nlr: 2.50e-1\nseed: 3\n")
    spec = read_spec(file, {"dataset_config": "010"}, "-e")
    assert (spec.run, spec.model, spec.lr, spec.seed, spec.dataset_config) == ("0123", "1.10", 0.25, 3, "010")
    file.write_text("lr: 1e-3\nrun: 7\nlora_targets: [a, b]\nepochs: 2\n")
    spec = read_spec(file, {"epochs": "3"}, "-e")
    assert (spec.lr, spec.run, spec.lora_targets, spec.epochs) == (1e-3, "7", ("a", "b"), 3)
    with pytest.raises(UserError, match=r"epochs: expected an integer >= 1 and <= 100000, got 'x' \(-e\)"):
        read_spec(file, {"epochs": "x"}, "-e")
    with pytest.raises(UserError, match=r"cannot read .*none.yml: No such file"):
        read_spec(tmp_path / "none.yml", {}, "-e")


@pytest.mark.parametrize(("argv", "values"), table("config")["flags"])
def test_flags(argv: list[str], values: dict[str, str]) -> None:
    assert parse_flags(argv) == values


@pytest.mark.parametrize(("argv", "why"), table("config")["invalid_flags"])
def test_invalid_flags(argv: list[str], why: str) -> None:
    with pytest.raises(UserError, match=re.escape(why)):
        parse_flags(argv)


def test_the_table_has_every_field() -> None:
    rows = fields_table().splitlines()[2:]
    assert [row.split("`")[1] for row in rows] == list(FIELDS)


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters()) | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
names = st.sampled_from(list(FIELDS)) | st.sampled_from(list(ALIASES)) | st.text(st.characters()) | st.integers()


@given(st.dictionaries(names, anything, max_size=5))
def test_any_mapping_is_a_spec_or_an_error(values: dict[Any, Any]) -> None:
    try:
        spec = make_spec(values, "fuzz")
    except UserError:
        return
    assert make_spec(spec.model_dump(mode="json"), "again") == spec
    assert make_spec(parse_mapping(spec.to_yaml(), "again"), "again") == spec
    assert RunSpec.model_validate(spec.model_dump()) == spec


@given(
    st.binary(max_size=200) | st.text().map(str.encode) | st.text("lr:run[]{}-?!&*\n\t 0129_xeb.'\"").map(str.encode)
)
def test_any_file_is_a_spec_or_a_one_line_error(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    file = tmp_path_factory.getbasetemp() / "fuzz.yml"
    file.write_bytes(data)
    try:
        spec = read_spec(file, {}, "fuzz")
    except UserError as error:
        assert "\n" not in str(error)
        return
    file.write_text(spec.to_yaml())
    assert read_spec(file, {}, "fuzz") == spec


@given(st.lists(st.text("-=nolrpackigemxsty ", max_size=12), max_size=5))
def test_any_flags_are_a_spec_or_an_error(argv: list[str]) -> None:
    with contextlib.suppress(UserError):
        make_spec(parse_flags(argv), "fuzz")
