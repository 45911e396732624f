"""Config files with FSDP and DeepSpeed, each run by its tool on a tiny model.

accelerate and transformers use FSDP only with GPUs. The scripts say that CPUs with gloo are GPUs; everything else is theirs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from trainer_runs import ACCELERATED_LOOP, free_port

from trainer.__main__ import main

# Ranks share the pipe: a line is one write. A process of gloo that ends with its group can abort.
END = """
import json, os, sys
import torch
def end(value):
    os.write(1, (json.dumps(value) + chr(10)).encode())
    torch.distributed.destroy_process_group()
    os._exit(0)
"""
CPUS_FOR_GPUS = f"""{END}
from accelerate.state import DistributedType, PartialState
from transformers import AutoModelForCausalLM
PartialState._prepare_backend = lambda *arguments, **options: ("gloo", DistributedType.MULTI_GPU)
PartialState.set_device = lambda state: setattr(state, "device", torch.device("cpu"))
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
rows = torch.arange(256).view(16, 16) % 64
"""
ACCELERATED = f"""{CPUS_FOR_GPUS}
from accelerate import Accelerator
accelerator = Accelerator()
rows = torch.utils.data.DataLoader(rows, batch_size=2)
{ACCELERATED_LOOP}weight = model.model.layers[0].self_attn.q_proj.weight
parts = [list(weight.device_mesh.shape), [str(each) for each in weight.placements], weight.numel() // weight.to_local().numel()]
end([accelerator.distributed_type.value, accelerator.num_processes, losses, parts])
"""
TRAINER = f"""{CPUS_FOR_GPUS}
from transformers import Trainer, TrainingArguments
arguments = TrainingArguments(
    output_dir=sys.argv[2], fsdp=True, fsdp_config=sys.argv[3], per_device_train_batch_size=2, max_steps=6, learning_rate=1e-2,
    logging_steps=1, save_strategy="no", report_to="none", disable_tqdm=True,
)
trainer = Trainer(model=model, args=arguments, train_dataset=[{{"input_ids": row, "labels": row}} for row in rows])
trainer.train()
weight = trainer.model_wrapped.model.layers[0].self_attn.q_proj.weight
losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
end([trainer.accelerator.distributed_type.value, losses, weight.numel() // weight.to_local().numel()])
"""
DEEPSPEED = f"""{END}
import deepspeed
from accelerate import Accelerator
from accelerate.utils import DummyOptim, DummyScheduler
from transformers import AutoModelForCausalLM
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # needs a compiler
accelerator = Accelerator()
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
rows = torch.utils.data.DataLoader(torch.arange(64).view(4, 16), batch_size=2)
optimizer = DummyOptim(model.parameters())
model, optimizer, rows, schedule = accelerator.prepare(model, optimizer, rows, DummyScheduler(optimizer))
for _ in range(4):
    for batch in rows:
        with accelerator.accumulate(model):
            accelerator.backward(model(input_ids=batch, labels=batch).loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
zero = model._config.zero_config
end([
    accelerator.distributed_type.value, zero.stage, zero.reduce_bucket_size, model.global_steps, model.get_lr(),
    type(model.lr_scheduler).__name__, model.gradient_clipping(), accelerator.gradient_accumulation_steps,
])
"""


def config(capsys: Any, kind: str, *flags: str) -> str:
    assert main(["config", kind, *flags]) == 0, capsys.readouterr().err
    return capsys.readouterr().out.replace("29500", str(free_port()))


def run_all(commands: list[list[str]], folder: Path, **variables: str) -> list[Any]:
    """Run commands at the same time, and return the JSON value in the last line of each."""
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", **variables}
    started = [
        subprocess.Popen(
            command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for command in commands
    ]
    try:
        outputs = [each.communicate(timeout=300) for each in started]
    finally:
        for each in started:
            each.kill()
    assert not any(each.returncode for each in started), outputs[0][1][-3000:]
    return [json.loads(out.strip().splitlines()[-1]) for out, _ in outputs]


def two_hosts(folder: Path, processes: int) -> str:
    """Return the value of --hosts for two hosts with as many processes each."""
    file = folder / "hosts.json"
    file.write_text(json.dumps([{"host": name, "processes": processes} for name in "ab"]))
    return f"--hosts={file}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shard", "processes", "parts"),
    [("all", 1, [[2], ["S(0)"], 2]), pytest.param("host", 2, [[2, 2], ["R", "S(0)"], 2], marks=pytest.mark.long)],
    ids=["all", "host"],
)
def test_accelerate_shards_as_its_config_says(
    shard: str, processes: int, parts: list[Any], capsys: Any, tmp_path: Path, model_folder: Path
) -> None:
    file, script = tmp_path / "accelerate.yaml", tmp_path / "train.py"
    script.write_text(ACCELERATED)
    flags = [f"--model={model_folder}", "--strategy=fsdp", f"--fsdp-shard={shard}", "--head=127.0.0.1"]
    file.write_text(config(capsys, "accelerate", two_hosts(tmp_path, processes), *flags))
    launch = [str(Path(sys.executable).with_name("accelerate")), "launch", f"--config_file={file}"]
    commands = [[*launch, f"--machine_rank={host}", str(script), str(model_folder)] for host in (0, 1)]
    for kind, count, losses, found in run_all(commands, tmp_path):
        assert (kind, count, found) == ("FSDP", 2 * processes, parts) and losses[-1] < losses[0]


@pytest.mark.slow
def test_the_trainer_of_transformers_shards_with_its_fsdp_config(
    capsys: Any, tmp_path: Path, model_folder: Path
) -> None:
    file, script = tmp_path / "fsdp.json", tmp_path / "train.py"
    script.write_text(TRAINER)
    file.write_text(config(capsys, "fsdp", f"--model={model_folder}", "--fsdp-shard=gradients"))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}"]
    command = [*torchrun, str(script), str(model_folder), str(tmp_path / "out"), str(file)]
    [(kind, losses, parts)] = run_all([command], tmp_path)
    assert (kind, parts) == ("FSDP", 2) and losses[-1] < losses[0]


@pytest.mark.slow
def test_accelerate_trains_with_a_users_own_file_of_deepspeed(capsys: Any, tmp_path: Path, model_folder: Path) -> None:
    pytest.importorskip("deepspeed", reason="deepspeed is not installed here")
    capsys.readouterr()  # DeepSpeed prints while it is imported
    own, file, script = tmp_path / "own.json", tmp_path / "accelerate.yaml", tmp_path / "train.py"
    script.write_text(DEEPSPEED)
    own.write_text(
        json.dumps(
            {
                "zero_optimization": {"stage": 1, "reduce_bucket_size": 4096.0},
                "train_micro_batch_size_per_gpu": 2,
                "gradient_accumulation_steps": 2,
                "gradient_clipping": 0.5,
                "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 2, "total_num_steps": 10}},
            }
        )
    )
    file.write_text(config(capsys, "accelerate", f"--model={model_folder}", f"--deepspeed={own}", "--lr=0.01"))
    launch = [str(Path(sys.executable).with_name("accelerate")), "launch", f"--config_file={file}"]
    [found] = run_all([[*launch, str(script), str(model_folder)]], tmp_path, DS_ACCELERATOR="cpu")
    assert found[:4] == ["DEEPSPEED", 1, 4096, 4] and found[5:] == ["WarmupDecayLR", 0.5, 2]
    assert found[4] == pytest.approx([0.01 * (10 - 3) / (10 - 2)]), "the rate of the fourth step"
