"""A run with a loss, a gradient or weights that are not finite fails, and its last finite checkpoint remains."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tables import table
from trainer_runs import Cluster, Here, lines, records, write_jsonl

from trainer.common.errors import UserError
from trainer.common.files import sha256_file
from trainer.loop.final_export import merge_adapter
from trainer.records.checkpoint import MANIFEST, complete_checkpoints, find_defect
from trainer.spec import make_spec
from trainer.strategy.ddp import DDP

RARE = "~"  # a token of one sample
STRATEGIES: dict[str, dict[str, Any]] = table("finite")["strategies"]
ZERO: dict[str, dict[str, Any]] = {
    "zero 2": {"strategy": "deepspeed"},
    "zero 3": {"strategy": "deepspeed", "deepspeed_stage": 3},
}
every_strategy = pytest.mark.parametrize("strategy", list(STRATEGIES))
some_strategies = pytest.mark.parametrize("strategy", ["ddp", "fsdp, sharded", "averaging"])
OVERFLOW = {"lr": 1e38, "max_steps": 1, "eval_split": 0}


def the_error(run_dir: Path, rank: int = 0) -> str:
    """Return the message of a rank that failed with one line; its files are JSON for every parser."""
    for path in [*run_dir.rglob("*.json"), *run_dir.rglob("*.jsonl")]:
        for text in [path.read_text()] if path.suffix == ".json" else path.read_text().splitlines():
            json.loads(text, parse_constant=pytest.fail)
    state = json.loads((run_dir / "state" / f"rank{rank}.json").read_text())
    assert state["status"] == "failed" and state["error"]["plain"], state["error"]
    assert "\n" not in state["error"]["message"]
    return str(state["error"]["message"])


@pytest.fixture(scope="module")
def rare(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> dict[str, Any]:
    """A spec of a model whose embedding of one token is not a number, and of a dataset with that token in one sample."""
    folder = tmp_path_factory.mktemp("rare")
    shutil.copytree(model_folder, folder / "model")
    vocabulary = json.loads((folder / "model/tokenizer.json").read_text())["model"]["vocab"]
    weights = load_file(folder / "model/model.safetensors")
    weights["model.embed_tokens.weight"][vocabulary[RARE]] = float("nan")
    save_file(weights, folder / "model/model.safetensors", {"format": "pt"})
    rows = records(40)
    rows[15]["output"] += f" {RARE}"
    data = write_jsonl(folder / "d.jsonl", rows)
    fields = {"model": folder / "model", "dataset": data, "packing": False, "eval_split": 0, "balance": "even"}
    return fields | {"total_batch_size": 4, "batch_size": 2, "checkpoint_interval": 2, "checkpoint_keep": 1}


@every_strategy
def test_weights_that_overflow_in_the_last_step_are_not_a_result(strategy: str, here: Here) -> None:
    assert here(**OVERFLOW, **STRATEGIES[strategy]) == 1, here.out
    assert the_error(here.run_dir()).startswith("weights are not finite at step 1: decrease lr (now 1e+38), increase ")
    assert "\nerror: weights are " in f"\n{here.err}" and "Traceback" not in here.err
    assert not (here.run_dir() / "result.json").exists()
    assert not complete_checkpoints(here.run_dir() / "checkpoints")


@some_strategies
def test_the_last_finite_checkpoint_remains(strategy: str, here: Here) -> None:
    """The weights are finite after step 1, but too large for a second step."""
    fields = {"lr": 1e30, "max_steps": 4, "checkpoint_interval": 1, "checkpoint_keep": 1, "warmup": 0}
    fields |= {"eval_split": 0} | STRATEGIES[strategy]
    assert here(**fields) == 1, here.out
    message = the_error(here.run_dir())
    step = int(message.split(" at step ")[1].split(":")[0])
    assert 2 <= step <= 4 and len(here.losses()) in (step - 1, step)
    assert list(complete_checkpoints(here.run_dir() / "checkpoints")) == [step - 1]
    # The next start resumes from it and fails at the same step.
    assert here(**fields) == 1
    assert the_error(here.run_dir()) == message and f"resuming from step {step - 1} of 4" in here.out


def test_a_loss_of_one_sample_that_is_not_a_number(here: Here, rare: dict[str, Any]) -> None:
    assert here(epochs=1, **rare) == 1
    message = the_error(here.run_dir())
    assert message.startswith("loss is not a number at step ")
    trained = load_file(newest(here.run_dir()) / "trained.safetensors")
    assert all(value.isfinite().all() for value in trained.values())


def newest(run_dir: Path) -> Path:
    """Return the only checkpoint of a run, which must be complete."""
    (found,) = (run_dir / "checkpoints").iterdir()
    assert not find_defect(found)
    return found


def test_a_finite_adapter_may_overflow_the_merged_model(here: Here) -> None:
    assert here(max_steps=1, eval_split=0) == 0, here.err
    file = here.run_dir() / "adapter/adapter_model.safetensors"
    save_file({name: torch.full_like(value, 1e30) for name, value in load_file(file).items()}, file)
    spec = make_spec({"model": str(here.model), "seq_length": 64}, "")
    with pytest.raises(UserError, match=r"^merge: the weights of .* with the adapter overflow: decrease lr "):
        merge_adapter(spec, here.run_dir())
    assert not (here.run_dir() / "merged").exists()


# fp16 ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_steps_that_the_gradient_scaler_skips_are_no_failure(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    real = torch.amp.GradScaler
    monkeypatch.setattr(torch.amp, "GradScaler", lambda *args, **options: real(*args, init_scale=2.0**45, **options))
    assert here(precision="fp16-mixed", max_steps=30, epochs=9) == 0, here.err
    norms = [record["grad_norm"] for record in lines(here.run_dir() / "metrics.jsonl")]
    assert norms[0] is None and norms[-1] is not None, "skipped steps, then trained ones"


def test_a_gradient_that_overflows_at_any_scale_is_a_failure(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    real = torch.amp.GradScaler
    monkeypatch.setattr(torch.amp, "GradScaler", lambda *args, **options: real(*args, init_scale=1e-3, **options))
    backward = DDP.backward

    def overflow(self: DDP, *arguments: Any, **options: Any) -> torch.Tensor:
        loss = backward(self, *arguments, **options)
        for parameter in self.trained.values():
            assert parameter.grad is not None
            parameter.grad.fill_(float("inf"))
        return loss

    monkeypatch.setattr(DDP, "backward", overflow)
    assert here(precision="fp16-mixed", max_steps=30, epochs=9) == 1
    assert the_error(here.run_dir()).startswith("gradient norm is not finite at step 4: ")


# Checkpoints of older versions --------------------------------------------------------------------------------------------


def as_an_older_version(path: Path, value: float = float("nan")) -> None:
    """Set a weight of a checkpoint, and rewrite its manifest as earlier versions did, which did not check the weights."""
    file = path / "trained.safetensors"
    weights = load_file(file)
    next(iter(weights.values())).view(-1)[0] = value
    save_file(weights, file)
    manifest = json.loads((path / MANIFEST).read_text())
    del manifest["finite"]
    manifest["files"][file.name] = {"bytes": file.stat().st_size, "sha256": sha256_file(file)}
    (path / MANIFEST).write_text(json.dumps(manifest))


@pytest.mark.slow
def test_a_checkpoint_that_is_not_finite_is_ignored(here: Here) -> None:
    fields = {"max_steps": 6, "checkpoint_interval": 3}
    assert here("straight", **fields) == here(**fields) == 0, here.err
    older, newer = (here.run_dir() / "checkpoints" / f"step-0000000{step}" for step in (3, 6))
    as_an_older_version(newer)
    # Older versions also wrote such a result.
    result = here.run_dir() / "result.json"
    result.write_text(json.dumps(json.loads(result.read_text()) | {"eval_loss": float("nan")}))
    assert here(**fields) == 0, here.err
    assert f"checkpoint: {newer} has weights that are not finite: ignored" in here.out
    assert "resuming from step 3 of 6" in here.out
    assert here.losses() == here.losses("straight")
    assert json.loads(result.read_text(), parse_constant=pytest.fail)["eval_loss"]

    for path in (older, newer):
        as_an_older_version(path, float("-inf"))
    result.unlink()
    assert here(**fields) == 1
    folder = here.run_dir() / "checkpoints"
    assert the_error(here.run_dir()).startswith(
        f"checkpoint: none in {folder} is complete with finite weights, so the run cannot resume: "
    )


# Several ranks ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy",
    [
        "ddp",
        "zero 2",
        "diloco",
        *(pytest.param(one, marks=pytest.mark.long) for one in ("fsdp", "zero 3", "averaging")),
    ],
)
def test_all_ranks_fail_at_the_step_of_one_rank(strategy: str, cluster: Cluster, rare: dict[str, Any]) -> None:
    """One rank has a loss that is not a number: no rank applies the gradient, and every host keeps its checkpoint."""
    if strategy in ZERO:
        pytest.importorskip("deepspeed", reason="the deepspeed extra is not installed")
    fields = (STRATEGIES | ZERO)[strategy]
    launchers = cluster.start(2, epochs=1, **rare, **fields)
    assert all(cluster.wait(launchers, 120)), cluster.logs()
    errors = [cluster.state(host, host)["error"] for host in (0, 1)]
    cause = next(error for error in errors if error["message"].startswith("loss is not a number at step "))
    step = int(cause["message"].split(" at step ")[1].split(":")[0])
    if strategy in ("diloco", "averaging"):
        assert [error["plain"] for error in errors].count(True) == 1, "replicas have separate gradients"
    else:
        assert all(f"at step {step}: " in error["message"] and error["plain"] for error in errors), errors
    for host in (0, 1):
        last = newest(cluster.run_dir(host))
        kept = json.loads((last / "state.json").read_text())["step"]
        assert kept < step or (strategy == "averaging" and errors[host] is not cause), "the other worker trains on"
        assert all(value.isfinite().all() for value in load_file(last / "trained.safetensors").values())
        assert not (cluster.run_dir(host) / "result.json").exists()


@pytest.mark.slow
@pytest.mark.long
def test_sharded_weights_of_zero_that_overflow_are_not_a_result(cluster: Cluster) -> None:
    pytest.importorskip("deepspeed", reason="the deepspeed extra is not installed")
    assert all(cluster.wait(cluster.start(1, 2, **OVERFLOW, **ZERO["zero 3"]), 120)), cluster.logs()
    for rank in (0, 1):
        assert the_error(cluster.run_dir(), rank).startswith("weights are not finite at step 1: ")
    assert not complete_checkpoints(cluster.run_dir() / "checkpoints")
