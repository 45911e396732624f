"""Config files for other tools, each read by the tool itself."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from trainer_runs import TOP

from trainer.__main__ import main
from trainer.planner.model_shape import layer_class


def config(capsys: Any, kind: str, *flags: str) -> str:
    assert main(["config", kind, *flags]) == 0, capsys.readouterr().err
    return capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "fp16-mixed"])
def test_deepspeed_reads_its_config(precision: str, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setenv("WORLD_SIZE", "4")
    runtime = pytest.importorskip("deepspeed.runtime.config", reason="deepspeed is not installed here")
    text = config(capsys, "deepspeed", "--hosts=4", "--total-batch-size=32", f"--precision={precision}")

    class Four:
        """Replaces deepspeed.comm's mpu, which returns the number of data-parallel ranks."""

        def get_data_parallel_world_size(self) -> int:
            return 4

    # Without a process group DeepSpeed counts one rank and ignores mpu.
    monkeypatch.setattr(runtime.dist, "get_rank", lambda: 0)
    read = runtime.DeepSpeedConfig(json.loads(text), mpu=Four())
    assert (read.train_batch_size, read.train_micro_batch_size_per_gpu, read.gradient_accumulation_steps) == (32, 4, 2)
    assert read.optimizer_name == "adamw" and read.gradient_clipping == 1.0


def test_transformers_reads_the_fsdp_config(capsys: Any, tmp_path: Path, model_folder: Path) -> None:
    from transformers import TrainingArguments

    (tmp_path / "fsdp.json").write_text(config(capsys, "fsdp", f"--model={model_folder}"))
    read = TrainingArguments(
        output_dir=str(tmp_path), fsdp="full_shard", fsdp_config=str(tmp_path / "fsdp.json"), use_cpu=True
    )
    assert read.fsdp_config["transformer_layer_cls_to_wrap"] == ["LlamaDecoderLayer"]


@pytest.mark.parametrize(
    ("kind", "module"),
    [("llama", "llama"), ("qwen2", "qwen2"), ("qwen3", "qwen3"), ("gemma2", "gemma2"), ("gemma3_text", "gemma3"),
     ("phi3", "phi3"), ("mistral", "mistral"), ("olmo2", "olmo2"), ("smollm3", "smollm3"), ("granite", "granite"),
     ("gpt2", "gpt2"), ("gemma", "gemma")],
)  # fmt: skip
def test_the_layer_class_exists(kind: str, module: str) -> None:
    import importlib

    found = importlib.import_module(f"transformers.models.{module}.modeling_{module}")
    name = layer_class(kind)
    assert hasattr(found, name), [other for other in dir(found) if other.endswith(("Layer", "Block"))]


@pytest.mark.parametrize("flags", [["--hosts=2", "--no-gpu"], ["--hosts=2", "--precision=bf16-mixed"], ["--no-gpu"]])
def test_accelerate_reads_its_config(flags: list[str], capsys: Any, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    from accelerate.commands.config.config_args import load_config_from_file

    file = tmp_path / "accelerate.yaml"
    file.write_text(config(capsys, "accelerate", *flags, "--head=10.0.0.1"))
    read = load_config_from_file(str(file))
    assert read.num_processes == (2 if "--hosts=2" in flags else 1)
    assert read.main_process_ip == "10.0.0.1" and read.mixed_precision == (
        "bf16" if len(flags[1:]) and "bf16" in flags[1] else "no"
    )


def test_accelerate_needs_the_head_of_several_hosts(capsys: Any) -> None:
    assert main(["config", "accelerate", "--hosts=2", "--no-gpu"]) == 0
    captured = capsys.readouterr()
    assert "main_process_ip: 127.0.0.1" in captured.out and "--head=ADDRESS" in captured.err
    assert main(["config", "accelerate", "--hosts=1", "--no-gpu"]) == 0
    assert "--head" not in capsys.readouterr().err


def test_slurm(capsys: Any, tmp_path: Path) -> None:
    (tmp_path / "my run.yml").write_text("model: tiny\nrun: it\n")
    file = tmp_path / "it.sbatch"
    file.write_text(config(capsys, "slurm", str(tmp_path / "my run.yml"), "--hosts=2", "--no-gpu"))
    subprocess.run(["bash", "-n", str(file)], check=True)
    assert "#SBATCH --nodes=2" in file.read_text() and "--gpus-per-node" not in file.read_text()


@pytest.mark.skipif(not shutil.which("sbatch"), reason="sbatch --test-only needs Slurm, which is not installed")
def test_sbatch_accepts_the_script(capsys: Any, tmp_path: Path) -> None:
    file = tmp_path / "it.sbatch"
    file.write_text(config(capsys, "slurm", "--hosts=1", "--no-gpu"))
    done = subprocess.run(["sbatch", "--test-only", str(file)], capture_output=True, text=True, check=False)
    assert done.returncode == 0 or "Unable to contact" in done.stderr, done.stderr


def test_invalid_arguments_of_config(capsys: Any) -> None:
    assert main(["config", "horovod"]) == 2
    assert "config: expected one of deepspeed, fsdp, accelerate, slurm, got horovod" in capsys.readouterr().err
    assert main(["config", "deepspeed", "--hosts=3", "--total-batch-size=16"]) == 2
    assert "are not a multiple of batch_size 4 x 3 processes" in capsys.readouterr().err


def test_a_closed_pipe_is_not_a_traceback() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "trainer", "fields"]
    done = subprocess.run(command, cwd=TOP, stdout=writing, stderr=subprocess.PIPE, timeout=60, check=False)
    os.close(writing)
    assert (done.returncode, done.stderr) == (1, b"")
