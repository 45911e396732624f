"""Write the run spec as a configuration file of DeepSpeed, transformers (FSDP) or accelerate, or as a script. No torch.

tests/integration/trainer/test_tool_configs.py loads each file with its tool.
"""

import json
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml

from trainer import slurm_script
from trainer.config import RunSpec
from trainer.errors import UserError
from trainer.formats import quoted
from trainer.planner.hosts import read_hosts
from trainer.planner.model_shape import layer_class, shape_of
from trainer.strategy import plan_of
from trainer.strategy.deepspeed import file_config
from trainer.strategy.fsdp import keeps_gathered

KINDS = ("deepspeed", "fsdp", "accelerate", "slurm", "launcher")
_MIXED = {"32-true": "no", "bf16-mixed": "bf16", "fp16-mixed": "fp16"}
# The nodes share the working directory. Each but the first has a folder of its own for its checkpoints and cached samples.
_FOLDERS = """
data=$PWD
if [ "$SLURM_NODEID" -gt 0 ]; then
    data=$PWD/runs/{run}/nodes/$SLURM_NODEID
    mkdir -p "$data"
fi
""".strip()
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True)
class Script:
    """Settings of a script besides the spec.

    Attributes:
        env: variables that the script exports, such as NCCL_DEBUG.
        partition, time: of Slurm; empty: its defaults.
    """

    env: Mapping[str, str] = field(default_factory=dict)
    partition: str = ""
    time: str = ""

    @classmethod
    def of(cls, env: Sequence[str], partition: str | None, time: str | None) -> "Script":
        """Check the values of --env NAME=VALUE, --partition and --time. Raises UserError."""
        pairs = {name: value for name, _, value in (each.partition("=") for each in env)}
        for each in env:
            name, equals, value = each.partition("=")
            if not equals or not _NAME.fullmatch(name) or not value.isprintable():
                raise UserError(f"--env: expected NAME=VALUE in one line, got {quoted(each)}")
        if partition and not slurm_script.PARTITION.fullmatch(partition):
            raise UserError(f"--partition: expected names of partitions, got {quoted(partition)}")
        if time and not slurm_script.TIME.fullmatch(time):
            raise UserError(f"--time: expected minutes, HH:MM:SS or DAYS-HH:MM, got {quoted(time)}")
        return cls(pairs, partition or "", time or "")

    @property
    def exports(self) -> list[str]:
        """The lines that export the variables."""
        return [f"export {name}={shlex.quote(value)}" for name, value in self.env.items()]


def deepspeed(spec: RunSpec, world: int) -> dict[str, Any]:
    """Return DeepSpeed's configuration file: https://www.deepspeed.ai/docs/config-json/"""
    return file_config(spec, world)


def fsdp(spec: RunSpec) -> dict[str, Any]:
    """Return the argument fsdp_config of transformers' TrainingArguments (FSDP2)."""
    return {
        "version": 2,
        "reshard_after_forward": not keeps_gathered(spec),
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "transformer_layer_cls_to_wrap": [layer_class(shape_of(spec).kind)],
        "activation_checkpointing": spec.gradient_checkpointing,
        "cpu_ram_efficient_loading": True,
        "cpu_offload": spec.fsdp_offload,
        "state_dict_type": "SHARDED_STATE_DICT",
    }


def accelerate(spec: RunSpec, hosts: list[dict[str, Any]], head: str, gpus: bool) -> dict[str, Any]:
    """Return accelerate's default_config.yaml for the first host; other hosts set machine_rank to their index."""
    world = sum(host["processes"] for host in hosts)
    config: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        # `accelerate launch` does not start torchrun for MULTI_CPU: every process would train alone.
        "distributed_type": "NO" if world == 1 else "MULTI_GPU",
        "mixed_precision": _MIXED[spec.precision],
        "num_machines": len(hosts),
        "num_processes": world,
        "machine_rank": 0,
        "main_process_ip": head,
        "main_process_port": slurm_script.PORT,
        "main_training_function": "main",
        "rdzv_backend": "static",
        "same_network": True,
        "use_cpu": not gpus,
        "debug": False,
    }
    if spec.torch_compile:
        config["dynamo_config"] = {"dynamo_backend": "INDUCTOR"}
    return config | plan_of(spec).accelerate_config(spec, len(hosts), world)


