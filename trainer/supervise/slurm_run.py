"""A run whose ranks are steps of a job of Slurm, seen from the login host of that cluster. Standard library only.

Slurm has the role that systemd has on other hosts: `start` submits a batch script, and Slurm starts, signals and kills
the ranks. The run folder lies in a folder that the login host and all nodes share. The files of `state` are those of
other runs, and additionally:

    job.json    written by the batch script: `restart`, `nodes`, and at its end `code` and whether the job returns to the queue
    squeue.json the last answer of Slurm, which is asked every few seconds at most

The batch script calls this module on the first node of the job:

    python -m trainer.supervise.slurm_run begin RUN_DIR
    python -m trainer.supervise.slurm_run end RUN_DIR CODE       exit code 75: the job has to return to the queue
"""

from __future__ import annotations

import os
import re
import sys
import time
from typing import Any

from trainer.supervise.link_free import LinkFreePath, run_folder
from trainer.supervise.run_files import SupervisorError, rank_files, write_json
from trainer.supervise.slurm_state import (
    ENDED_WELL,
    RUNNING,
    WAITING,
    ask_slurm,
    command,
    heartbeats,
    is_live,
    job_status,
    read_mark,
)
from trainer.supervise.start_request import StartRequest

AGAIN = 75  # exit code: the job has to return to the queue
CANCEL_LIMIT = 90.0  # s for a cancelled job to end: Slurm's KillWait, 30 s by default, and the epilog
POLL = 0.2
FOLDERS = ("state", "logs", "samples")
_JOB = re.compile(r"(\d{1,10})(;[A-Za-z0-9_.-]+)?")


def submit(wanted: StartRequest, run_dir: LinkFreePath) -> dict[str, Any]:
    """Submit the batch script of a run; return the result of `start`. Raises SupervisorError if Slurm refuses it."""
    for folder in FOLDERS:
        (run_dir / folder).make_folder()
    log = f"{run_dir}/logs/slurm.log".replace("%", "%%")
    words = ["sbatch", "--parsable", f"--output={log}", "--open-mode=append", "--input=/dev/null", f"--chdir={run_dir}"]
    answer = command(words, wanted.script).strip()
    if not (found := _JOB.fullmatch(answer)):
        raise SupervisorError(f"sbatch: unexpected answer {answer[:80]!r}")
    started = time.time()
    node = {
        "run": run_dir.name,
        "node_rank": 0,
        "ranks": wanted.ranks,
        "hosts": wanted.hosts,
        "devices": [],
        "attempt": wanted.attempt,
        "restarts": False,
        "replica": None,
        "teaches": False,
        "backend": "slurm",
        "job": int(found[1]),
        "unit": None,
        "lease": None,
        "started": started,
        "ended": None,
        "status": "starting",
        "exit_code": None,
        "failures": [],
        "oom": False,
    }
    try:
        write_json(run_dir / "state/node.json", node)
    except OSError:
        command(["scancel", found[1]])  # the job would be unknown
        raise
    return {"backend": "slurm", "pid": 0, "job": int(found[1]), "started": started}


def stop_job(run_dir: LinkFreePath, node: dict[str, Any], request: dict[str, Any]) -> dict[str, Any]:
    """Stop the job of a run, as `stop` does: ask the ranks for a checkpoint, and cancel the job if that takes too long.

    Raises SupervisorError if the job does not end.
    """
    if not is_live(run_dir, node):
        return {"status": job_status(run_dir, node)["status"], "killed": 0}
    (run_dir / "state/squeue.json").remove(missing_ok=True)  # the answer may be older than the start of the job
    grace = 0.0 if request.get("now") else float(request.get("grace", 60.0))
    if grace and job_status(run_dir, node)["status"] == "running":
        (run_dir / "stop").make_file()
        _wait_end(run_dir, node, grace)
    # The last answer in the run folder could be from code of a rank.
    if ask_slurm(run_dir, node["job"]).get("state") in (*WAITING, *RUNNING):
        command(["scancel", str(node["job"])])
        (run_dir / "state/squeue.json").remove(missing_ok=True)
        if not _wait_end(run_dir, node, CANCEL_LIMIT):
            raise SupervisorError(
                f"job {node['job']} of Slurm does not end after scancel: see squeue on its login host"
            )
    return {"status": job_status(run_dir, node)["status"], "killed": 0}


def _wait_end(run_dir: LinkFreePath, node: dict[str, Any], limit: float) -> bool:
    """Wait up to `limit` seconds for the end of a job; return whether it has ended."""
    deadline = time.monotonic() + limit
    while is_live(run_dir, node):
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL)
    return True


# On the first node of the job ---------------------------------------------------------------------------------------------


def begin(run_dir: LinkFreePath) -> int:
    """Record the start of the job, and remove the heartbeats of an earlier one; return 0."""
    for stale in [*rank_files(run_dir), run_dir / "stop"]:
        stale.remove(missing_ok=True)
    listed = command(["scontrol", "show", "hostnames", os.environ["SLURM_JOB_NODELIST"]]).split()
    last = read_mark(run_dir)
    restart = int(os.environ.get("SLURM_RESTART_COUNT") or 0)
    write_json(run_dir / "state/job.json", {"restart": restart, "nodes": listed, "step": last.get("step", -1)})
    return 0


def end(run_dir: LinkFreePath, code: int) -> int:
    """Record the end of the ranks; return 75 if the job has to return to the queue, else the exit code of the job.

    It returns there if the ranks stopped with a checkpoint and no user requested the stop: at the end of the time limit, or because
    Slurm preempts the job. Without progress since the last time, it does not, because it would repeat indefinitely.
    """
    ranks, mark = heartbeats(run_dir), read_mark(run_dir)
    step = max((int(rank.get("step") or 0) for rank in ranks.values()), default=0)
    stopped = bool(ranks) and all(rank.get("status") == "stopped" for rank in ranks.values())
    wanted = (run_dir / "state/stop-wanted").exists()
    again = stopped and not wanted and step > int(mark.get("step", -1))
    if ranks and all(rank.get("status") in ENDED_WELL for rank in ranks.values()):
        code = 0  # the reports of the ranks take precedence: a launcher can fail although its ranks have ended well
    write_json(run_dir / "state/job.json", {**mark, "code": code, "again": again, "step": step})
    return AGAIN if again else code


def main() -> int:
    """Carry out a request of the batch script."""
    verb, run_dir = sys.argv[1], run_folder(sys.argv[2])
    try:
        return begin(run_dir) if verb == "begin" else end(run_dir, int(sys.argv[3]))
    except (SupervisorError, OSError) as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 1


if __name__ == "__main__":
    sys.exit(main())
