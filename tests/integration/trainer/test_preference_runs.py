"""Runs that learn from preferences: what they learn, equal results of all ranks and strategies, resume, and the kept reference."""

from __future__ import annotations

import itertools
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from tables import table
from trainer_runs import Cluster, Here, lines, metrics, undo_end, words, write_jsonl


def records(count: int, seed: int = 1) -> list[dict[str, Any]]:
    """Return records that are pairs, with the keys of a labelled answer beside them."""
    draw = random.Random(seed)
    return [
        {"prompt": words(draw, 6) + " ", "chosen": words(draw, 9) + " yes", "rejected": words(draw, 12)}
        for _ in range(count)
    ]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A dataset for every method."""
    folder = tmp_path_factory.mktemp("preferences")
    pairs = write_jsonl(folder / "pairs.jsonl", records(40))
    labels = [
        {"prompt": row["prompt"], "completion": row[name], "label": name == "chosen"}
        for row in records(20)
        for name in ("chosen", "rejected")
    ]
    return {"dpo": pairs, "orpo": pairs, "kto": write_jsonl(folder / "labels.jsonl", labels)}


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields",
    table("preference_runs")["a_run_learns_to_prefer"],
    ids=lambda fields: ",".join(f"{name}={value}" for name, value in fields.items()),
)
def test_a_run_learns_to_prefer(here: Here, files: dict[str, Path], fields: dict[str, Any]) -> None:
    fields = fields | {"dataset": files[fields["method"]], "epochs": 4, "loggers": "tensorboard"}
    assert here(**fields, eval_split=0.2, eval_interval=8, eval_start=True) == 0, here.err
    found, result = metrics(here.run_dir()), here.result()
    margins = [step["rewards/margins"] for step in found if "rewards/margins" in step]
    assert margins[-1] > max(0.0, margins[0]) + 0.1
    assert result["loss_last"] < result["loss_first"] and result["eval_loss"] < result["eval_loss_first"]
    assert result["packing"] is False and result["samples"] == 4 * 32
    evals = lines(here.run_dir() / "evals.jsonl")
    assert evals[-1]["metrics"]["rewards/margins"] > 0.1 and len(evals) > 2
    kind = "model" if fields.get("lora_r") == 0 else "adapter"
    assert f"- {fields['method']}\n" in (here.run_dir() / kind / "README.md").read_text().partition("\n---\n")[0] + "\n"
    events = b"".join(path.read_bytes() for path in (here.run_dir() / "tensorboard").rglob("events*"))
    assert b"rewards/margins" in events and b"eval_rewards/margins" in events


METHODS, STRATEGIES = ("dpo", "orpo", "kto"), ("ddp", "fsdp", "pipeline")
# Of all combinations, CI has those in which every pair of two values occurs.
PAIRS = {(STRATEGIES[i], METHODS[j], 16 * ((i + j) % 3 > 0)) for i in range(3) for j in range(3)}


@pytest.mark.parametrize(
    ("strategy", "method", "lora"),
    [
        pytest.param(*each, marks=pytest.mark.slow if each in PAIRS else pytest.mark.long)
        for each in itertools.product(STRATEGIES, METHODS, (16, 0))
    ],
)
def test_two_ranks_train_as_one(
    strategy: str, method: str, lora: int, cluster: Cluster, here: Here, files: dict[str, Path]
) -> None:
    """Seven rows in micro-batches of two: the ranks have different numbers of them."""
    fields = {"method": method, "dataset": files[method], "total_batch_size": 7, "max_steps": 4, "lora_r": lora}
    fields |= {"lr": 3e-3, "eval_split": 0.2, "seq_length": 64, "batch_size": 2}
    assert here("one", loggers="none", **fields) == 0, here.err
    found = cluster.run(2, strategy=strategy, **fields)
    assert found == pytest.approx(here.losses("one"), rel=1e-4, abs=1e-5), cluster.logs()
    for mine, other in zip(metrics(cluster.run_dir()), metrics(here.run_dir("one")), strict=True):
        assert mine == pytest.approx(other, rel=1e-3, abs=1e-4)
    result = lines(cluster.run_dir() / "evals.jsonl")[-1]
    assert result["eval_loss"] == pytest.approx(here.result("one")["eval_loss"], rel=1e-4, abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["dpo", "kto"])
def test_replicas_begin_with_the_loss_of_one_rank(
    method: str, cluster: Cluster, here: Here, files: dict[str, Path]
) -> None:
    fields = {"method": method, "dataset": files[method], "total_batch_size": 8, "max_steps": 8}
    fields |= {"lr": 3e-3, "epochs": 2, "eval_split": 0.2}
    assert here("one", loggers="none", **fields) == 0, here.err
    found = cluster.run(2, strategy="diloco", local_steps=2, **fields)
    assert found[0] == pytest.approx(here.losses("one")[0], rel=1e-4) and found[-1] < found[0]
    cluster.run(2, run="mean", strategy="averaging", **fields)
    for run in ("r", "mean"):  # the held-out samples of a merged model
        assert lines(cluster.run_dir(0, run) / "evals.jsonl")[-1]["metrics"]["rewards/margins"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("fields", [{}, {"lora_r": 0}, {"method": "kto"}], ids=["lora", "full", "kto"])
def test_a_resumed_run_is_bit_equal(fields: dict[str, Any], here: Here, files: dict[str, Path]) -> None:
    fields = {"method": "dpo", "max_steps": 6, "checkpoint_interval": 3, "lora_dropout": 0.1} | fields
    fields |= {"dataset": files[fields["method"]]} | ({"lora_dropout": 0.0} if "lora_r" in fields else {})
    assert here("straight", **fields) == here(**fields) == 0, here.err
    undo_end(here.run_dir())
    assert here(**fields) == 0, here.err
    assert "resuming from step 3 of 6" in here.out
    assert here.losses() == here.losses("straight") and metrics(here.run_dir()) == metrics(here.run_dir("straight"))
    kind = ("model/model" if fields.get("lora_r") == 0 else "adapter/adapter_model") + ".safetensors"
    one, other = (load_file(here.run_dir(run) / kind) for run in ("r", "straight"))
    assert all(bool((value == other[name]).all()) for name, value in one.items())


@pytest.mark.slow
def test_the_reference_is_kept_for_the_next_start(
    here: Here, files: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from trainer.method.dpo import DPO

    calls = []
    real = DPO.reference_values
    monkeypatch.setattr(DPO, "reference_values", lambda *args: calls.append(1) or real(*args))
    fields = {"method": "dpo", "dataset": files["dpo"], "max_steps": 2, "preference_precompute": True}
    assert here("one", **fields) == 0, here.err
    assert calls
    calls.clear()
    for again in ("two", "three"):  # a start that finds what an earlier one has kept
        shutil.copytree(here.folder / "runs/one/cache", here.folder / f"runs/{again}/cache")
    assert here("two", **fields) == 0, here.err
    assert not calls and here.losses("two") == here.losses("one")
    for file in (here.folder / "runs/three/cache").glob("references-*.npy"):
        file.write_bytes(b"damaged")
    assert here("three", **fields) == 0, here.err
    assert calls and here.losses("three") == here.losses("one")


@pytest.mark.slow
@pytest.mark.parametrize(("method", "row", "said"), table("preference_runs")["a_dataset_of_another_method_is_one_line"])
def test_a_dataset_of_another_method_is_one_line(
    method: str, row: dict[str, Any], said: str, here: Here, tmp_path: Path
) -> None:
    file = write_jsonl(tmp_path / "data.jsonl", [row])
    assert here(method=method, dataset=file) == 1
    assert f"{file}:1: " in here.err and said in here.err and "Traceback" not in here.err
