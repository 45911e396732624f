"""The batch script of a run on a Slurm cluster that others administer. docs/slurm.md describes what it does."""

from __future__ import annotations

import shlex

from trainer.tools import slurm_script
from trainyard.run.launch.launch_scripts import READ_ENVIRONMENT
from trainyard.run.launch_options import LaunchOptions
from trainyard.run.types import PlanEntry
from trainyard.wire.run_errors import PlanError

# Each node but the first has a folder of its own for its checkpoints. Their heartbeats and logs are in the same folder.
_FOLDERS = """\
here={run} data={data}
if [ "$SLURM_NODEID" -gt 0 ]; then
    here={run}/nodes/$SLURM_NODEID
    data=$here
    mkdir -p "$here"
    for name in state logs samples stop origin.json plan.json; do ln -sfn {run}/$name "$here/$name"; done
fi
"""
_CHECK = """\
if ! [ -e {run}/trainer.zip ]; then
    echo "error: $SLURMD_NODENAME has no folder "{run}": set cluster_data_dir to a folder that all nodes share" >&2
    exit 3
elif ! [ -x {python} ]; then
    echo "error: $SLURMD_NODENAME has no Python at "{python}": set cluster_python to one that all nodes have" >&2
    exit 3
fi
"""
# The launcher ignores SIGTERM, because it would kill ranks that need more than 30 s for their checkpoint.
_LAUNCH = """\
if [ -z "${{OMP_NUM_THREADS:-}}" ]; then
    # Not every cluster restricts a job to the cores that it was granted.
    cores=$(nproc)
    [ "${{SLURM_CPUS_PER_TASK:-$cores}}" -ge "$cores" ] || cores=$SLURM_CPUS_PER_TASK
    threads=$((cores / {processes}))
    export OMP_NUM_THREADS=$((threads > 1 ? threads : 1))
fi
(trap "" TERM; exec {python} -P -m trainer.launch.torchrun --nnodes="$SLURM_NNODES" --node-rank="$SLURM_NODEID" \\
    --nproc-per-node={processes} --master-addr="$HEAD" --master-port="$PORT" --max-restarts=0 --signals-to-handle=SIGINT \\
    --rdzv-id={run_id}"-$SLURM_JOB_ID-${{SLURM_RESTART_COUNT:-0}}" \\
    -m trainer train {run}/spec.yml --run-dir="$here" --data-dir="$data") &
launcher=$!
trap "touch "{stop} TERM
while true; do
    code=0
    wait "$launcher" || code=$?
    kill -0 "$launcher" 2>/dev/null || exit "$code"
done
"""


def resources(options: LaunchOptions) -> slurm_script.Resources:
    """Return the request of a job."""
    return slurm_script.Resources(
        nodes=options.slurm_nodes,
        partition=options.slurm_partition,
        account=options.slurm_account,
        time=options.slurm_time,
        gres=options.slurm_gres,
        cores=options.slurm_cpus,
        memory=options.slurm_mem,
    )


def batch_script(entry: PlanEntry, processes: int, options: LaunchOptions) -> str:
    """Return the batch script that starts the ranks of a run.

    Args:
        entry: entry of the plan: `run_dir`, `data_dir` and the interpreter as the first word of `command`.
        processes: ranks on each node.

    Raises:
        PlanError: a path that a script cannot hold.
    """
    run_dir, python = entry.run_dir, entry.command[0]
    for path in (run_dir, python):
        if "\0" in path or "\n" in path:
            raise PlanError(
                f"launcher=slurm: {path!r} has a line break: choose another cluster_data_dir or cluster_python"
            )
    run, name = shlex.quote(run_dir), run_dir.rpartition("/")[2]
    words = {
        "run": run,
        "data": shlex.quote(entry.data_dir),
        "python": shlex.quote(python),
        "stop": shlex.quote(shlex.quote(f"{run_dir}/stop")),
        "processes": processes,
        "run_id": shlex.quote(name),
    }
    each = "\n".join(
        part.rstrip("\n")
        for part in (
            _CHECK.format(**words),
            _FOLDERS.format(**words),
            READ_ENVIRONMENT.format(run_dir=run),
            slurm_script.INTERFACE,
            _LAUNCH.format(**words),
        )
    )
    # One log for each node. srun replaces %n by the place of the node, and %% by %.
    log = shlex.quote(f"{run_dir.replace('%', '%%')}/logs/torchrun.%n.log")
    step = slurm_script.step(each, f"--output={log} --open-mode=append --input=none")
    # Jobs of other users may share a node. A job that starts again uses the same port.
    port = str(options.master_port or f"$(({slurm_script.PORT} + SLURM_JOB_ID % 1000))")
    of_job = f"{shlex.quote(python)} -P -m trainer.supervise.slurm_run"
    return "\n".join(
        [
            *slurm_script.header(name, resources(options), output=""),
            f"# trainyard run {name}. Its folder is the working directory. Submitted again, it resumes from the latest checkpoint.",
            *filter(None, [options.slurm_prologue]),
            "set -euo pipefail",
            f"export PYTHONPATH={run}/trainer.zip",
            f"{of_job} begin {run}",
            slurm_script.HEAD,
            f"export PORT={port}",
            "code=0",
            f"{step} || code=$?",
            f'{of_job} end {run} "$code" && code=0 || code=$?',
            # At the end of the time limit, or where Slurm preempts the job, the ranks have stopped with a checkpoint.
            '[ "$code" != 75 ] || scontrol requeue "$SLURM_JOB_ID"',
            'exit "$code"',
            "",
        ]
    )
