"""Complete runs of one rank: every kind of spec, dataset, logger and error."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tables import table
from trainer_runs import TOP, Here, lines, records, until, write_jsonl

from trainer.data.order import held_out
from trainer.loop.run_dir import StopRequest
from trainer.records.checkpoint import complete_checkpoints
from trainer.spec import make_spec

pytestmark = pytest.mark.slow

FEW = {"max_steps": 6}
INTERRUPTED = "interrupted: start the run again to resume from its newest checkpoint"


def test_the_files_of_a_finished_run(here: Here) -> None:
    assert here(epochs=2, loggers="tensorboard", checkpoint_interval=5, eval_interval=5, eval_split=0.1) == 0, here.err
    result, metrics = here.result(), lines(here.run_dir() / "metrics.jsonl")
    steps = len(metrics)
    assert result["status"] == "finished" and result["step"] == result["steps"] == steps
    assert result["world_size"] == 1 and result["samples"] == 2 * 108
    assert result["loss_first"] == metrics[0]["loss"] and result["loss_last"] == metrics[-1]["loss"]
    assert result["loss_last"] < 0.9 * result["loss_first"]
    assert 0 < result["eval_loss"] < result["loss_first"]
    assert result["tokens"] == sum(record["tokens"] for record in metrics) > result["trained_tokens"] > 0
    adapter = Path(result["adapter"])
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json"} <= {f.name for f in adapter.iterdir()}
    assert sorted(complete_checkpoints(here.run_dir() / "checkpoints"))[-1] == steps
    assert list((here.run_dir() / "tensorboard").iterdir())
    assert f"step {steps}/{steps}" in here.out
    state = json.loads((here.run_dir() / "state" / "rank0.json").read_text())
    assert (state["status"], state["step"], state["error"]) == ("finished", steps, None)


def test_peft_loads_the_adapter_with_the_trained_weights(here: Here) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    assert here(lora_r=4, **FEW) == 0, here.err
    base = AutoModelForCausalLM.from_pretrained(here.model)
    adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(here.model), here.result()["adapter"])
    newest = here.run_dir() / "checkpoints" / "step-00000006" / "trained.safetensors"
    trained = load_file(newest)
    assert any(float(value.abs().max()) > 0 for name, value in trained.items() if "lora_B" in name)
    for name, value in adapted.named_parameters():
        if name in trained:
            assert torch.equal(value, trained[name])
    ids = torch.arange(10)[None]
    assert not torch.allclose(base(ids).logits, adapted(ids).logits)


def test_the_same_spec_gives_the_same_run(here: Here) -> None:
    assert here("a", **FEW) == here("b", **FEW) == 0
    assert here.losses("a") == here.losses("b")
    assert here.result("a")["adapter_sha256"] == here.result("b")["adapter_sha256"]
    assert here("c", seed=2, **FEW) == 0
    assert here.losses("c") != here.losses("a")


@pytest.mark.parametrize(
    "fields",
    table("runs")["every_kind_of_run"],
    ids=lambda fields: ",".join(f"{name}={value}" for name, value in fields.items()),
)
def test_every_kind_of_run(fields: dict[str, Any], here: Here) -> None:
    assert here(**(FEW | fields)) == 0, here.err
    result = here.result()
    assert result["steps"] == 6 and result["loss_last"] < 20
    assert ("model_sha256" in result) == (fields.get("lora_r") == 0)
    for line in (here.run_dir() / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=pytest.fail)  # no Infinity and no NaN: other programs read this file


def test_options_that_save_memory_do_not_change_the_losses(here: Here) -> None:
    assert here("plain", **FEW) == here("again", gradient_checkpointing=True, **FEW) == 0
    assert here.losses("again") == pytest.approx(here.losses("plain"), abs=1e-6)
    assert here("small", batch_size=1, **FEW) == 0
    assert here.losses("small") == pytest.approx(here.losses("plain"), abs=1e-5)


def test_lower_precision_has_similar_losses(here: Here) -> None:
    assert (
        here("full", **FEW)
        == here("bf16", precision="bf16-mixed", **FEW)
        == here("fp16", precision="fp16-mixed", **FEW)
        == 0
    )
    assert here.losses("bf16") == pytest.approx(here.losses("full"), rel=0.05)
    assert here.losses("fp16")[0] == pytest.approx(here.losses("full")[0], rel=0.01)
    assert here.losses("fp16") != here.losses("full") != here.losses("bf16")


@pytest.mark.long
@pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="torch.compile needs a C++ compiler")
def test_torch_compile(here: Here) -> None:
    few = {"max_steps": 1, "eval_split": 0, "batch_size": 4, "lora_targets": "q_proj"}
    assert here("plain", **few) == 0
    assert here("compiled", torch_compile=True, **few) == 0, here.err
    assert here.losses("compiled") == pytest.approx(here.losses("plain"), abs=1e-4)


def test_torch_compile_without_a_compiler(here: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import cpp_builder

    cpp_builder.get_cpp_compiler.cache_clear() if hasattr(cpp_builder.get_cpp_compiler, "cache_clear") else None
    monkeypatch.setattr("torch._inductor.config.cpp.cxx", (str(tmp_path / "none"),))
    assert here(torch_compile=True, **FEW) == 1
    assert here.error == "torch_compile: no C++ compiler found: install g++, or set torch_compile=false"


def test_a_dataset_of_one_sample(here: Here, tmp_path: Path) -> None:
    data = write_jsonl(tmp_path / "one.jsonl", records(1))
    assert here(dataset=data, epochs=3) == 0, here.err
    assert here.result()["eval_loss"] is None and here.result()["samples"] == 3


def test_held_out_samples_are_never_trained_on(here: Here) -> None:
    assert here(eval_split=0.25, epochs=2) == 0, here.err
    used = [s for record in lines(here.run_dir() / "samples" / "rank0.jsonl") for row in record["rows"] for s in row]
    assert sorted(used) == sorted([*range(90)] * 2), "indices among the 90 that are not held out"
    spec = make_spec({"eval_split": 0.25}, "")
    out = held_out(spec, 120)
    assert len(set(out)) == 30 and out == held_out(spec, 120)
    assert held_out(make_spec({"eval_split": 0.25, "seed": 2}, ""), 120) != out
    assert [len(held_out(spec, samples)) for samples in (1, 2, 3, 4, 8)] == [0, 1, 1, 1, 2]


def test_evaluation_does_not_change_training(here: Here) -> None:
    assert here("often", eval_interval=1, lora_dropout=0.2, **FEW) == 0
    assert here("never", eval_interval=0, lora_dropout=0.2, **FEW) == 0
    assert here.losses("often") == here.losses("never")
    assert here.result("often")["eval_loss"] == here.result("never")["eval_loss"]


def test_fake_data_has_the_requested_number_of_steps(here: Here) -> None:
    assert here(fake_data=True, max_steps=7, eval_split=0.5) == 0, here.err
    assert here.result()["steps"] == 7 and here.result()["tokens"] == 7 * 4 * 64


def test_the_tiny_model_and_a_dataset_in_the_home_folder(
    here: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    write_jsonl(tmp_path / "home.jsonl", records(20))
    assert here("a", model="tiny", dataset="~/home.jsonl", max_steps=1) == 0, here.err
    write_jsonl(tmp_path / "home.jsonl", records(20, seed=2))
    assert here("b", model="tiny", dataset="~/home.jsonl", max_steps=1) == 0, here.err
    assert here.losses("a") != here.losses("b"), "the same name, another file"
    assert len(list((here.folder / "store" / "models").glob("tiny-*"))) == 2


def stop_at(here: Here, step: int, how: str, **fields: Any) -> None:
    """Start the run and request a stop when `step` is recorded."""
    metrics = here.run_dir() / "metrics.jsonl"

    def ask() -> None:
        until(lambda: len(lines(metrics)) >= step, what=f"step {step}")
        if how == "file":
            (here.run_dir() / "stop").touch()
        else:
            os.kill(os.getpid(), getattr(signal, how))

    asker = threading.Thread(target=ask)
    asker.start()
    assert here(**fields) == 0, here.err
    asker.join()


@pytest.mark.parametrize(
    ("how", "fields"),
    [("file", {"lora_dropout": 0.3}), ("SIGTERM", {}), pytest.param("SIGINT", {}, marks=pytest.mark.long)],
)
def test_stop_and_resume_is_bit_equal(how: str, fields: dict[str, Any], here: Here) -> None:
    fields = {"epochs": 4, "checkpoint_interval": 7, **fields}
    assert here("straight", **fields) == 0
    stop_at(here, 5, how, **fields)
    stopped = len(here.losses())
    assert 5 <= stopped < len(here.losses("straight")), "stopped before the end"
    assert not (here.run_dir() / "result.json").exists()
    assert not (here.run_dir() / "stop").exists(), "the request does not apply to the next start"
    assert json.loads((here.run_dir() / "state" / "rank0.json").read_text())["status"] == "stopped"
    assert here(**fields) == 0, here.err
    assert f"resuming from step {stopped} of" in here.out
    assert json.loads((here.run_dir() / "state" / "rank0.json").read_text())["resumed"] == stopped
    assert here.losses() == here.losses("straight")
    first, second = here.result("straight"), here.result()
    for name in ("tokens", "trained_tokens", "samples", "loss_first", "loss_last", "eval_loss", "adapter_sha256"):
        assert second[name] == first[name], name


def test_a_second_interrupt_ends_the_run_at_once_but_not_under_torchrun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        asked = StopRequest(tmp_path)
        assert not asked
        signal.raise_signal(signal.SIGINT)
        assert asked
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        # Under torchrun one Ctrl-C arrives twice: from the terminal and from the launcher.
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
        asked = StopRequest(tmp_path)
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        assert asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_an_interrupt_while_torch_is_imported_is_a_one_line_error(tmp_path: Path, dataset: Path) -> None:
    package = tmp_path / "torch" / "__init__.py"
    package.parent.mkdir()
    package.write_text('exec("import signal; signal.raise_signal(signal.SIGINT)")')  # as in namedtuple
    command = [sys.executable, "-m", "trainer", "--run=r", f"--dataset={dataset}", f"--data-dir={tmp_path}"]
    # Tests in the background of a shell ignore SIGINT, and a child process would inherit that.
    signal_options = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)}
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    ended = subprocess.run(command, cwd=TOP, env=environment, capture_output=True, text=True, **signal_options)
    assert (ended.returncode, ended.stderr) == (1, f"error: {INTERRUPTED}\n")
    assert json.loads((tmp_path / "runs/r/state/rank0.json").read_text())["error"]["message"] == INTERRUPTED


def test_a_finished_run_is_not_repeated(here: Here) -> None:
    assert here(**FEW) == 0
    before = {file: file.stat().st_mtime_ns for file in here.run_dir().rglob("*") if file.is_file()}
    assert here(**FEW) == 0
    assert "run r is finished: 6 steps" in here.out and "nothing to do" in here.out
    changed = {
        file.name
        for file in here.run_dir().rglob("*")
        if file.is_file() and before.get(file) != file.stat().st_mtime_ns
    }
    assert changed <= {"spec.yml", "rank0.json", "rank0.ballast"}


def test_a_run_that_died_between_its_last_step_and_its_result(here: Here) -> None:
    assert here(**FEW) == 0
    result = here.result()
    (here.run_dir() / "result.json").unlink()
    shutil.rmtree(here.run_dir() / "adapter")
    (here.run_dir() / ".tmp-adapter").mkdir()
    (here.run_dir() / ".tmp-adapter" / "half").write_text("written")
    assert here(**FEW) == 0, here.err
    measured = {"mfu_ranks": None}  # no step was trained again
    assert here.result() == result | measured
    assert not (here.run_dir() / "adapter" / "half").exists()
    assert len(here.losses()) == 6


def test_a_different_spec_with_the_same_name_is_rejected(here: Here) -> None:
    assert here(**FEW) == 0
    kept = (here.run_dir() / "spec.yml").read_text()
    assert here(lr=0.5, **FEW) == 1
    changed = "(lr: was 0.01, now 0.5): repeat the options with which it was started, set another run name with run=, or delete"
    assert here.error == f"run r exists with another spec {changed} {here.run_dir()}"
    assert (here.run_dir() / "spec.yml").read_text() == kept
    assert here(resume="never", **FEW) == 1
    assert "has checkpoints in" in here.error and "resume is never" in here.error
    assert here(checkpoint_keep=5, **FEW) == 0, "a resumed run may change this field"
    for name in ("spec.yml", "result.json"):  # as on a host whose folder another host's run has left
        (here.run_dir() / name).unlink()
    assert here(lr=0.5, **FEW) == 1
    (path,) = re.findall(
        r"checkpoint: (\S+) on \S+ is of another spec \(lr: was 0.01, now 0.5\): repeat the", here.error
    )
    assert Path(path).parent == here.run_dir() / "checkpoints"
    (here.run_dir() / "spec.yml").unlink()
    assert here(**FEW) == 0, "its own"


def test_a_changed_dataset_or_base_model_is_rejected(here: Here, tmp_path: Path) -> None:
    data, model = write_jsonl(tmp_path / "d.jsonl", records(60)), tmp_path / "base"
    shutil.copytree(here.model, model)
    fields = {"dataset": data, "model": model, "epochs": 20}
    stop_at(here, 2, "file", **fields)
    assert len(here.losses()) < 100
    write_jsonl(data, records(61))
    assert here(**fields) == 1
    assert here.error.startswith(f"dataset: {data} or its encoding has changed since run r started: restore")
    write_jsonl(data, records(60))
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-3}))
    assert here(**fields) == 1
    assert here.error.startswith(f"model: the config.json or the weights of {model} have changed since run r started")


def test_records_after_the_checkpoint_are_removed(here: Here) -> None:
    stop_at(here, 3, "file", epochs=4)
    stopped = len(here.losses())
    for name in ("metrics.jsonl", "samples/rank0.jsonl", "samples/rank3.jsonl"):
        with (here.run_dir() / name).open("a") as file:
            file.write(json.dumps({"step": stopped + 1, "rows": [[0]], "loss": 0.0}) + "\n" + '{"step": 1')
    assert here(epochs=4) == 0, here.err
    steps = list(range(1, here.result()["steps"] + 1))
    assert [record["step"] for record in lines(here.run_dir() / "metrics.jsonl")] == steps
    assert [record["step"] for record in lines(here.run_dir() / "samples/rank0.jsonl")] == steps
    assert lines(here.run_dir() / "samples/rank3.jsonl") == []


def test_a_half_written_checkpoint_on_resume(here: Here) -> None:
    fields = {"epochs": 2, "checkpoint_interval": 3}
    assert here("straight", **fields) == 0
    stop_at(here, 5, "file", **fields)
    newest = max(complete_checkpoints(here.run_dir() / "checkpoints"))
    os.truncate(here.run_dir() / "checkpoints" / f"step-{newest:08d}" / "optimizer.pt", 50)
    assert here(**fields) == 0, here.err
    assert "is incomplete (optimizer.pt has 50 of" in here.out and "resuming from step 3 of" in here.out
    assert here.losses() == here.losses("straight")


@pytest.mark.parametrize(
    ("fields", "why"), table("runs")["an_error_that_a_user_can_fix_is_one_line"], ids=lambda value: str(value)[:40]
)
def test_an_error_that_a_user_can_fix_is_one_line(fields: dict[str, Any], why: str, here: Here) -> None:
    assert here(**fields) == 1
    assert why in here.error
    assert not (here.run_dir() / "result.json").exists()
    state = json.loads((here.run_dir() / "state" / "rank0.json").read_text())
    assert state["status"] == "failed" and state["error"]["plain"] and state["error"]["message"] == here.error


def test_an_invalid_spec_is_reported_first(here: Here) -> None:
    assert here(lr="fast") == 2
    assert here.error.startswith("run spec: lr: expected a number > 0 and <= 1e+38, got 'fast'")
    assert not here.run_dir().exists()


def test_a_folder_that_is_not_writable(here: Here) -> None:
    here.folder.joinpath("runs").write_text("a file where a folder should be")
    assert here(**FEW) == 1
    assert here.error.startswith("cannot write: ")


# What a restarted rank does: it opens the loggers again, and records a later step.
RESTART = """
import sys
from pathlib import Path
from trainer.records.loggers import open_loggers
from trainer.spec import read_spec
folder = Path(sys.argv[1])
opened = open_loggers(read_spec(folder / "spec.yml", {}, "the test"), folder, True, None)
for logger in opened:
    logger.log({"loss": 0.5}, 100)
    logger.close()
