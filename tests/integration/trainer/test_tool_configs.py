"""Config files for other tools, each read by the tool itself."""

from __future__ import annotations

import base64
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tables import table
from trainer_runs import ACCELERATED_LOOP, TOP, free_port

from trainer.__main__ import main
from trainer.model_files.model_shape import layer_class
from trainer.strategy.pipeline_split import PIPELINE_KINDS


def config(capsys: Any, kind: str, *flags: str) -> str:
    assert main(["config", kind, *flags]) == 0, capsys.readouterr().err
    return capsys.readouterr().out


def on_free_port(text: str) -> str:
    return text.replace("29500", str(free_port()))


def run_all(commands: list[list[str]], folder: Path, **variables: str) -> list[Any]:
    """Run commands at the same time, and return the JSON value in the last line of each."""
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", **variables}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    started = [subprocess.Popen(command, cwd=folder, env=environment, **pipes) for command in commands]
    try:
        outputs = [each.communicate(timeout=300) for each in started]
    finally:
        for each in started:
            each.kill()
    assert not any(each.returncode for each in started), outputs[0][1][-3000:]
    return [json.loads(out.strip().splitlines()[-1]) for out, _ in outputs]


RUN_FILE = """
import json, sys
import torch, deepspeed
from torch import nn
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # needs a compiler
deepspeed.init_distributed(dist_backend="gloo")
torch.manual_seed(1)
model = nn.Linear(8, 8)
engine, *_ = deepspeed.initialize(model=model, config=json.load(open(sys.argv[1])))
for _ in range(2):
    loss = engine(torch.ones(4, 8, dtype=next(engine.parameters()).dtype)).float().square().mean()
    engine.backward(loss)
    engine.step()
zero = engine._config.zero_config
print(json.dumps([loss.item(), engine.get_lr(), zero.stage, zero.reduce_bucket_size, zero.overlap_comm, engine.global_steps]))
"""


@pytest.mark.slow
def test_deepspeed_trains_with_its_config(capsys: Any, tmp_path: Path) -> None:
    """DeepSpeed itself runs the file, with options of a user's own file in it."""
    pytest.importorskip("deepspeed", reason="deepspeed is not installed here")
    capsys.readouterr()  # DeepSpeed prints while it is imported
    own, file = tmp_path / "own.json", tmp_path / "ds.json"
    own.write_text('{"zero_optimization": {"stage": 1, "reduce_bucket_size": 4096, "overlap_comm": false}}')
    flags = ["--total-batch-size=4", "--max-steps=10", "--warmup=2", "--schedule=linear", "--lr=0.01"]
    file.write_text(config(capsys, "deepspeed", f"--deepspeed={own}", "--deepspeed-stage=1", *flags))
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    rank["MASTER_PORT"] = str(free_port())
    [found] = run_all([[sys.executable, "-c", RUN_FILE, str(file)]], tmp_path, DS_ACCELERATOR="cpu", **rank)
    loss, rate, stage, size, overlap, steps = found
    assert rate == [0.005], "the first step of two of the warmup"
    assert loss > 0 and (stage, size, overlap, steps) == (1, 4096, False, 2)


def test_transformers_reads_the_fsdp_config(capsys: Any, tmp_path: Path, model_folder: Path) -> None:
    from transformers import TrainingArguments

    (tmp_path / "fsdp.json").write_text(config(capsys, "fsdp", f"--model={model_folder}"))
    read = TrainingArguments(
        output_dir=str(tmp_path), fsdp="full_shard", fsdp_config=str(tmp_path / "fsdp.json"), use_cpu=True
    )
    assert read.fsdp_config["transformer_layer_cls_to_wrap"] == ["LlamaDecoderLayer"]


@pytest.mark.parametrize("kind", [*PIPELINE_KINDS, "granite"])
def test_the_layer_class_is_that_of_transformers(kind: str) -> None:
    module = importlib.import_module(
        f"transformers.models.{kind.removesuffix('_text')}.modeling_{kind.removesuffix('_text')}"
    )
    assert hasattr(module, layer_class(kind))


