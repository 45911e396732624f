"""torch_compile=auto: where it is possible, what the ranks measure, and what a resumed run keeps."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_decisions import EIGHT, ONE, card, cpu
from trainer_runs import Here

from trainer.config import RunSpec
from trainer.model_files.model_shape import read_shape
from trainer.planner import agreement
from trainer.planner.agreement import agree, agree_compile
from trainer.planner.decisions import decide
from trainer.planner.measure import layers_seconds
from trainer.spec import make_spec, read_spec

LARGE = [card(80, 9.0)]
SHAPE = read_shape(ONE)
REASON = "auto: torch_compile=false: "


def test_ranks_on_gpus_measure_whether_compiling_pays() -> None:
    spec, lines = decide(make_spec({"model": "x"}, "here"), LARGE, SHAPE)
    assert spec.automatic == ("torch_compile",) and not spec.torch_compile
    assert lines[-1].startswith("auto: torch_compile: true if the ranks measure that compiling saves more time than it")
    spec, lines = decide(make_spec({"model": "x", "torch_compile": True}, "here"), LARGE, SHAPE)
    assert spec.torch_compile and spec.automatic == () and not any("torch_compile" in line for line in lines)
    spec, lines = decide(make_spec({"model": "x"}, "here"), [cpu(16)], SHAPE)
    assert spec.automatic == ("precision",) and not any("torch_compile" in line for line in lines)


@pytest.mark.parametrize(
    ("fields", "facts", "why"),
    [
        ({"strategy": "deepspeed"}, {}, "true requires strategy ddp"),
        ({"method": "dpo", "dataset": "pairs.jsonl"}, {}, "true requires method sft"),
        ({"packing": False}, {}, "rows that are not packed"),
        ({"quantize": "nf4"}, {}, "4-bit weights"),
        ({"backend": "unsloth", "precision": "bf16-mixed"}, {}, "backend=unsloth"),
        ({"strategy": "diloco", "diloco_membership": "torchft"}, {}, "replicas with a torchrun each"),
        ({}, {"compiler": False}, "a host has no C++ compiler: install g++"),
    ],
    ids=str,
)
def test_why_a_run_is_not_compiled(fields: dict[str, Any], facts: dict[str, Any], why: str, monkeypatch: Any) -> None:
    monkeypatch.setattr("trainer.costs.teacher_cost.shape_of", lambda spec: SHAPE)
    spec = make_spec({"model": "x", "batch_size": 8} | fields, "here")
    found, lines = decide(spec, [LARGE[0] | facts, LARGE[0]], SHAPE)
    assert "torch_compile" not in found.automatic and not found.torch_compile
    assert [line for line in lines if "torch_compile" in line and line.startswith(REASON + why)], lines


class Ranks:
    """The world of the first of two ranks on GPUs; the other one answers in turn."""

    def __init__(self, *others: Any) -> None:
        self.rank, self.size, self.device, self._others = 0, 2, SimpleNamespace(type="cuda"), iter(("cuda", *others))

    def gather(self, value: Any) -> list[Any]:
        return [value, next(self._others)]


@pytest.fixture
def undecided() -> RunSpec:
    spec, _ = decide(make_spec({"model": "x", "batch_size": 8}, "here"), LARGE, SHAPE)
    assert spec.automatic == ("torch_compile",)
    return spec


SLOW, FAST = ((0.2, 0.0), ""), ((0.1, 20.0), "")


@pytest.mark.parametrize(
    ("steps", "here", "there", "compiled", "why"),
    [
        (2000, [0.2, (0.1, 20.0)], [*SLOW, *FAST], True, "layers are 2.00 times as fast, which saves 400 s of this run; compiling takes about 60 s"),
        (2000, [0.2, (0.1, 20.0)], [*SLOW, (0.1, 150.0), ""], False, "takes about 450 s"),
        (2000, [0.2, (0.1, 20.0)], [*SLOW, (0.185, 1.0), ""], False, "layers are 1.08 times as fast"),
        (100, [0.2], SLOW, False, "the run is short, about 40 s in the layers of the model"),
        (2000, [0.2], [(0.0, 0.0), "OSError: no config.json"], False, "the model cannot be measured: OSError: no config"),
        (2000, [0.2, RuntimeError("Cannot find a working triton\nmore")], [*SLOW, *FAST], False, "it fails here: Cannot find a working triton"),
        (2000, [0.2, (0.1, 20.0)], [*SLOW, (0.0, 0.0), "no gcc"], False, "it fails here: no gcc"),
    ],
)  # fmt: skip
def test_ranks_agree_whether_to_compile(
    steps: int,
    here: list[Any],
    there: list[Any],
    compiled: bool,
    why: str,
    undecided: RunSpec,
    monkeypatch: Any,
    capsys: Any,
) -> None:
    """`here`: seconds of the layers as they are, and compiled with the time for it; 32 rows are 2 micro-batches of each rank."""
    answers: Iterator[Any] = iter(here)

    def measured(spec: RunSpec, device: Any, *, compiled: bool) -> tuple[float, float]:
        found = next(answers)
        if isinstance(found, Exception):
            raise found
        assert isinstance(found, tuple) is compiled
        return found if compiled else (found, 0.0)

    monkeypatch.setattr(agreement, "layers_seconds", measured)
    found = agree_compile(undecided, steps, Ranks(*there))  # type: ignore[arg-type]
    assert found.torch_compile is compiled and found.automatic == ()
    [line] = capsys.readouterr().out.splitlines()
    assert line.startswith(f"auto: torch_compile={str(compiled).lower()}: ") and why in line
    assert next(answers, None) is None, "it measures no more than it needs"


def test_what_is_decided_is_not_measured(undecided: RunSpec, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr(agreement, "layers_seconds", None)
    for value in (False, True):
        spec = undecided.model_copy(update={"torch_compile": value, "automatic": ()})
        assert agree_compile(spec, 10**6, None) == spec  # type: ignore[arg-type]
    ranks: Any = Ranks()
    assert not agree_compile(undecided.model_copy(update={"backend": "unsloth"}), 10**6, ranks).torch_compile
    mixed: Any = Ranks()
    mixed.device.type = "cpu"
    assert not agree_compile(undecided, 10**6, mixed).torch_compile
    assert "a rank trains on a CPU" in capsys.readouterr().out


def test_ranks_that_decide_together_leave_it_to_the_measurement(undecided: RunSpec) -> None:
    def answer(spec: RunSpec, started: bool) -> dict[str, Any]:
        return {name: getattr(spec, name) for name in agreement.DECIDED} | {"started": started}

    def agreed(other: RunSpec, started: bool) -> RunSpec:
        world: Any = SimpleNamespace(rank=0, gather=lambda value: [value, answer(other, started)])
        return agree(undecided, False, world)

    assert agreed(undecided, False).automatic == ("torch_compile",)
    off = undecided.model_copy(update={"automatic": ()})
    assert agreed(off, False).automatic == ()
    compiled = undecided.model_copy(update={"automatic": (), "torch_compile": True})
    assert agreed(compiled, True) == compiled, "a rank that joins takes what the run has"


@pytest.mark.parametrize("compiled", [True, False])
def test_a_resumed_run_keeps_the_choice(compiled: bool, here: Here, monkeypatch: Any) -> None:
    """Where a GPU would be, this CPU stands in; compiling itself has tests of its own."""
    calls: list[int] = []

    def saves_time(spec: RunSpec, passes: int, world: Any) -> tuple[bool, str]:
        calls.append(passes)
        return compiled, "a reason"

    monkeypatch.setattr("trainer.planner.decisions._with_compile", lambda spec, hosts: (spec, []))
    monkeypatch.setattr(agreement, "_saves_time", saves_time)
    asked: list[Any] = []
    monkeypatch.setattr(torch, "compile", lambda model: asked.append(model) or model)
    monkeypatch.setattr("trainer.loop.training_inputs.require_compiler", lambda device: None)
    fields = {"precision": "32-true", "gradient_checkpointing": False, "quantize": "none", "checkpoint_interval": 2}
    assert here(**fields) == 0, here.err
    assert f"auto: torch_compile={str(compiled).lower()}: a reason" in here.out and bool(asked) is compiled
    steps = here.result()["steps"]
    assert calls[0] == pytest.approx(2 * steps, rel=0.3), "two micro-batches of each step"
    written = read_spec(here.run_dir() / "spec.yml", {}, "here")
    assert (written.torch_compile, written.automatic) == (compiled, ())
    assert written.model == str(here.model), "the rest is what the user gave"
    (here.run_dir() / "result.json").unlink()
    assert here(**fields) == 0, here.err
    assert f"this run started with torch_compile={str(compiled).lower()}" in here.out and len(calls) == 1


@pytest.mark.slow
@pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="torch.compile needs a C++ compiler")
def test_the_layers_are_measured_with_and_without_compiling(model_folder: Path) -> None:
    spec = make_spec({"model": str(model_folder), "seq_length": 32, "batch_size": 2}, "here")
    state = torch.get_rng_state()
    eager, nothing = layers_seconds(spec, torch.device("cpu"), compiled=False)
    compiled, compiling = layers_seconds(spec, torch.device("cpu"), compiled=True)
    assert nothing == 0 and 0 < eager < 10 and 0 < compiled < 10
    assert compiling > 10 * compiled, "the first micro-batch includes the compiler"
    assert torch.equal(torch.get_rng_state(), state)


def test_eight_billion_weights_on_a_large_card_may_be_compiled() -> None:
    spec, _ = decide(make_spec({"model": "x", "batch_size": 1}, "here"), LARGE, read_shape(EIGHT))
    assert spec.automatic == ("torch_compile",)
