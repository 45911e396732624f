"""The run spec as other tools' config files: DeepSpeed, FSDP by transformers, accelerate, Slurm. No torch.

Each is loaded by the tool itself in tests/unit/trainer/test_tools.py.
"""

import json
import shlex
import sys
from typing import Any

import yaml

from trainer.config.run_spec import RunSpec
from trainer.errors import UserError
from trainer.planner.model_shape import shape_of
from trainer.planner.recommend import read_hosts

KINDS = ("deepspeed", "fsdp", "accelerate", "slurm")
_PORT = 29500
# The class that a shard is made of, where transformers' name is not the model type with a capital.
_LAYERS = {"gpt2": "GPT2Block", "olmo2": "Olmo2DecoderLayer", "smollm3": "SmolLM3DecoderLayer"}
_MIXED = {"32-true": "no", "bf16-mixed": "bf16", "fp16-mixed": "fp16"}


def layer_class(kind: str) -> str:
    """Return the name of transformers' class of one decoder layer of a model type."""
    plain = kind.removesuffix("_text")
    return _LAYERS.get(kind, plain[0].upper() + plain[1:] + "DecoderLayer")


def accumulation(spec: RunSpec, world: int) -> int:
    """Return micro-batches a step on every rank.

    Raises:
        UserError: the step's rows cannot be shared out evenly, which other tools insist on.
    """
    parts, rest = divmod(spec.rows_per_step, spec.batch_size * world)
    if rest or not parts:
        raise UserError(
            f"total_batch_size: {spec.rows_per_step} rows are not a multiple of batch_size {spec.batch_size} x "
            f"{world} processes, which other tools need: take total_batch_size={max(1, parts) * spec.batch_size * world}"
        )
    return parts


def deepspeed(spec: RunSpec, world: int) -> dict[str, Any]:
    """Return DeepSpeed's config: https://www.deepspeed.ai/docs/config-json/"""
    zero: dict[str, Any] = {"stage": getattr(spec, "deepspeed_stage", 2), "overlap_comm": True}
    offload = getattr(spec, "deepspeed_offload", "none")
    if offload != "none":
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    if offload == "all":
        zero["offload_param"] = {"device": "cpu", "pin_memory": True}
    parts = accumulation(spec, world)
    config: dict[str, Any] = {
        "train_batch_size": spec.rows_per_step,
        "train_micro_batch_size_per_gpu": spec.batch_size,
        "gradient_accumulation_steps": parts,
        "gradient_clipping": spec.max_grad_norm,
        "zero_optimization": zero,
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": spec.lr, "weight_decay": spec.weight_decay, "torch_adam": True},
        },
    }
    if spec.precision == "bf16-mixed":
        config["bf16"] = {"enabled": True}
    if spec.precision == "fp16-mixed":
        config["fp16"] = {"enabled": True}
    if spec.gradient_wire == "bf16":
        config["communication_data_type"] = "bf16"
    return config


def fsdp(spec: RunSpec) -> dict[str, Any]:
    """Return what transformers' TrainingArguments take as fsdp_config (FSDP2)."""
    return {
        "version": 2,
        "reshard_after_forward": True,
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "transformer_layer_cls_to_wrap": [layer_class(shape_of(spec).kind)],
        "activation_checkpointing": spec.gradient_checkpointing,
        "cpu_ram_efficient_loading": True,
        "state_dict_type": "SHARDED_STATE_DICT",
    }


