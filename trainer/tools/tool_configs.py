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

from trainer.common.errors import UserError
from trainer.common.formats import quoted
from trainer.config import RunSpec
from trainer.costs.host_memory import read_hosts
from trainer.model_files.model_shape import layer_class, shape_of
from trainer.strategy import plan_of
from trainer.strategy.deepspeed_config import file_config
from trainer.strategy.fsdp import FSDPPlan, tool_options
from trainer.tools import slurm_script

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
_RESOURCE = r"[A-Za-z][A-Za-z0-9_.-]*(:[A-Za-z0-9_.-]+){0,2}"
# The options of Slurm: pattern and expected value.
SLURM_OPTIONS = {
    "partition": (r"[A-Za-z0-9][A-Za-z0-9_.,-]{0,254}", "names of partitions"),
    "account": (r"[A-Za-z0-9][A-Za-z0-9_.@-]{0,254}", "the name of an account"),
    # Minutes, and the forms of https://slurm.schedmd.com/sbatch.html#OPT_time with colons or days.
    "time": (r"\d{1,9}(:\d{2}){0,2}|\d{1,9}-\d{1,2}(:\d{2}){0,2}", "minutes, HH:MM:SS or DAYS-HH:MM"),
    "gres": (f"{_RESOURCE}(,{_RESOURCE}){{0,15}}", "NAME:NUMBER or NAME:TYPE:NUMBER, a,b"),
    "cpus": (r"[1-9]\d{0,4}", "a number of cores"),
    "mem": (r"\d{1,9}[KMGT]?", "megabytes, or a number with K, M, G or T"),
    "prologue": (r"[^\x00-\x1f\x7f]*", "one line of commands"),
}


# Flags that say where ranks run: the largest value, and the kinds of files that have a place for it.
_PLACES = (
    ("num_gpus_per_node", 1024, KINDS),
    ("master_port", 65535, ("accelerate", "slurm", "launcher")),
    ("node_rank", 9999, ("launcher",)),
)


@dataclass(frozen=True)
class Script:
    """Settings of a script besides the spec.

    Attributes:
        slurm: options of Slurm by name, of `SLURM_OPTIONS`; Slurm's default for those that are missing.
    """

    env: Mapping[str, str] = field(default_factory=dict)  # variables that the script exports, such as NCCL_DEBUG
    slurm: Mapping[str, str] = field(default_factory=dict)
    processes: int = 0  # processes of every host; 0: as the hosts or the generic resources say
    port: int = slurm_script.PORT  # where ranks meet on the first host
    place: int = 0  # the place of the host that runs a launcher without an argument

    @classmethod
    def of(cls, env: Sequence[str], slurm: Mapping[str, str], places: Mapping[str, str | None], kind: str) -> "Script":
        """Check the values of --env NAME=VALUE, of the options of Slurm, and of flags that say where ranks run.

        `places`: values of `num_gpus_per_node`, `master_port` and `node_rank`. `kind`: the kind of the file. Raises
        UserError: a value is not valid, or a file of this kind has no place for it.
        """
        pairs = {name: value for name, _, value in (each.partition("=") for each in env)}
        for each in env:
            name, equals, value = each.partition("=")
            if not equals or not _NAME.fullmatch(name) or not value.isprintable():
                raise UserError(f"--env: expected NAME=VALUE in one line, got {quoted(each)}")
        for name, value in slurm.items():
            pattern, expected = SLURM_OPTIONS[name]
            if not re.fullmatch(pattern, value):
                raise UserError(f"--{name}: expected {expected}, got {quoted(value)}")
        numbers = {}
        for name, most, kinds in _PLACES:
            text = places.get(name) or ""
            if text and not (text.isdecimal() and int(text) <= most):
                raise UserError(f"--{name}: expected an integer from 0 to {most}, got {quoted(text)}")
            if text and kind not in kinds:
                raise UserError(
                    f"--{name}: it is an option of config {' or '.join(kinds)}, got config {kind}: remove it"
                )
            numbers[name] = int(text or 0)
        if kind not in KINDS:
            raise UserError(f"config: expected one of {', '.join(KINDS)}, got {kind or 'nothing'}")
        if env and kind not in ("slurm", "launcher"):
            raise UserError(
                f"--env: a file of {kind} has no environment variables: export them where the tool starts, or use config "
                "slurm or launcher"
            )
        if slurm and kind != "slurm":
            raise UserError(f"--{next(iter(slurm))}: it is an option of config slurm, got config {kind}: remove it")
        port = numbers["master_port"] or slurm_script.PORT
        return cls(pairs, slurm, numbers["num_gpus_per_node"], port, numbers["node_rank"])

    def resources(self, nodes: int, gpus: int) -> slurm_script.Resources:
        """Return the request of a job. `gpus`: of every node; generic resources replace it."""
        same = {name: self.slurm.get(name, "") for name in ("partition", "account", "time", "gres")}
        gpus = 0 if slurm_script.gpus_of(same["gres"]) else gpus
        cores, memory = int(self.slurm.get("cpus", 0)), self.slurm.get("mem", "")
        return slurm_script.Resources(nodes, gpus=gpus, cores=cores, memory=memory, **same)

    def hosts_of(self, argument: str) -> list[dict[str, Any]]:
        """Return the hosts that --hosts names. A node has one process for each GPU in --gres unless a file has their number.

        Raises UserError: as `read_hosts`.
        """
        hosts = read_hosts(argument)
        gpus = self.processes or slurm_script.gpus_of(self.slurm.get("gres", ""))
        if self.processes and not argument.isdecimal():
            raise UserError("--num_gpus_per_node: the file of --hosts has the processes of each: omit one of them")
        return [host | {"processes": gpus} for host in hosts] if gpus and argument.isdecimal() else hosts

    @property
    def exports(self) -> list[str]:
        return [f"export {name}={shlex.quote(value)}" for name, value in self.env.items()]


