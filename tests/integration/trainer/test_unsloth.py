"""backend=unsloth and backend=auto with a stand-in for the package, because unsloth does not import without CUDA.

Real: the choice, the import before transformers, the model in the trainer, checkpoints and the adapter. Simulated: CUDA, and
the package, whose `FastLanguageModel` calls transformers and peft, and marks the class that it patches.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from tables import table
from trainer_runs import losses

from trainer.loop import unsloth_backend
from trainer.spec import make_spec

STAND_IN = """
import os, sys
early = "transformers" not in sys.modules and "peft" not in sys.modules
if os.environ.get("BROKEN"):
    raise NotImplementedError("Unsloth cannot find any torch accelerator? You need a GPU.")
assert os.environ["UNSLOTH_RETURN_LOGITS"] == os.environ["UNSLOTH_DISABLE_STATISTICS"] == "1"
import peft, transformers
transformers.LlamaForCausalLM.patched_by_unsloth = True

class FastLanguageModel:
    @staticmethod
    def from_pretrained(name, max_seq_length, load_in_4bit, dtype):
        print(f"stand-in: early={early} dtype={dtype} 4bit={load_in_4bit} length={max_seq_length}")
        return transformers.AutoModelForCausalLM.from_pretrained(name, dtype=dtype), None

    @staticmethod
    def get_peft_model(model, use_gradient_checkpointing, random_state, **options):
        assert type(model).patched_by_unsloth and not use_gradient_checkpointing
        return peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **options))
"""
PROGRAM = """
import sys
from trainer import __main__ as program
from trainer.loop import unsloth_backend
unsloth_backend.has_cuda = lambda: %r
sys.exit(program.main(sys.argv[1:]))
"""


@pytest.fixture
def train(model_folder: Path, dataset: Path, tmp_path: Path) -> Any:
    package = tmp_path / "packages" / "unsloth"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(STAND_IN)
    environment = os.environ | {"PYTHONPATH": f"{package.parent}:{Path(__file__).parents[3]}", "OMP_NUM_THREADS": "1"}

    def run(name: str, *flags: str, cuda: bool = True, **more: str) -> subprocess.CompletedProcess[str]:
        fields = f"--run-name={name} --model={model_folder} --dataset={dataset} --seq-length=64 --total-batch-size=4 "
        fields += f"--loggers=none --precision=bf16-mixed --packing=true --seed=3 --data-dir={tmp_path}"
        command = [sys.executable, "-c", PROGRAM % cuda, *fields.split(), *flags]
        return subprocess.run(command, env=environment | more, capture_output=True, text=True, timeout=120, check=False)

    return run


@pytest.mark.slow
@pytest.mark.long
def test_auto_takes_unsloth_on_cuda_and_resumes_with_it_only(train: Any, tmp_path: Path) -> None:
    first = train("auto", "--max-steps=2", "--checkpoint-interval=1")
    assert first.returncode == 0, first.stderr
    assert "stand-in: early=True dtype=torch.bfloat16 4bit=False length=64" in first.stdout
    assert "backend: unsloth, because every rank has CUDA and the package" in first.stdout
    assert (tmp_path / "runs" / "auto" / "adapter" / "adapter_model.safetensors").exists()
    peft = train("peft", "--max-steps=2", "--backend=peft")
    assert "stand-in" not in peft.stdout
    assert losses(tmp_path / "runs" / "auto") == pytest.approx(losses(tmp_path / "runs" / "peft"), abs=1e-3)
    (tmp_path / "runs" / "auto" / "result.json").unlink()
    other = train("auto", "--max-steps=2", "--checkpoint-interval=1", BROKEN="1")
    assert "backend: unsloth is unavailable (Unsloth cannot find any torch accelerator?" in other.stdout
    assert "backend: auto chose unsloth when run auto started, and now peft" in other.stderr


@pytest.mark.slow
def test_unsloth_that_does_not_import_is_one_line(train: Any) -> None:
    broken = train("x", "--max-steps=1", "--backend=unsloth", BROKEN="1")
    assert broken.returncode == 1 and "Traceback" not in broken.stderr
    assert "run site.yml with python_flavour=unsloth, or set backend=peft" in broken.stderr
    without = train("y", "--max-steps=1", "--backend=unsloth", cuda=False)
    assert "error: backend: unsloth needs an NVIDIA GPU with CUDA" in without.stderr


@pytest.mark.long
def test_unsloth_refuses_what_peft_refuses(train: Any, model_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "missing"
    shutil.copytree(model_folder, folder)
    (tensors := load_file(folder / "model.safetensors")).pop("model.norm.weight")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    missing = train("x", "--max-steps=1", "--backend=unsloth", f"--model={folder}")
    assert missing.returncode == 1 and "the files lack model.norm.weight: copy or download" in missing.stderr
    target = train("y", "--max-steps=1", "--backend=unsloth", "--lora-targets=q_proj,v_porj")
    assert target.returncode == 1 and "error: lora_targets: v_porj: no layer of " in target.stderr


@pytest.mark.parametrize(("fields", "used"), table("unsloth")["runs_that_may_use_unsloth"])
def test_runs_that_may_use_unsloth(fields: dict[str, Any], used: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unsloth_backend.importlib.util, "find_spec", lambda name: object())
    assert unsloth_backend.may_use(make_spec(fields, "")) == used
    monkeypatch.setattr(unsloth_backend.importlib.util, "find_spec", lambda name: None)
    assert unsloth_backend.may_use(make_spec(fields, "")) == (fields.get("backend") == "unsloth")