print("opened", len(opened))
"""


@pytest.mark.long
def test_every_logger_has_the_steps_and_continues_after_a_restart(tmp_path: Path) -> None:
    packages = tmp_path / "packages"
    install = [Path(sys.executable).with_name("uv"), "pip", "install", "-q", "--python", sys.executable]
    subprocess.run([*install, "--target", packages, "mlflow-skinny", "trackio", "wandb"], check=True)
    known = os.environ | {"PYTHONPATH": f"{TOP}:{packages}", "WANDB_MODE": "offline", "HF_HUB_OFFLINE": "1"}
    environment = {name: value for name, value in known.items() if name != "MLFLOW_TRACKING_URI"}
    run = tmp_path / "mine"
    words = ["--run-dir", run, "--run", "mine", "--model", "tiny"]
    words += ["--dataset", write_jsonl(tmp_path / "d.jsonl", records(60))]
    words += ["--max-steps", "3", "--epochs", "20", "--loggers", "wandb,trackio,mlflow", "--wandb-project", "yard"]
    subprocess.run(
        [sys.executable, "-m", "trainer", "train", *words], env=environment, check=True, stdout=subprocess.PIPE
    )
    again = subprocess.run(
        [sys.executable, "-c", RESTART, run], env=environment, check=True, stdout=subprocess.PIPE, text=True
    )
    assert "opened 3" in again.stdout.splitlines()

    expected = {record["step"]: record["loss"] for record in lines(run / "metrics.jsonl")} | {100: 0.5}
    assert set(expected) == {1, 2, 3, 100}
    (losses,) = (run / "mlflow").glob("*/*/metrics/loss")  # of one run
    found = [line.split() for line in losses.read_text().splitlines()]
    assert {int(step): float(loss) for _, loss, step in found} == expected
    (database,) = (run / "trackio").glob("yard*.db")
    with sqlite3.connect(database) as connection:
        rows = connection.execute("select run_name, step, metrics from metrics").fetchall()
    values = {step: json.loads(text)["loss"] for _, step, text in rows if "loss" in json.loads(text)}
    assert values == pytest.approx(expected) and {name for name, _, _ in rows} == {"mine"}
    assert len(list((run / "wandb").glob("offline-run-*-mine"))) == 2, "both parts have the id of the run"
