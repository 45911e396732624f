"""The state of a run that is a job of Slurm, and the programs of Slurm. Standard library only; see `trainer.supervise.slurm_run`."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

from trainer.supervise.environment import clean_environment
from trainer.supervise.link_free import LinkFreePath
from trainer.supervise.run_files import SupervisorError, read_ranks, read_record, write_json

ANSWER_LIMIT = 30.0  # s for an answer of Slurm
ASK_INTERVAL = 5.0  # s between two queries about one job
ENDED_WELL = ("finished", "stopped")
# Where programs of Slurm are, besides the search path of a login without a terminal.
PROGRAMS = ("/usr/bin", "/usr/local/bin", "/opt/slurm/bin", "/usr/local/slurm/bin", "/cm/shared/apps/slurm/current/bin")
QUERY = "%T|%r|%S|%N|%Z"
_STATE = re.compile(r"[A-Z_]{1,32}")
_NODE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}")
WAITING = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD")
RUNNING = ("RUNNING", "COMPLETING", "STAGE_OUT", "SUSPENDED", "STOPPED", "SIGNALING", "RESIZING")


def find_program(name: str) -> str:
    """Return the path of a program of Slurm. Raises SupervisorError if this host has none."""
    path = os.pathsep.join([os.environ.get("PATH", ""), *PROGRAMS])
    found = shutil.which(name, path=path)
    if found is None:
        raise SupervisorError(f"there is no {name} here: choose a login host of the Slurm cluster (-e limit=HOST)")
    return found


def command(words: list[str], stdin: str = "", limit: float = ANSWER_LIMIT) -> str:
    """Return the output of a program of Slurm. Raises SupervisorError with its last line."""
    program = find_program(words[0])
    # The batch script calls programs of Slurm, too, and gets this environment.
    values = clean_environment()
    values["PATH"] = f"{Path(program).parent}{os.pathsep}{os.environ.get('PATH') or values['PATH']}"
    values |= {name: value for name, value in os.environ.items() if name.startswith("SLURM_CONF")}
    try:
        done = subprocess.run(
            [program, *words[1:]],
            input=stdin,
            env=values,
            timeout=limit,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise SupervisorError(f"{words[0]} did not answer within {limit:.0f} s") from None
    except OSError as error:
        raise SupervisorError(f"cannot run {program}: {error.strerror}") from None
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        line = re.sub(rf"^({re.escape(words[0])}|error|allocation failure|: )*", "", said[-1])
        raise SupervisorError(f"{words[0]}: {line[:400]}")
    return done.stdout


def is_live(run_dir: LinkFreePath, node: dict[str, Any]) -> bool:
    """Return whether the job of a run waits or runs."""
    return bool(job_status(run_dir, node)["alive"])


def job_status(run_dir: LinkFreePath, node: dict[str, Any]) -> dict[str, Any]:
    """Return the status of a run that is a job, as `read_state` does of other runs.

    `job` has its `state` and `reason` in Slurm's words, and `start`, when Slurm expects to start it. The end of a job
    is written to node.json, because Slurm deletes old jobs.
    """
    ended = node["status"] not in ("starting", "running")
    mark = read_mark(run_dir)
    slurm = {} if ended or is_final(mark) else ask(run_dir, node["job"])
    waits, runs = slurm.get("state") in WAITING, slurm.get("state") in RUNNING
    alive = waits or runs
    ranks = heartbeats(run_dir)
    if not ended and not alive:
        node = close(run_dir, node, mark, ranks, str(slurm.get("state") or ""))
    elif alive:
        # A rank that failed ends its job. Until then, the job may have lost a node and return to the queue.
        lives = {name: rank for name, rank in ranks.items() if rank.get("status") != "failed"}
        ranks = {name: {**rank, "process": "R"} for name, rank in lives.items()} if runs else {}
        node = {**node, "status": "running" if runs and ranks else "starting"}
    return {
        "now": time.time(),
        "alive": alive,
        "node": {**node, "nodes": mark.get("nodes") or []},
        "ranks": ranks,
        "run_dir": str(run_dir),
        "job": slurm if alive else {},
        "stop_wanted": (run_dir / "state/stop-wanted").exists(),
        "status": node["status"],
    }


def read_mark(run_dir: LinkFreePath) -> dict[str, Any]:
    """Return what the batch script wrote: `restart`, `nodes`, `code` and `again`; empty before its start."""
    mark = read_record(run_dir / "state/job.json") or {}
    nodes = mark.get("nodes")
    names = (
        [name for name in nodes if isinstance(name, str) and _NODE.fullmatch(name)] if isinstance(nodes, list) else []
    )
    return {**mark, "nodes": names}


def is_final(mark: dict[str, Any]) -> bool:
    """Return whether the batch script has ended, and the job does not return to the queue."""
    return isinstance(mark.get("code"), int) and mark.get("again") is False


def heartbeats(run_dir: LinkFreePath) -> dict[str, dict[str, Any]]:
    """Return the heartbeats of all ranks, by rank."""
    found = {}
    for rank in read_ranks(run_dir):
        found[str(rank.get("rank"))] = {**rank, "process": None}
    return found


def ask(run_dir: LinkFreePath, job: int) -> dict[str, Any]:
    """Return the state of a job in Slurm, at most some seconds old: `state`, `reason`, `start`; empty if Slurm does not have the job.

    If Slurm does not answer, the last answer holds: a run must not end because of that.
    """
    file = run_dir / "state/squeue.json"
    last = read_record(file) or {}
    known = last if last.get("job") == job and isinstance(last.get("answer"), dict) else {}
    if known and abs(time.time() - float(known.get("time") or 0)) < ASK_INTERVAL:
        return dict(known["answer"])
    try:
        answer = ask_slurm(run_dir, job)
    except SupervisorError as error:
        return {**(known.get("answer") or {"state": "PENDING"}), "reason": f"Slurm does not answer: {error}"}
    with contextlib.suppress(OSError):
        write_json(file, {"job": job, "time": time.time(), "answer": answer})
    return answer


def ask_slurm(run_dir: LinkFreePath, job: int) -> dict[str, Any]:
    """Return the state of a run's job from squeue, or from sacct after squeue no longer lists it.

    Empty for a job that works in another folder: code of a rank could name it. Raises SupervisorError if Slurm does not answer.
    """
    try:
        text = command(["squeue", "--noheader", "--states=all", f"--jobs={job}", f"--format={QUERY}"])
    except SupervisorError as error:
        if "Invalid job id" not in str(error):
            raise
        text = ""
    if found := parse_job(text):
        return found if found.pop("folder") in (str(run_dir), str(run_dir.resolved())) else {}
    try:  # a cluster without accounting has no answer
        lines = command(["sacct", "--noheader", "--parsable2", "--allocations", f"--jobs={job}", "--format=State"])
    except SupervisorError:
        return {}
    return {"state": state[0], "reason": "", "start": ""} if (state := _STATE.match(lines.strip())) else {}


def parse_job(text: str) -> dict[str, str]:
    """Return `state`, `reason`, `start` and `folder` of a line of squeue in the format QUERY; empty for anything else."""
    words = (text.splitlines() or [""])[0].split("|", 4)
    if len(words) != 5 or not _STATE.fullmatch(words[0]):
        return {}
    return {"state": words[0], "reason": words[1][:200], "start": words[2][:32], "folder": words[4]}


def close(
    run_dir: LinkFreePath, node: dict[str, Any], mark: dict[str, Any], ranks: dict[str, dict[str, Any]], state: str
) -> dict[str, Any]:
    """Return the state of a run whose job has ended, and write it to node.json."""
    statuses = [str(ranks.get(str(rank), {}).get("status")) for rank in node["ranks"]]
    code = mark.get("code") if isinstance(mark.get("code"), int) else None
    error = ""
    if all(status == "finished" for status in statuses):
        status = "finished"
    elif (
        all(status in ENDED_WELL for status in statuses)
        or state == "CANCELLED"
        or (run_dir / "state/stop-wanted").exists()
    ):
        status = "stopped"
    else:
        status, why = "failed", state.replace("_", " ").lower() or (f"exit code {code}" if code is not None else "")
        error = f"job {node['job']} of Slurm ended{f' ({why})' if why else ' and Slurm has forgotten it'}"
        if not mark["nodes"]:
            error += f": it could not use {run_dir}: see whether all nodes have this folder"
        elif state in ("", "COMPLETED", "FAILED") and any(status == "failed" for status in statuses):
            error = ""  # the ranks say why
    node = {**node, "status": status, "ended": time.time(), "exit_code": code}
    node |= {"error": error} if error else {}
    with contextlib.suppress(OSError):
        write_json(run_dir / "state/node.json", node)
    return node