def fsdp(spec: RunSpec) -> dict[str, Any]:
    """Return the argument fsdp_config of transformers' TrainingArguments (FSDP2).

    Raises UserError: a strategy or sharding that it cannot express.
    """
    if "strategy" in spec.model_fields_set and not isinstance(plan_of(spec), FSDPPlan):
        raise UserError(f"config fsdp: the run has strategy={spec.strategy}: set strategy=fsdp, or omit strategy")
    if spec.fsdp_shard == "host":
        raise UserError(
            "config fsdp: fsdp_config of transformers has no fsdp_shard=host (HYBRID_SHARD) with FSDP2: use config accelerate with strategy=fsdp, "
            "or set fsdp_shard=all"
        )
    layer = layer_class(shape_of(spec).kind)
    return tool_options(spec, "cpu_offload") | {"transformer_layer_cls_to_wrap": [layer]}


def accelerate(spec: RunSpec, hosts: list[dict[str, Any]], head: str, port: int, gpus: bool) -> dict[str, Any]:
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
        "main_process_port": port,
        "main_training_function": "main",
        "rdzv_backend": "static",
        "same_network": True,
        "use_cpu": not gpus,
        "debug": False,
    }
    if spec.torch_compile:
        config["dynamo_config"] = {"dynamo_backend": "INDUCTOR"}
    config |= plan_of(spec).accelerate_config(spec, [host["processes"] for host in hosts])
    return {name: value for name, value in config.items() if value is not None}


def slurm(spec: RunSpec, hosts: list[dict[str, Any]], words: list[str], gpus: bool, script: Script) -> str:
    """Return an sbatch script that runs the spec on nodes that Slurm chooses, from a shared folder.

    `words`: the command-line arguments that define the spec. Raises UserError: the hosts have different numbers of
    processes.
    """
    spec = spec.named()
    each = _processes("slurm", hosts)
    start = _torchrun("$SLURM_NNODES", "$SLURM_NODEID", each, words, script.port)
    inner = "\n".join([slurm_script.INTERFACE, _FOLDERS.format(run=spec.run), f'{start} --data-dir="$data"'])
    asked = script.resources(len(hosts), each if gpus else 0)
    return "\n".join(
        [
            *slurm_script.header(spec.run, asked),
            f"# trainyard run {spec.run}: submit it from a shared folder that holds the files named in the last line.",
            "# Submit it again to resume from the newest checkpoint.",
            *filter(None, [script.slurm.get("prologue")]),
            "set -euo pipefail",
            *script.exports,
            slurm_script.HEAD,
            f"exec {slurm_script.step(inner)}",
            "",
        ]
    )


def launcher(spec: RunSpec, hosts: list[dict[str, Any]], head: str, words: list[str], script: Script) -> str:
    """Return a bash script that starts one host's part of a run: its argument is the place of the host, from 0.

    Raises UserError: the hosts have different numbers of processes.
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
            _torchrun(str(len(hosts)), f'"${{1:-{script.place}}}"', each, words, script.port),
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


def _torchrun(nodes: str, place: str, processes: int, words: list[str], port: int) -> str:
    return (
        f"exec python -m torch.distributed.run --nnodes={nodes} --node-rank={place} --nproc-per-node={processes} "
        f'--master-addr="$HEAD" --master-port={port} -m -- trainer train {shlex.join(words)}'
    )


def render(
    kind: str,
    spec: RunSpec,
    hosts: list[dict[str, Any]],
    head: str | None,
    words: list[str],
    gpus: bool,
    script: Script,
) -> str:
    """Return the text of one configuration file or script. `words`: the command-line arguments that define the spec.

    Raises UserError: an unknown kind, or a spec that the tool cannot express.
    """
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
        made = accelerate(spec, hosts, head, script.port, gpus)
        if "deepspeed_config" in made:
            print(
                "the file has DeepSpeed's optimizer and schedule: pass accelerate.utils.DummyOptim and DummyScheduler to prepare()",
                file=sys.stderr,
            )
        return yaml.safe_dump(made, sort_keys=False)
    world = sum(host["processes"] for host in hosts)
    return json.dumps(file_config(spec, world) if kind == "deepspeed" else fsdp(spec), indent=2) + "\n"