@pytest.mark.parametrize(
    ("flags", "distributed_type"),
    table("tool_configs")["accelerate_reads_the_options_of_strategies"],
    ids=["fsdp", "deepspeed", "fp16", "one process"],
)
def test_accelerate_reads_the_options_of_strategies(
    flags: list[str], distributed_type: str, model_folder: Path, capsys: Any, tmp_path: Path
) -> None:
    from accelerate.commands.config.config_args import load_config_from_file

    file = tmp_path / "accelerate.yaml"
    file.write_text(config(capsys, "accelerate", f"--model={model_folder}", "--head=10.0.0.1", *flags))
    read = load_config_from_file(str(file))
    assert read.distributed_type == distributed_type and read.main_process_ip == "10.0.0.1"
    assert (read.num_processes, read.use_cpu) == ((1, True) if distributed_type == "NO" else (2, False))
    if distributed_type == "FSDP":
        assert read.fsdp_config["fsdp_reshard_after_forward"] is False and read.mixed_precision == "bf16"
    elif distributed_type == "DEEPSPEED":
        zero = json.loads(base64.b64decode(read.deepspeed_config["deepspeed_config_file"]))["zero_optimization"]
        assert zero["stage"] == 3 and zero["offload_param"]["device"] == "cpu" and zero["reduce_bucket_size"] > 0
    elif distributed_type == "MULTI_GPU":
        assert read.mixed_precision == "fp16" and read.dynamo_config["dynamo_backend"] == "INDUCTOR"


ACCELERATED = f"""
import json, sys
import torch
from accelerate import Accelerator
from transformers import AutoModelForCausalLM
accelerator = Accelerator()
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
rows = torch.utils.data.DataLoader(torch.arange(64).view(4, 16), batch_size=2)
{ACCELERATED_LOOP}total = sum(float(weight.detach().double().sum()) for weight in model.parameters())
print(json.dumps([accelerator.num_processes, accelerator.mixed_precision, losses, total]))
"""


@pytest.mark.long
def test_accelerate_launch_trains_with_its_config(capsys: Any, tmp_path: Path, model_folder: Path) -> None:
    """Two hosts train one model on different rows."""
    file, script = tmp_path / "accelerate.yaml", tmp_path / "train.py"
    script.write_text(ACCELERATED)
    assert main(["config", "accelerate", "--hosts=2", "--no-gpu", "--precision=bf16-mixed"]) == 0
    written = capsys.readouterr()
    name, _, value = written.err.splitlines()[-1].partition("ACCELERATE_USE_CPU=")
    assert name.startswith("without GPUs") and value.split()[0] == "true"
    file.write_text(on_free_port(written.out))
    launch = [str(Path(sys.executable).with_name("accelerate")), "launch", f"--config_file={file}"]
    commands = [[*launch, f"--machine_rank={host}", str(script), str(model_folder)] for host in (0, 1)]
    found = run_all(commands, tmp_path, ACCELERATE_USE_CPU="true")
    assert [each[:2] for each in found] == [[2, "bf16"]] * 2
    assert found[0][3] == found[1][3] and found[0][2] != found[1][2] and found[0][2][-1] < found[0][2][0]


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
    assert not {"--partition", "--time"} & set(file.read_text().split())
    flags = ["--partition=gpu,cpu", "--time=1-00:00:00", "--env=NCCL_DEBUG=INFO", "--env", "NOTE=it's $HOME"]
    file.write_text(config(capsys, "slurm", "--hosts=2", *flags))
    subprocess.run(["bash", "-n", str(file)], check=True)
    header = [line for line in file.read_text().splitlines() if line.startswith("#SBATCH")]
    assert {"#SBATCH --partition=gpu,cpu", "#SBATCH --time=1-00:00:00", "#SBATCH --gpus-per-node=1"} <= set(header)
    flags = ["--account=me", "--gres=gpu:a100:4,nvme:1", "--slurm-cpus=16", "--mem=64G", "--slurm-time=60"]
    text = config(capsys, "slurm", "--hosts=2", *flags)
    options = ("account=me", "gres=gpu:a100:4,nvme:1", "cpus-per-task=16", "mem=64G", "time=60")
    assert {f"#SBATCH --{option}" for option in options} <= set(text.splitlines())
    assert "--gpus-per-node" not in text and "--exclusive" not in text and "--nproc-per-node=4 " in text


