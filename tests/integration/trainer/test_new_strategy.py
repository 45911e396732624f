"""A new strategy is one file and one registry line: it trains, is planned, and is listed by --help and in the docs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from trainer_runs import TOP

TOY = '''
"""A toy strategy: DDP with the sign of the gradient."""

from trainer.config import RunSpec
from trainer.strategy.ddp import DDP, DDPPlan


class ToyPlan(DDPPlan):
    auto = None

    def strategy_class(self, spec):
        return Toy

    def validate(self, spec: RunSpec) -> None:
        if spec.lora_r == 3:
            raise ValueError("toy: cannot count to three, got lora_r 3: set lora_r=4")

    def comm_bytes(self, spec, shape, layout, *, gloo):
        return super().comm_bytes(spec, shape, layout, gloo=gloo) / 32


PLAN = ToyPlan()


class Toy(DDP):
    def step(self, lr: float) -> float:
        for parameter in self.trained.values():
            if parameter.grad is not None:
                parameter.grad.sign_()
        return super().step(lr)
'''
LINE = '    "toy": "a toy that sends one bit of every gradient",\n'


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the project with the toy strategy."""
    copy = tmp_path_factory.mktemp("tree")
    ignored = shutil.ignore_patterns("__pycache__", ".*", "build", "*.egg-info")
    for name in ("trainer", "trainyard", "tools", "roles", "docs", "plugins", "group_vars"):
        shutil.copytree(TOP / name, copy / name, ignore=ignored)
    for file in TOP.glob("*.*"):
        if file.is_file():
            shutil.copy(file, copy)
    (copy / "trainer/strategy/toy.py").write_text(TOY.lstrip())
    registry = copy / "trainer/config/strategies.py"
    text = registry.read_text()
    assert text.count("STRATEGIES: dict[str, str] = {\n") == 1
    end = text.index("}\n", text.index("STRATEGIES: dict[str, str] = {"))
    registry.write_text(text[:end] + LINE + text[end:])
    return copy


def ask(tree: Path, *command: str) -> str:
    environment = os.environ | {"PYTHONPATH": str(tree), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, *command], cwd=tree, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
def test_a_new_strategy_trains(tree: Path, model_folder: Path, dataset: Path, tmp_path: Path) -> None:
    flags = [f"--model={model_folder}", f"--dataset={dataset}", "--seq-length=64", "--epochs=2", "--max-steps=3"]
    flags += ["--loggers=none", f"--data-dir={tmp_path}"]
    output = ask(tree, "-m", "trainer", "--strategy=toy", "--run=r", *flags)
    assert "run r finished at step 3/3" in output
    result = json.loads((tmp_path / "runs/r/result.json").read_text())
    assert result["strategy"] == "toy" and result["status"] == "finished"


def test_a_new_strategy_is_planned(tree: Path) -> None:
    plan = json.loads(ask(tree, "-m", "trainer", "plan", "--no-measure", "--hosts=2", "--json"))
    by = {option["strategy"]: option for option in plan["options"]}
    assert by["toy"]["comm_bytes"] == by["ddp"]["comm_bytes"] / 32
    assert plan["recommended"]["strategy"] == "ddp"


def test_a_new_strategy_is_validated(tree: Path) -> None:
    with pytest.raises(AssertionError, match="run spec: toy: cannot count to three, got lora_r 3"):
        ask(tree, "-m", "trainer", "check", "--strategy=toy", "--lora-r=3")


@pytest.mark.slow
def test_a_new_strategy_is_listed(tree: Path) -> None:
    summary = "a toy that sends one bit of every gradient"
    shown = ask(tree, "-m", "trainer", "--help")
    assert f"toy        {summary}" in shown and "averaging,toy" in shown.replace(" ", "").replace("\n", "")
    assert f"toy: {summary}" in ask(tree, "-m", "trainer", "fields")
    ask(tree, "tools/write_docs.py")
    assert f"toy: {summary}" in (tree / "docs/run-spec.md").read_text()
    assert f"| `toy` | {summary} |" in (tree / "docs/strategies.md").read_text()