def slurm(spec: RunSpec, hosts: list[dict[str, Any]], words: list[str], gpus: bool, script: Script) -> str:
    """Return an sbatch script that runs the spec on nodes that Slurm chooses, from a shared folder.

    `words`: the command-line arguments that define the spec.

    Raises:
        UserError: the hosts have different numbers of processes.
    """
    spec = spec.named()
    each = _processes("slurm", hosts)
    start = _torchrun("$SLURM_NNODES", "$SLURM_NODEID", each, words)
    inner = "\n".join([slurm_script.INTERFACE, _FOLDERS.format(run=spec.run), f'{start} --data-dir="$data"'])
    asked = slurm_script.Resources(len(hosts), each if gpus else 0, script.partition, time=script.time)
    return "\n".join(
        [
            *slurm_script.header(spec.run, asked),
            f"# trainyard run {spec.run}: submit it from a shared folder that holds the files named in the last line.",
            "# Submit it again to resume from the newest checkpoint.",
            "set -euo pipefail",
            *script.exports,
            slurm_script.HEAD,
            f"exec {slurm_script.step(inner)}",
            "",
        ]
    )


def launcher(spec: RunSpec, hosts: list[dict[str, Any]], head: str, words: list[str], script: Script) -> str:
    """Return a bash script that starts one host's part of a run: its argument is the place of the host, from 0.

    Raises:
        UserError: the hosts have different numbers of processes.
    """
    spec = spec.named()
    each = _processes("launcher", hosts)
    return "\n".join(
        [
            "#!/bin/bash",
            f"# trainyard run {spec.run}: start it on every host with the place of the host, 0 to {len(hosts) - 1}, within a few",
            "# minutes, from a folder that holds the files named in the last line. Start it again to resume.",
            "set -euo pipefail",
            f"export HEAD={shlex.quote(head)}",
            *script.exports,
            slurm_script.INTERFACE,
            _torchrun(str(len(hosts)), '"${1:-0}"', each, words),
            "",
        ]
    )


def _processes(kind: str, hosts: list[dict[str, Any]]) -> int:
    """Return the number of processes of every host. Raises UserError if hosts differ."""
    counts = {host["processes"] for host in hosts}
    if len(counts) > 1:
        raise UserError(
            f"config {kind}: the hosts have different numbers of processes: use train.yml -e render_only=true"
        )
    return int(counts.pop())


def _torchrun(nodes: str, place: str, processes: int, words: list[str]) -> str:
    return (
        f"exec python -m torch.distributed.run --nnodes={nodes} --node-rank={place} --nproc-per-node={processes} "
        f'--master-addr="$HEAD" --master-port={slurm_script.PORT} -m -- trainer train {shlex.join(words)}'
    )


def render(
    kind: str, spec: RunSpec, hosts_argument: str, head: str | None, words: list[str], gpus: bool, script: Script
) -> str:
    """Return the text of one configuration file or script. `words`: the command-line arguments that define the spec.

    Raises:
        UserError: an unknown kind, or a spec that the tool cannot express.
    """
    if kind not in KINDS:
        raise UserError(f"config: expected one of {', '.join(KINDS)}, got {kind or 'nothing'}")
    hosts = read_hosts(hosts_argument)
    if kind == "slurm":
        return slurm(spec, hosts, words, gpus, script)
    if kind in ("accelerate", "launcher") and len(hosts) > 1 and not head:  # on stderr, because stdout is the file
        print(
            "the address of the first host is 127.0.0.1: pass --head=ADDRESS so that other hosts can reach it",
            file=sys.stderr,
        )
    head = head or "127.0.0.1"
    if kind == "launcher":
        return launcher(spec, hosts, head, words, script)
    if kind == "accelerate":
        if not gpus and sum(host["processes"] for host in hosts) > 1:
            print("without GPUs, set the environment variable ACCELERATE_USE_CPU=true on all hosts", file=sys.stderr)
        return yaml.safe_dump(accelerate(spec, hosts, head, gpus), sort_keys=False)
    world = sum(host["processes"] for host in hosts)
    return json.dumps(deepspeed(spec, world) if kind == "deepspeed" else fsdp(spec), indent=2) + "\n"
