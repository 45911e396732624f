"""Runs on datasets of all formats and shapes, and on several datasets with weights."""

from __future__ import annotations

import json
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml
from dataset_folder import CASES, Case, write_cases
from trainer_runs import Cluster, Here, lines, records, until, write_jsonl

from trainer.__main__ import main as trainer_main
from trainer.data.corpus import select
from trainer.data.encode import encoded_dataset
from trainer.data.order import Order, held_out, training_samples
from trainer.models.model import load_tokenizer
from trainer.spec import make_spec
from trainyard.cli.__main__ import main as program

WITH_CALLS = ("tools.jsonl", "calls.jsonl", "calls.parquet")
READABLE = [case for case in CASES if isinstance(case.expect, int) and case.name not in WITH_CALLS]
MAPPED = [case for case in CASES if case.columns]
# One of each reader: the reading of all has tests of its own.
REFUSED = [case for case in CASES if case.name in ("number.jsonl", "null.csv", "null.parquet")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    pytest.importorskip("datasets")
    return write_cases(tmp_path_factory.mktemp("datasets"))


@pytest.mark.long
def test_a_run_on_every_readable_dataset_at_once(here: Here, folder: dict[str, Path]) -> None:
    listed: list[dict[str, Any]] = [{"path": str(folder[case.name])} for case in READABLE]
    listed += [{"path": str(folder[case.name]), "columns": case.columns} for case in MAPPED]
    assert here(dataset=json.dumps(listed), eval_split=0, train_on="all") == 0, here.err
    samples = sum(int(case.expect) for case in READABLE) + sum(case.samples for case in MAPPED)
    assert here.result()["samples"] == samples
    assert f"{samples} samples, " in here.out
    assert f"dataset {folder['sharegpt.jsonl']}: 2 samples x 1, {2 / samples:.0%} of an epoch" in here.out
    card = (Path(here.result()["adapter"]) / "README.md").read_text()
    assert "sharegpt.jsonl" in card and str(folder["sharegpt.jsonl"].parent) not in card


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case.name)
def test_a_run_on_any_other_dataset_ends_with_one_line(case: Case, here: Here, folder: dict[str, Path]) -> None:
    assert here(dataset=str(folder[case.name])) == 1
    (error,) = here.err.splitlines()
    assert error.startswith("error: ") and str(case.expect) in error and error.isprintable()


def test_tool_calls_need_a_template_that_has_them(here: Here, folder: dict[str, Path]) -> None:
    assert here(dataset=str(folder["tools.jsonl"])) == 1
    assert "leaves out the tool call (tool_calls) of message" in here.err


def mixture(folder: Path) -> str:
    first = write_jsonl(folder / "first.jsonl", records(40, 1))
    second = write_jsonl(folder / "second.jsonl", records(70, 2))
    return json.dumps([{"path": str(first), "weight": 1.5}, {"path": str(second), "weight": 0.3}])


def order_of(folder: Path, run_dir: Path) -> tuple[Order, Counter[int]]:
    """Return the order of a run and how often it uses each dataset, derived from its spec and its data alone."""
    spec = make_spec(yaml.safe_load((run_dir / "spec.yml").read_text()), "")
    corpus = encoded_dataset(spec, load_tokenizer(spec.model), folder / "other-store")
    train_set = select(corpus, training_samples(spec, len(corpus), held_out(spec, len(corpus), corpus.sources)))
    assert train_set.sources is not None
    order = Order.of(spec, train_set.lengths, train_set.sources)
    used = [sample for step in range(order.steps) for row in order.step(step) for sample in row]
    return order, Counter(train_set.sources[used].tolist())


