"""The fields of the methods: which of them go together, names of TRL, and the costs that the planner expects."""

from pathlib import Path
from typing import Any

import pytest
from tables import table
from trainer_runs import write_jsonl

from trainer.common.errors import UserError
from trainer.config.methods import METHODS
from trainer.costs.cost import Layout, RowStats
from trainer.costs.packing_forecast import packing_text
from trainer.method import method_named, method_of
from trainer.model_files.model_shape import shape_of
from trainer.planner.recommend import Setting, Speed, options
from trainer.spec import make_spec, read_spec

PAIRS: dict[str, Any] = {"method": "dpo", "dataset": "pairs.jsonl"}


@pytest.mark.parametrize(("fields", "said"), table("preference_fields")["fields"], ids=lambda value: str(value)[:50])
def test_fields_that_exclude_each_other_are_one_line(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said) as error:
        make_spec(PAIRS | fields, "-e")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("method", "field", "value", "owner"), table("preference_fields")["a_field_of_another_method"])
def test_a_field_of_another_method_is_refused(method: str, field: str, value: Any, owner: str) -> None:
    given = {"method": method, "dataset": "pairs.jsonl", field: value}
    with pytest.raises(UserError, match=f"{field} has no effect with method={method}: set method={owner}, or omit"):
        read_spec(None, given, "the flags", strict=True)
    for right in owner.split(" or "):
        assert getattr(read_spec(None, given | {"method": right}, "the flags", strict=True), field) == value


def test_a_default_method_does_not_change_the_name_of_a_run() -> None:
    before = make_spec({}, "-e").digest()
    assert make_spec({"method": "sft", "preference_beta": 0.1}, "-e").digest() == before
    assert make_spec({"preference_beta": 0.2}, "-e").digest() != before


def test_the_reference_is_precomputed_without_an_adapter() -> None:
    for method, fields, wanted in table("preference_fields")["the_reference_is_precomputed"]:
        spec = make_spec({**PAIRS, "method": method, **fields}, "-e")
        assert method_of(spec).precomputes(spec) is wanted


def costs(**fields: Any) -> Any:
    spec = make_spec({"batch_size": 2, "total_batch_size": 8, "seq_length": 128, "packing": False, **fields}, "-e")
    shape, rows = shape_of(spec), RowStats.full(spec)
    speed = Speed.nominal(spec, shape, rows, "cpu")
    (option,) = options(spec, Setting(shape, Layout((1,)), rows, speed, 1000, gloo=True))
    return option


def test_a_pair_costs_two_rows_and_the_reference_a_pass() -> None:
    sft, twice = costs(), costs(batch_size=4, total_batch_size=16)
    plain, full = costs(**PAIRS, preference_precompute=True), costs(**PAIRS)
    assert plain.memory == twice.memory and plain.memory.activations == 2 * sft.memory.activations
    assert plain.compute_seconds == pytest.approx(2 * sft.compute_seconds, rel=0.01)
    assert full.compute_seconds == pytest.approx(1.5 * plain.compute_seconds, rel=0.01), "a forward pass is half"
    kto = costs(method="kto", dataset="labels.jsonl")
    assert kto.memory == sft.memory and kto.compute_seconds == pytest.approx(2.5 * sft.compute_seconds, rel=0.01)


def test_rows_are_not_packed() -> None:
    assert packing_text(make_spec(PAIRS, "-e")) == "not packed: a row has one sequence with method=dpo"
    assert [name for name, entry in METHODS.items() if entry.packs and entry.data == "answers"] == ["sft"]
    assert all(method_named(name) for name in METHODS)


def test_the_plan_measures_the_sequences_of_pairs(model_folder: Path, tmp_path: Path) -> None:
    from trainer.planner.plan_report import plan

    rows = [{"prompt": "the ", "chosen": "cat " * 9, "rejected": "dog " * count} for count in (3, 20)]
    file = write_jsonl(tmp_path / "pairs.jsonl", rows)
    spec = make_spec({"model": str(model_folder), "dataset": str(file), "method": "dpo", "batch_size": 1}, "-e")
    found = plan(spec, [{"host": "a", "processes": 1}], None, fast=False, data_dir=tmp_path)
    assert found["speed"]["measured"] and "packed" not in " ".join(found["settings"])
    tokens, places = found["rows"]["tokens"], found["rows"]["places"]
    assert 10 < tokens < places < 64, "a micro-batch has both sequences of a pair, padded to the longer one"
