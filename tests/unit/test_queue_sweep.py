"""Sweeps: the grid, and the names of the runs."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from tables import table

from trainer.common.errors import UserError
from trainyard.queue.request import is_run_name
from trainyard.queue.sweep import expand, read_sweep


def runs(text: str, **values: Any) -> list[dict[str, Any]]:
    return [run.values for run in expand(yaml.safe_load(text), values, "sweep.yml", "sweep")]


def test_a_grid_is_every_combination_with_its_values_in_the_name() -> None:
    found = runs("{model: tiny, grid: {lr: [1e-4, 3e-4], seed: [1, 2]}}", priority="low")
    assert [run["run"] for run in found] == [
        "sweep-lr1e-4-seed1",
        "sweep-lr1e-4-seed2",
        "sweep-lr3e-4-seed1",
        "sweep-lr3e-4-seed2",
    ]
    assert found[1] == {"model": "tiny", "priority": "low", "lr": "1e-4", "seed": 2, "run": "sweep-lr1e-4-seed2"}


def test_listed_runs_have_their_own_values_and_grids() -> None:
    text = """
        lora_r: 8
        runs:
          - run: first
          - {run: second, after: first, lora_r: 16}
          - {lr: 1.0, grid: {seed: [1, 2]}}
    """
    found = runs(text)
    assert [run["run"] for run in found] == ["first", "second", "sweep-3-seed1", "sweep-3-seed2"]
    assert [run["lora_r"] for run in found] == [8, 16, 8, 8] and found[1]["after"] == "first"


def test_another_name_of_a_field_is_that_field() -> None:
    assert runs("{run: a, per_device_train_batch_size: 4}", batch_size="2") == [{"run": "a", "batch_size": "2"}]
    common = "{per_device_train_batch_size: 4, runs: [{run: a, batch_size: 8}, {run: b}]}"
    assert runs(common) == [{"run": "a", "batch_size": 8}, {"run": "b", "per_device_train_batch_size": 4}]
    with pytest.raises(UserError, match="per_device_train_batch_size is in the file and given"):
        runs("{grid: {per_device_train_batch_size: [4, 8]}}", batch_size="2")


def test_every_run_of_a_grid_knows_its_name() -> None:
    text = f"""
        runs:
          - {{run: plain}}
          - {{run: base, grid: {{seed: [1, 2]}}}}
          - {{run: my grid!, grid: {{seed: [1]}}}}
          - {{grid: {{seed: [1]}}}}
          - {{run: {"a" * 70}, grid: {{seed: [1]}}}}
    """
    found = expand(yaml.safe_load(text), {}, "sweep.yml", "sweep")
    assert [run.grid for run in found] == ["", "base", "base", "my-grid", "sweep-4", ""]  # too long for a name
    (top, _) = expand({"grid": {"seed": [1, 2]}}, {}, "sweep.yml", "sweep")
    assert top.grid == "sweep"


def test_names_are_short_and_unique(tmp_path: Path) -> None:
    long = runs(f"{{grid: {{model: [{'a' * 80}, {'a' * 80}b]}}}}")
    assert len({run["run"] for run in long}) == 2 and all(len(run["run"]) <= 64 for run in long)
    same = runs("{grid: {model: [x/m, y/m]}}")  # paths whose last part is the same
    assert len({run["run"] for run in same}) == 2 and all(run["run"].startswith("sweep-modelm-") for run in same)
    (tmp_path / "s.yml").write_text("run: given\ngrid: {seed: [1]}\n")
    assert [run.values["run"] for run in read_sweep(tmp_path / "s.yml", {})] == ["given-seed1"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        *table("queue_sweep"),
        (f"{{grid: {{seed: {list(range(40))}, lr: {list(range(40))}}}}}", "more than 1000 runs"),
    ],
)
def test_mistakes_are_one_line(text: str, said: str) -> None:
    with pytest.raises(UserError) as caught:
        runs(text, **({"seed": 1} if "model: x" in text else {}))
    assert said in str(caught.value) and str(caught.value).startswith("sweep.yml: ")


def test_a_file_that_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "bad.yml").write_text("grid: {lr: [1\n")
    (tmp_path / "twice.yml").write_text("lr: 1\ngrid: {seed: [1, 2]}\nlr: 2\n")
    for name, said in (("bad.yml", "not YAML"), ("none.yml", "cannot read"), ("twice.yml", ":3: 'lr' is given twice")):
        with pytest.raises(UserError, match=rf"^file: .*{said}") as caught:
            read_sweep(tmp_path / name, {})
        assert "\n" not in str(caught.value)


VALUES = st.one_of(st.integers(), st.floats(allow_nan=False), st.booleans(), st.text(max_size=30), st.lists(st.text()))


@settings(max_examples=30, deadline=None)
@given(
    st.dictionaries(
        st.from_regex(r"[a-z_]{1,20}", fullmatch=True).filter(
            lambda name: name not in ("run", "after", "runs", "grid")
        ),
        st.lists(VALUES, min_size=1, max_size=4, unique_by=repr),
        max_size=4,
    ),
    st.text(max_size=80),
)
def test_every_grid_gives_unique_valid_names(grid: dict[str, list[Any]], stem: str) -> None:
    try:
        found = expand({"grid": grid}, {}, "s", stem)
    except UserError:  # values that are equal as JSON, such as [] and []
        return
    expected = 1
    for values in grid.values():
        expected *= len(values)
    names = [run.values["run"] for run in found]
    assert len(names) == len(set(names)) == expected and all(map(is_run_name, names))
    again = expand({"grid": grid}, {}, "s", stem)
    assert [run.values["run"] for run in again] == names  # adding a sweep again finds its runs
