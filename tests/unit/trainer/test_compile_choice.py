"""torch_compile=auto: where it is possible, what the ranks decide, and what a resumed run keeps."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tables import table
from test_decisions import EIGHT, ONE, card, cpu
from trainer_runs import Here

from trainer.config import RunSpec
from trainer.model_files.model_shape import read_shape
from trainer.planner import agreement
from trainer.planner.agreement import agree, agree_compile
from trainer.planner.decisions import decide
from trainer.spec import make_spec, read_spec

LARGE = [card(80, 9.0)]
SHAPE = read_shape(ONE)
REASON = "auto: torch_compile=false: "


def test_ranks_on_gpus_decide_whether_compiling_pays() -> None:
    spec, lines = decide(make_spec({"model": "x"}, "here"), LARGE, SHAPE)
    assert spec.automatic == ("torch_compile",) and not spec.torch_compile
    assert lines[-1].startswith("auto: torch_compile: true on GPUs if the run has 2,000 steps or more")
    spec, lines = decide(make_spec({"model": "x", "torch_compile": True}, "here"), LARGE, SHAPE)
    assert spec.torch_compile and spec.automatic == () and not any("torch_compile" in line for line in lines)
    spec, lines = decide(make_spec({"model": "x"}, "here"), [cpu(16)], SHAPE)
    assert spec.automatic == () and not any("torch_compile" in line for line in lines)


@pytest.mark.parametrize(("fields", "facts", "why"), table("compile_choice")["why_a_run_is_not_compiled"], ids=str)
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


@pytest.mark.parametrize(("steps", "device", "compiled", "why"), table("compile_choice")["a_long_run_on_gpus"])
def test_long_runs_compile(steps: int, device: str, compiled: bool, why: str, undecided: RunSpec, capsys: Any) -> None:
    ranks: Any = Ranks()
    ranks.device.type = device
    found = agree_compile(undecided, steps, ranks)
    assert found.torch_compile is compiled and found.automatic == ()
    assert capsys.readouterr().out == f"auto: torch_compile={str(compiled).lower()}: {why}\n"
    for value in (False, True):
        spec = undecided.model_copy(update={"torch_compile": value, "automatic": ()})
        assert agree_compile(spec, 10**6, None) == spec  # type: ignore[arg-type]


def test_ranks_that_decide_together_leave_it_to_the_steps(undecided: RunSpec) -> None:
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

    def agree_here(spec: RunSpec, steps: int, world: Any) -> RunSpec:
        calls.append(steps)
        return spec.model_copy(update={"torch_compile": compiled, "automatic": ()})

    undecided = {"automatic": ("torch_compile",)}
    later = lambda spec, hosts: (spec.model_copy(update=undecided), [])  # noqa: E731
    monkeypatch.setattr("trainer.planner.decisions._with_compile", later)
    monkeypatch.setattr(agreement, "agree_compile", agree_here)
    asked: list[Any] = []
    monkeypatch.setattr(torch, "compile", lambda model: asked.append(model) or model)
    monkeypatch.setattr("trainer.loop.training_inputs.require_compiler", lambda device: None)
    fields = {"precision": "32-true", "gradient_checkpointing": False, "quantize": "none", "checkpoint_interval": 2}
    assert here(**fields) == 0, here.err
    assert bool(asked) is compiled
    steps = here.result()["steps"]
    assert calls[0] == pytest.approx(steps, rel=0.3)
    written = read_spec(here.run_dir() / "spec.yml", {}, "here")
    assert (written.torch_compile, written.automatic) == (compiled, ())
    assert written.model == str(here.model), "the rest is what the user gave"
    (here.run_dir() / "result.json").unlink()
    assert here(**fields) == 0, here.err
    assert f"this run started with torch_compile={str(compiled).lower()}" in here.out and len(calls) == 1


def test_eight_billion_weights_on_a_large_card_may_be_compiled() -> None:
    spec, _ = decide(make_spec({"model": "x", "batch_size": 1}, "here"), LARGE, read_shape(EIGHT))
    assert spec.automatic == ("torch_compile",)