def test_slurm_starts_torchrun_with_the_variables_and_the_nic_of_every_node(capsys: Any, tmp_path: Path) -> None:
    """Stands in for srun, scontrol and torchrun. tests/lab/test_config_slurm_hosts.py runs the script with Slurm."""
    for name, text in {
        "scontrol": "echo localhost",
        "srun": 'while [ "${1#--}" != "$1" ]; do shift; done; SLURM_NNODES=2 exec "$@"',
        "python": 'echo "$NOTE|$NCCL_DEBUG|$NCCL_SOCKET_IFNAME|$GLOO_SOCKET_IFNAME|$*"',
    }.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    file = tmp_path / "it.sbatch"
    flags = ["--hosts=2", "--run=r", "--max-steps=7", "--env=NCCL_DEBUG=INFO", "--env=NOTE=it's $HOME", "--no-gpu"]
    file.write_text(config(capsys, "slurm", *flags))
    environment = {"PATH": f"{tmp_path}:/usr/sbin:/usr/bin:/sbin:/bin", "SLURM_JOB_NODELIST": "localhost"}
    for node, data in (("0", tmp_path), ("1", tmp_path / "runs/r/nodes/1")):  # the nodes share the folder of the run
        environment["SLURM_NODEID"] = node
        done = subprocess.run(
            ["bash", str(file)], env=environment, cwd=tmp_path, capture_output=True, text=True, check=False
        )
        torchrun = f"-m torch.distributed.run --nnodes=2 --node-rank={node} "
        assert done.stdout.startswith(f"it's $HOME|INFO|lo|lo|{torchrun}"), done
        trains = f"-m -- trainer train --run=r --max-steps=7 --data-dir={data}\n"
        assert done.stdout.endswith(f"--master-addr=localhost --master-port=29500 {trains}") and data.is_dir()


