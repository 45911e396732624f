"""Write the run spec as a configuration file of DeepSpeed, transformers (FSDP), accelerate, or Slurm. No torch.

tests/integration/trainer/test_tool_configs.py loads each file with its tool.
"""

import json
import shlex
import sys
from typing import Any

import yaml

from trainer.config import RunSpec
from trainer.errors import UserError
from trainer.planner.hosts import read_hosts
from trainer.planner.model_shape import layer_class, shape_of
from trainer.strategy import plan_of
from trainer.strategy.deepspeed import file_config

KINDS = ("deepspeed", "fsdp", "accelerate", "slurm")
_PORT = 29500
_MIXED = {"32-true": "no", "bf16-mixed": "bf16", "fp16-mixed": "fp16"}


def deepspeed(spec: RunSpec, world: int) -> dict[str, Any]:
    """Return DeepSpeed's configuration file: https://www.deepspeed.ai/docs/config-json/"""
    return file_config(spec, world)


def fsdp(spec: RunSpec) -> dict[str, Any]:
    """Return the argument fsdp_config of transformers' TrainingArguments (FSDP2)."""
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
    """Return accelerate's default_config.yaml for the first host; other hosts set machine_rank to their index."""
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
    return config | plan_of(spec).accelerate_config(spec, len(hosts), world)


def slurm_header(run: str, nodes: int, gpus: int, names: list[str]) -> list[str]:
    """Return the header of an sbatch script.

    Args:
        gpus: number of GPUs of every node; 0 if there are none or the numbers differ.
        names: names of the nodes, or none to let Slurm choose them.
    """
    return [
        "#!/bin/bash",
        f"#SBATCH --job-name=trainyard-{run}",
        f"#SBATCH --nodes={nodes}",
        "#SBATCH --ntasks-per-node=1",
        *([f"#SBATCH --nodelist={','.join(names)}"] if names else []),
        "#SBATCH --exclusive",
        # --exclusive allocates all GPUs of a node; one number cannot describe nodes that differ.
        *([f"#SBATCH --gpus-per-node={gpus}"] if gpus else []),
        "#SBATCH --output=%x-%j.log",
        # On SIGTERM the ranks write a checkpoint. After a requeue they resume from it.
        "#SBATCH --signal=TERM@120",
        "#SBATCH --requeue",
    ]


def slurm(spec: RunSpec, hosts: list[dict[str, Any]], words: list[str], gpus: bool) -> str:
    """Return an sbatch script that runs the spec on nodes that Slurm chooses, from a shared folder.

    `words`: the command-line arguments that define the spec.

    Raises:
        UserError: the hosts have different numbers of processes.
    """
    spec = spec.named()
    counts = {host["processes"] for host in hosts}
    if len(counts) > 1:
        raise UserError(
            "config slurm: the hosts have different numbers of processes: use train.yml -e render_only=true"
        )
    each = counts.pop()
    torchrun = (
        f"exec python -m torch.distributed.run --nnodes=$SLURM_NNODES --node-rank=$SLURM_NODEID --nproc-per-node={each} "
        f"--master-addr=$HEAD --master-port={_PORT} -m trainer train {shlex.join(words)}"
    )
    inner = torchrun.replace("'", "'\\''")
    return "\n".join(
        [
            *slurm_header(spec.run, len(hosts), each if gpus else 0, []),
            f"# trainyard run {spec.run}: submit it from a shared folder that holds the files named in the last line.",
            "# Submit it again to resume from the newest checkpoint.",
            "set -euo pipefail",
            'HEAD=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
            "export HEAD",
            f"exec srun --kill-on-bad-exit=1 bash -euo pipefail -c '{inner}'",
            "",
        ]
    )


def render(kind: str, spec: RunSpec, hosts_argument: str, head: str | None, words: list[str], gpus: bool) -> str:
    """Return the text of one configuration file. `words`: the command-line arguments that define the spec.

    Raises:
        UserError: an unknown kind, or a spec that the tool cannot express.
    """
    if kind not in KINDS:
        raise UserError(f"config: expected one of {', '.join(KINDS)}, got {kind or 'nothing'}")
    hosts = read_hosts(hosts_argument)
    if kind == "slurm":
        return slurm(spec, hosts, words, gpus)
    if kind == "accelerate":
        if len(hosts) > 1 and not head:  # on stderr, because stdout is the file
            print(
                "main_process_ip is 127.0.0.1: pass --head=ADDRESS so that other hosts can reach the first one",
                file=sys.stderr,
            )
        return yaml.safe_dump(accelerate(spec, hosts, head or "127.0.0.1", gpus), sort_keys=False)
    world = sum(host["processes"] for host in hosts)
    return json.dumps(deepspeed(spec, world) if kind == "deepspeed" else fsdp(spec), indent=2) + "\n"
