"""The parts of a batch script of Slurm: its header, the address of the head, and the step that starts one launcher per node. No torch."""

from collections.abc import Sequence
from dataclasses import dataclass

PORT = 29500
GRACE = 120  # s before the end of the time limit at which the ranks receive SIGTERM
# Every host uses the NIC on its route to the head; the head uses that of its own address. Variables that are set win.
# The head may resolve its own name to 127.0.1.1: then the NIC on its route to another node, or on its default route.
INTERFACE = r"""
not_loopback() { awk '$1 !~ /^127[.]/ && !found++ { print $1 }'; }
device() { sed -n '1s/.* dev \([^ ]*\).*/\1/p'; }
address=$(getent ahostsv4 "$HEAD" | not_loopback) nic=
case $HEAD in 127.*|localhost) nic=lo ;; esac
[ -n "$address$nic" ] || address=$(getent ahostsv4 "${PEER:-$HEAD}" | not_loopback)
if [ -n "$address" ]; then
    nic=$(ip -o -4 address show to "$address" | awk 'NR == 1 { print $2 }')
    [ -n "$nic" ] || nic=$(ip -o route get "$address" | device)
elif [ -z "$nic" ]; then
    nic=$(ip -o -4 route show default | device)
fi
export NCCL_SOCKET_IFNAME="${NCCL_SOCKET_IFNAME:-$nic}" GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-$nic}"
""".strip()
# Slurm's own address of the first node, and of the second as PEER: a host often resolves its own name to 127.0.1.1. No `head`, which
# ends scontrol by SIGPIPE.
HEAD = r"""
address_of() { scontrol show node "$1" | sed -n 's/.*NodeAddr=\([^ ]*\).*/\1/p'; }
HEAD=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)
PEER=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 2p)
address=$(address_of "$HEAD")
export HEAD="${address:-$HEAD}"
[ -z "$PEER" ] || address=$(address_of "$PEER")
export PEER="${PEER:+${address:-$PEER}}"
""".strip()


@dataclass(frozen=True)
class Resources:
    """The request of a job; Slurm chooses a value that is empty or 0."""

    nodes: int
    gpus: int = 0  # number of GPUs of every node
    partition: str = ""
    account: str = ""
    time: str = ""
    gres: str = ""  # generic resources of every node, such as `gpu:a100:4`
    cores: int = 0  # cores of every node
    memory: str = ""  # memory of every node, such as `64G`
    names: Sequence[str] = ()  # names of the nodes; empty to let Slurm choose them

    @property
    def options(self) -> list[str]:
        whole = not (self.cores or self.gres)
        given = {
            "nodes": self.nodes,
            "ntasks-per-node": 1,
            "nodelist": ",".join(self.names),
            # --exclusive allocates all GPUs of a node; one number cannot describe nodes that differ.
            "gpus-per-node": self.gpus,
            "gres": self.gres,
            "cpus-per-task": self.cores,
            "mem": self.memory,
            "partition": self.partition,
            "account": self.account,
            "time": self.time,
        }
        return [f"--{name}={value}" for name, value in given.items() if value] + (["--exclusive"] if whole else [])


def gpus_of(gres: str) -> int:
    """Return the number of GPUs in a list of generic resources such as `gpu:a100:4,nvme:1`."""
    found = [word.split(":") for word in gres.split(",") if word.split(":")[0] == "gpu"]
    return sum(int(parts[-1]) if parts[-1].isdecimal() else 1 for parts in found)


def header(run: str, resources: Resources, output: str = "%x-%j.log") -> list[str]:
    """Return the first lines of a batch script.

    `output`: file of the job's output; empty where the command line of sbatch names it.
    """
    return [
        "#!/bin/bash",
        f"#SBATCH --job-name=trainyard-{run}",
        *(f"#SBATCH {option}" for option in resources.options),
        *([f"#SBATCH --output={output}"] if output else []),
        # On SIGTERM the ranks write a checkpoint. After a requeue they resume from it.
        f"#SBATCH --signal=TERM@{GRACE}",
        "#SBATCH --requeue",
    ]


def step(inner: str, options: str = "") -> str:
    """Return the command that runs a bash script on every node of the job. `options`: further ones of srun, quoted."""
    # Without --cpu-bind, a step with one task on each node could be bound to one core of it.
    words = f"srun --kill-on-bad-exit=1 --cpu-bind=none{' ' if options else ''}{options}"
    quoted = inner.replace("'", "'\\''")
    return f"{words} bash -euo pipefail -c '{quoted}'"