@pytest.mark.slow
def test_the_launcher_trains(capsys: Any, tmp_path: Path, model_folder: Path, dataset: Path) -> None:
    flags = [f"--model={model_folder}", f"--dataset={dataset}"]
    flags += ["--run=r", "--max-steps=1", "--loggers=none", "--seq-length=32", "--total-batch-size=2", "--batch-size=1"]
    file = tmp_path / "it.sh"
    file.write_text(on_free_port(config(capsys, "launcher", "--hosts=1", "--env=NOTE=on", *flags, "--lora-r=4")))
    environment = os.environ | {"PYTHONPATH": str(TOP), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    command = ["bash", str(file), "0"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads((tmp_path / "runs/r/result.json").read_text())["step"] == 1


@pytest.mark.parametrize(("words", "why"), table("wrong_tool_configs"), ids=" ".join)
def test_what_a_file_cannot_say_is_refused_in_one_line(words: list[str], why: str, capsys: Any) -> None:
    assert main(["config", *words]) == 2
    captured = capsys.readouterr()
    last = captured.err.splitlines()[-1]
    assert last.startswith("error: ") and why in last and not captured.out


def test_the_flags_of_other_scripts_write_files(tmp_path: Path, capsys: Any) -> None:
    def written(kind: str, *flags: str) -> str:
        path = tmp_path / kind
        assert config(capsys, kind, f"--output={path}", "--num_nodes", "2", "--num_gpus_per_node=4", *flags) == ""
        return path.read_text()

    zero = json.loads(written("deepspeed", "--zero_stage", "2", "--offload_optimizer", "--bf16"))
    assert zero["zero_optimization"]["stage"] == 2 and zero["zero_optimization"]["offload_optimizer"]["device"] == "cpu"
    assert zero["bf16"]["enabled"] and zero["train_batch_size"] == 32, "a multiple of 4 x 8"
    capsys.readouterr()
    assert json.loads(config(capsys, "deepspeed", "--num_gpus_per_node=3"))["train_batch_size"] == 24
    assert json.loads(config(capsys, "deepspeed", "lr=1e-3", "--use-deepspeed", "epochs=3"))["optimizer"]
    made = json.loads(written("fsdp", "--sharding_strategy", "SHARD_GRAD_OP", "--mixed_precision", "bf16"))
    assert made["reshard_after_forward"] is False
    where = ["--master_addr", "10.0.0.1", "--master_port", "29501"]
    script = written("launcher", *where, "--node_rank", "1", "--use_deepspeed")
    assert '--nnodes=2 --node-rank="${1:-1}" --nproc-per-node=4' in script and "--master-port=29501" in script
    assert "HEAD=10.0.0.1" in script and script.rstrip().endswith("trainer train --strategy=deepspeed")
    assert os.access(tmp_path / "launcher", os.X_OK)
    job = written("slurm", "--time_limit", "12:00:00", "--prologue", "module load cuda").splitlines()
    assert "#SBATCH --time=12:00:00" in job and job.index("module load cuda") < job.index("set -euo pipefail")


def test_a_closed_pipe_is_not_a_traceback() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "trainer", "fields"]
    done = subprocess.run(command, cwd=TOP, stdout=writing, stderr=subprocess.PIPE, timeout=60, check=False)
    os.close(writing)
    assert (done.returncode, done.stderr) == (1, b"")


# FSDP and DeepSpeed of other tools on a tiny model. accelerate and transformers use FSDP only with GPUs: the scripts say that
# CPUs with gloo are GPUs; everything else is theirs.
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
SHARDED = f"""{CPUS_FOR_GPUS}
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


def two_hosts(folder: Path, processes: int) -> str:
    """Return the value of --hosts for two hosts with as many processes each."""
    file = folder / "hosts.json"
    file.write_text(json.dumps([{"host": name, "processes": processes} for name in "ab"]))
    return f"--hosts={file}"


@pytest.mark.long
@pytest.mark.parametrize(
    ("shard", "processes", "parts"),
    [("all", 1, [[2], ["S(0)"], 2]), ("host", 2, [[2, 2], ["R", "S(0)"], 2])],
    ids=["all", "host"],
)
def test_accelerate_shards_as_its_config_says(
    shard: str, processes: int, parts: list[Any], capsys: Any, tmp_path: Path, model_folder: Path
) -> None:
    file, script = tmp_path / "accelerate.yaml", tmp_path / "train.py"
    script.write_text(SHARDED)
    flags = [f"--model={model_folder}", "--strategy=fsdp", f"--fsdp-shard={shard}", "--head=127.0.0.1"]
    file.write_text(on_free_port(config(capsys, "accelerate", two_hosts(tmp_path, processes), *flags)))
    launch = [str(Path(sys.executable).with_name("accelerate")), "launch", f"--config_file={file}"]
    commands = [[*launch, f"--machine_rank={host}", str(script), str(model_folder)] for host in (0, 1)]
    for kind, count, losses, found in run_all(commands, tmp_path):
        assert (kind, count, found) == ("FSDP", 2 * processes, parts) and losses[-1] < losses[0]


@pytest.mark.long
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


@pytest.mark.long
def test_accelerate_trains_with_a_users_own_file_of_deepspeed(capsys: Any, tmp_path: Path, model_folder: Path) -> None:
    pytest.importorskip("deepspeed", reason="deepspeed is not installed here")
    capsys.readouterr()  # DeepSpeed prints while it is imported
    own, file, script = tmp_path / "own.json", tmp_path / "accelerate.yaml", tmp_path / "train.py"
    script.write_text(DEEPSPEED)
    schedule = {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 2, "total_num_steps": 10}}
    options = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2, "gradient_clipping": 0.5}
    zero = {"stage": 1, "reduce_bucket_size": 4096.0}
    own.write_text(json.dumps(options | {"zero_optimization": zero, "scheduler": schedule}))
    text = config(capsys, "accelerate", f"--model={model_folder}", f"--deepspeed={own}", "--lr=0.01")
    file.write_text(on_free_port(text))
    launch = [str(Path(sys.executable).with_name("accelerate")), "launch", f"--config_file={file}"]
    [found] = run_all([[*launch, str(script), str(model_folder)]], tmp_path, DS_ACCELERATOR="cpu")
    assert found[:4] == ["DEEPSPEED", 1, 4096, 4] and found[5:] == ["WarmupDecayLR", 0.5, 2]
    assert found[4] == pytest.approx([0.01 * (10 - 3) / (10 - 2)]), "the rate of the fourth step"