def accelerate(spec: RunSpec, hosts: list[dict[str, Any]], head: str, gpus: bool) -> dict[str, Any]:
    """Return accelerate's default_config.yaml for the first host; on the others machine_rank is their place."""
    world = sum(host["processes"] for host in hosts)
    config: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "NO" if world == 1 else "MULTI_GPU" if gpus else "MULTI_CPU",
        "mixed_precision": _MIXED[spec.precision],
        "num_machines": len(hosts),
        "num_processes": world,
        "machine_rank": 0,
        "main_process_ip": head,
        "main_process_port": _PORT,
        "main_training_function": "main",
        "rdzv_backend": "static",
        "same_network": True,
        "use_cpu": not gpus,
        "debug": False,
    }
    if spec.strategy == "fsdp":
        about = fsdp(spec)
        config["distributed_type"] = "FSDP"
        config["fsdp_config"] = {
            "fsdp_version": 2,
            "fsdp_reshard_after_forward": True,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_transformer_layer_cls_to_wrap": about["transformer_layer_cls_to_wrap"][0],
            "fsdp_activation_checkpointing": spec.gradient_checkpointing,
            "fsdp_cpu_ram_efficient_loading": True,
            "fsdp_offload_params": False,
            "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        }
    if spec.strategy == "deepspeed":
        zero = deepspeed(spec, world)
        config["distributed_type"] = "DEEPSPEED"
        config["deepspeed_config"] = {
            "zero_stage": zero["zero_optimization"]["stage"],
            "gradient_accumulation_steps": zero["gradient_accumulation_steps"],
            "gradient_clipping": spec.max_grad_norm,
            "offload_optimizer_device": zero["zero_optimization"].get("offload_optimizer", {}).get("device", "none"),
            "offload_param_device": zero["zero_optimization"].get("offload_param", {}).get("device", "none"),
            "zero3_init_flag": zero["zero_optimization"]["stage"] == 3,
        }
        if len(hosts) > 1:  # else accelerate asks for pdsh and a file of hosts
            config["deepspeed_config"]["deepspeed_multinode_launcher"] = "standard"
    return config


def slurm_header(run: str, nodes: int, gpus: int, names: list[str]) -> list[str]:
    """Return the head of an sbatch script. `gpus`: of every node, 0 for none or unlike; `names`: of the nodes, if they matter."""
    return [
        "#!/bin/bash",
        f"#SBATCH --job-name=trainyard-{run}",
        f"#SBATCH --nodes={nodes}",
        "#SBATCH --ntasks-per-node=1",
        *([f"#SBATCH --nodelist={','.join(names)}"] if names else []),
        "#SBATCH --exclusive",
        # Unlike nodes cannot be asked for in one number; --exclusive gives all that they have.
        *([f"#SBATCH --gpus-per-node={gpus}"] if gpus else []),
        "#SBATCH --output=%x-%j.log",
        # The ranks write a checkpoint when they get SIGTERM; after a requeue they go on from it.
        "#SBATCH --signal=TERM@120",
        "#SBATCH --requeue",
    ]


def slurm(spec: RunSpec, hosts: list[dict[str, Any]], words: list[str], gpus: bool) -> str:
    """Return an sbatch script that runs the spec on nodes of Slurm's own choice, from a folder that all of them see.

    `words`: the spec as it was said, a file and flags.
    """
    spec = spec.named()
    counts = {host["processes"] for host in hosts}
    if len(counts) > 1:
        raise UserError("config slurm: hosts with unlike processes: train.yml -e render_only=true does those")
    each = counts.pop()
    torchrun = (
        f"exec python -m torch.distributed.run --nnodes=$SLURM_NNODES --node-rank=$SLURM_NODEID --nproc-per-node={each} "
        f"--master-addr=$HEAD --master-port={_PORT} -m trainer train {shlex.join(words)}"
    )
    inner = torchrun.replace("'", "'\\''")
    return "\n".join(
        [
            *slurm_header(spec.run, len(hosts), each if gpus else 0, []),
            f"# trainyard run {spec.run}: submit it from a folder that all nodes share, with the files that the last line names;",
            "# submitted again, it goes on from its newest checkpoint.",
            "set -euo pipefail",
            'HEAD=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
            "export HEAD",
            f"exec srun --kill-on-bad-exit=1 bash -euo pipefail -c '{inner}'",
            "",
        ]
    )


def render(kind: str, spec: RunSpec, hosts_said: str, head: str | None, words: list[str], gpus: bool) -> str:
    """Return the text of one config file. `words`: the spec as it was said, a file and flags.

    Raises:
        UserError: no such kind, or a spec that the tool has no words for.
    """
    if kind not in KINDS:
        raise UserError(f"config: got {kind or 'nothing'}, takes one of {', '.join(KINDS)}")
    hosts = read_hosts(hosts_said)
    if kind == "slurm":
        return slurm(spec, hosts, words, gpus)
    if kind == "accelerate":
        if len(hosts) > 1 and not head:  # on stderr: what is printed is a file
            print("main_process_ip is 127.0.0.1: --head=ADDRESS names the first host to the others", file=sys.stderr)
        return yaml.safe_dump(accelerate(spec, hosts, head or "127.0.0.1", gpus), sort_keys=False)
    world = sum(host["processes"] for host in hosts)
    return json.dumps(deepspeed(spec, world) if kind == "deepspeed" else fsdp(spec), indent=2) + "\n"
