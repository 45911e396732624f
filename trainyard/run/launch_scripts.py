"""A plan as files to run by hand: a script for every host, and one for Slurm. Pure Python, no Ansible."""

from __future__ import annotations

import shlex
from typing import Any

from trainer.tool_configs import slurm_header

# What trainer.supervise gives a launcher: who we are and where programs lie, and the lines of `env`, read and not sourced
# (a value may hold blanks or quotes). No value of `env` stands in a script: they may be secrets.
_ENVIRONMENT = """\
cd {run_dir}
while IFS= read -r line; do
    case $line in ''|'#'*) ;; *) export "$line" ;; esac
done < {run_dir}/env
"""


def lighthouse(entry: dict[str, Any]) -> str:
    """Return the line that starts the run's lighthouse on the host that keeps it; it ends with what is started after it."""
    if not entry.get("lighthouse"):
        return ""
    command = shlex.join([entry["command"][0], "-m", "trainer.distributed.lighthouse", entry["lighthouse"]])
    return f"{command} >> {shlex.quote(entry['run_dir'])}/lighthouse.log 2>&1 &\n"


def script(entry: dict[str, Any], run: str) -> str:
    """Return the bash script that starts one host's part of a run."""
    ranks = ",".join(map(str, entry["ranks"]))
    return (
        "#!/bin/bash\n"
        f"# trainyard run {run}: node {entry['node_rank']}, ranks {ranks}, for {comment(entry['host'])} ({entry['address']}).\n"
        "# Start it on all hosts within a few minutes of each other.\n"
        "set -euo pipefail\n"
        f"{_ENVIRONMENT.format(run_dir=shlex.quote(entry['run_dir']))}"
        f"{lighthouse(entry)}"
        f"exec {shlex.join(entry['command'])}\n"
    )


def sbatch(plan: list[dict[str, Any]], run: str) -> str:
    """Return the script that `sbatch` takes. Slurm has to know the hosts by their names in the inventory.

    Every node runs its own command, told by Slurm's name for it: ranks, devices and folders may differ between nodes.
    """
    gpus = {len(entry["gpus"]) for entry in plan}
    lines = [
        *slurm_header(run, len(plan), gpus.pop() if len(gpus) == 1 else 0, [entry["host"] for entry in plan]),
        f"# trainyard run {run}. Its files are staged on every host; submitted again, it goes on from its newest checkpoint.",
        "set -euo pipefail",
        "exec srun --kill-on-bad-exit=1 bash -euo pipefail -c '",
    ]
    cases = ["case $SLURMD_NODENAME in"]
    for entry in plan:
        cases.append(f"{shlex.quote(entry['host'])})")
        cases += _ENVIRONMENT.format(run_dir=shlex.quote(entry["run_dir"])).splitlines()
        cases += lighthouse(entry).splitlines()
        cases.append(f"exec {shlex.join(entry['command'])} ;;")
    cases += ["*)", 'echo "error: no part of the run is planned for $SLURMD_NODENAME" >&2; exit 2 ;;', "esac"]
    return "\n".join([*lines, *(line.replace("'", "'\\''") for line in cases), "'", ""])


def comment(text: str) -> str:
    """Return text that cannot leave a comment's line."""
    return " ".join(text.split())