@pytest.mark.slow
def test_a_mixture_stops_and_resumes_bit_equal(here: Here, tmp_path: Path) -> None:
    fields = {"dataset": mixture(tmp_path), "epochs": 4, "checkpoint_interval": 7, "eval_split": 0.1}
    assert here("straight", **fields) == 0, here.err
    assert "first.jsonl: 36 samples x 1.5, " in here.out and "second.jsonl: 68 samples x 0.3, " in here.out

    def ask() -> None:
        until(lambda: len(lines(here.run_dir() / "metrics.jsonl")) >= 5)
        (here.run_dir() / "stop").touch()

    asker = threading.Thread(target=ask)
    asker.start()
    assert here(**fields) == 0, here.err
    asker.join()
    assert not (here.run_dir() / "result.json").exists()
    assert here(**fields) == 0, here.err
    assert here.losses() == here.losses("straight")
    order, used = order_of(tmp_path, here.run_dir())
    assert used == {0: 4 * 54, 1: 82}, "36 x 1.5 and 68 x 0.3, in 4 epochs"
    recorded = {line["step"]: line["rows"] for line in lines(here.run_dir() / "samples" / "rank0.jsonl")}
    assert [recorded[step + 1] for step in range(order.steps)] == [order.step(step) for step in range(order.steps)]


def test_other_weights_are_another_run(here: Here, tmp_path: Path) -> None:
    dataset = mixture(tmp_path)
    assert here(dataset=dataset, max_steps=3) == 0, here.err
    assert here(dataset=dataset.replace("0.3", "0.4"), max_steps=3) == 1
    assert f"dataset: weight of {tmp_path / 'second.jsonl'}: was 0.3, now 0.4" in here.err


@pytest.mark.slow
def test_a_mixture_is_the_same_on_any_number_of_hosts(tmp_path: Path, model_folder: Path, cluster: Cluster) -> None:
    fields = {"dataset": mixture(tmp_path), "max_steps": 12, "epochs": 2}
    alone = cluster.run(1, run="alone", **fields)
    assert cluster.run(2, run="both", **fields) == pytest.approx(alone, abs=1e-4)
    order, _ = order_of(tmp_path, cluster.run_dir(0, "both"))
    rows = [lines(cluster.run_dir(rank, "both") / "samples" / f"rank{rank}.jsonl") for rank in (0, 1)]
    assert 2 <= len(alone) == min(12, order.steps)
    for step in range(len(alone)):
        assert [row for rank in rows for row in rank[step]["rows"]] == order.step(step)


def test_a_run_stops_if_it_loses_more_than_half_and_counts_what_it_loses(here: Here, tmp_path: Path) -> None:
    asked = [{"messages": [{"role": "user", "content": "the cat"}]}] * 7
    dataset = write_jsonl(tmp_path / "d.jsonl", [*records(6), *asked])
    assert here(dataset=dataset) == 1
    (error,) = here.err.splitlines()
    assert "7 of 13 samples of the dataset are not trained (7 without an answer with loss), more than half" in error
    assert here(dataset=dataset, keep_going="dropped", eval_split=0, max_steps=1) == 0, here.err
    assert "\nWARNING: 7 of 13 samples of the dataset are not trained" in here.out
    data = here.result()["data"]
    assert (data["samples"], data["answers"], data["dropped"]) == (13, 6, {"without an answer with loss": 7})
    card = (Path(here.result()["adapter"]) / "README.md").read_text()
    assert "| data | 13 samples: 6 answers and " in card


def test_the_trainer_and_the_program_show_the_same(
    here: Here, tmp_path: Path, dataset: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The trainer uses the tokenizer of transformers, the program of the controller the library tokenizers."""
    flags = ["--model", str(here.model), "--dataset", str(dataset), "--seq-length", "16"]
    shown = []
    for more in (["--json"], ["--samples", "5"]):
        for main in (trainer_main, program):
            assert main(["data", *flags, *more]) == 0
            shown.append(capsys.readouterr())
    assert shown[0] == shown[1] and shown[2] == shown[3]
    assert len(shown[0].out.splitlines()) == 120 and "120 samples: " in shown[0].err
    assert shown[2].out.count("\u27e6") == 5 and not shown[2].err
    for main in (trainer_main, program):
        assert main(["data", *flags, "--samples", "x"]) == 2
        assert main(["data", *flags, "--fake-data"]) == 2
        assert "a run with fake_data reads no samples" in capsys.readouterr().err
