"""The queue host's side of the queue: what Slurm and the folders of the runs say, a new run, and changes of jobs.

Standard library only. Every run has a folder `<cluster_data_dir>/queue/<run>`. Its `request.json` and `session.json` are written
here, its `state.json` by the driver of the run.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainer.supervise.files import hold_lock, write_atomic

JOB_FORMAT = "%i|%P|%T|%r|%S|%e|%l|%N|%j"
NODE_FORMAT = "%N|%T|%c|%m|%G"
COMPLETED = "/var/log/slurm/jobcomp.log"
LOG_LIMIT = 1 << 20  # bytes of the completion log, from its end
RUNS_LIMIT = 2000  # folders of runs, the newest first
LINES_LIMIT = 10_000
TEXT_LIMIT = 1 << 18  # bytes of request.json and state.json
COMMAND_LIMIT = 60.0  # s for an answer of Slurm
LOCK_LIMIT = 20.0  # s to wait for another controller that adds a run
LOCK = ".lock"
_COMMANDS = {"cancel": ["scancel"], "hold": ["scontrol", "hold"], "release": ["scontrol", "release"]}


class QueueError(ValueError):
    """Slurm refused a request, or does not answer; the message is one line."""


def info(request: dict[str, Any]) -> dict[str, Any]:
    """Return the jobs and hosts of Slurm, and the runs of the queue.

    Args:
        request: `folder` of the queue; `specs`, names of runs whose spec is returned, too.

    Returns:
        `jobs` and `nodes`: lines in JOB_FORMAT and NODE_FORMAT, times in seconds since the epoch; `hosts`: the hosts of each
        list of hosts among the jobs; `runs`: the texts of `request.json` and `state.json` by run; `specs`: the fields of the
        prepared run without paths; `completed`: lines of the completion log, in local time, which is `offset` seconds
        ahead of UTC; `now`.
    """
    if shutil.which("squeue") is None:
        return {"error": "Slurm is not installed: run site.yml with queue_state=present"}
    jobs = _lines(["squeue", "--noheader", "--all", f"--format={JOB_FORMAT}"])
    nodes = _lines(["sinfo", "--noheader", "--Node", "--partition=normal", f"--format={NODE_FORMAT}"])
    lists = {line.split("|")[7] for line in jobs if line.count("|") >= 8} - {""}
    folder = Path(request["folder"])
    return {
        "jobs": jobs,
        "nodes": nodes,
        "hosts": {text: _lines(["scontrol", "show", "hostnames", "--", text]) for text in sorted(lists)},
        "runs": {
            run.name: {name: _text(run / f"{name}.json") for name in ("request", "state")} for run in _runs(folder)
        },
        "specs": {name: spec for name in request.get("specs", []) if (spec := _prepared(folder / name))},
        "completed": _completed(),
        "offset": time.localtime().tm_gmtoff,
        "now": time.time(),
    }


def add(request: dict[str, Any]) -> dict[str, Any]:
    """Write the folder of a run, and submit its job. Nothing is left if Slurm refuses the job.

    Args:
        request: `folder` of the run; `contents`, {name: [mode, content in base64]}; `arguments` of sbatch.

    Returns:
        `job`, its id; or `exists`, the id of a job of this name that waits or runs.
    """
    folder = Path(request["folder"])
    folder.parent.mkdir(parents=True, exist_ok=True)
    with hold_lock(folder.parent / LOCK, wait=LOCK_LIMIT) as locked:
        if not locked:
            return {"error": f"another controller has not finished adding a run within {LOCK_LIMIT:.0f} s"}
        if ids := _lines(["squeue", "--noheader", f"--name={folder.name}", "--format=%i"]):
            return {"exists": int(ids[0])}
        new = not folder.exists()
        folder.mkdir(mode=0o700, exist_ok=True)
        try:
            for name, (mode, content) in request["contents"].items():
                write_atomic(folder / name, base64.b64decode(content), mode)
            return {"job": submit(folder, request["arguments"])}
        except (OSError, QueueError):
            if new:
                shutil.rmtree(folder, ignore_errors=True)
            raise


def submit(folder: Path, arguments: Sequence[str]) -> int:
    """Submit the job of a run's folder; return its id. Raises QueueError."""
    words = ["sbatch", "--parsable", *arguments, "--chdir=/", "--output=/dev/null", "--wrap=sleep 86400"]
    answer = _command(words).strip()
    if not re.fullmatch(r"\d{1,10}(;\w+)?", answer):
        raise QueueError(f"sbatch: unexpected answer {answer[:80]!r}")
    return int(answer.partition(";")[0])


def change(request: dict[str, Any]) -> dict[str, Any]:
    """Cancel, hold or release jobs, or give them another priority.

    Args:
        request: `do`; `jobs`, their ids; `priority` for `do=priority`.

    Returns:
        `changed`: the ids; `refused`: why a job was not changed, by its id.
    """
    changed, refused = [], {}
    for job in request["jobs"]:
        words = [*_COMMANDS[request["do"]], str(int(job))] if request["do"] in _COMMANDS else []
        words = words or ["scontrol", "update", f"JobId={int(job)}", f"Partition={request['priority']}"]
        try:
            _command(words)
            changed.append(int(job))
        except QueueError as error:
            refused[str(job)] = str(error)
    return {"changed": changed, "refused": refused}


def _command(words: Sequence[str]) -> str:
    """Return the output of a program of Slurm. Raises QueueError."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "SBATCH_"))}
    try:
        done = subprocess.run(
            words,
            env=environment | {"SLURM_TIME_FORMAT": "%s"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=COMMAND_LIMIT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise QueueError(
            f"Slurm does not answer within {COMMAND_LIMIT:.0f} s: see `systemctl status slurmctld`"
        ) from None
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().splitlines() or [f"exit code {done.returncode}"]
        raise QueueError(f"{words[0]}: {said[-1].removeprefix(f'{words[0]}: ').removeprefix('error: ')[:500]}")
    return done.stdout.decode(errors="replace")


def _lines(words: Sequence[str]) -> list[str]:
    return [line for line in _command(words).split("\n") if line][:LINES_LIMIT]


def _runs(folder: Path) -> list[Path]:
    """Return the folders of the runs, the newest first."""
    found = []
    with contextlib.suppress(OSError):
        for entry in os.scandir(folder):
            with contextlib.suppress(OSError):
                if entry.is_dir(follow_symlinks=False):
                    found.append((entry.stat().st_mtime, entry.path))
    return [Path(path) for _, path in sorted(found, reverse=True)[:RUNS_LIMIT]]


def _text(path: Path) -> str | None:
    try:
        with path.open("rb") as file:
            return file.read(TEXT_LIMIT).decode(errors="replace")
    except OSError:
        return None


def _prepared(folder: Path) -> dict[str, Any] | None:
    """Return the fields of a run's spec, and the digests of its files; the session may hold secrets besides."""
    try:
        prepared = json.loads((folder / "session.json").read_bytes())["state"]["prepared"]
        return {"spec": prepared["spec"], "digests": [[file["kind"], file["digest"]] for file in prepared["files"]]}
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _completed() -> list[str]:
    """Return the last lines of the completion log."""
    try:
        with Path(COMPLETED).open("rb") as file:
            file.seek(0, os.SEEK_END)
            size = file.tell()
            file.seek(max(0, size - LOG_LIMIT))
            text = file.read(LOG_LIMIT).decode(errors="replace")
    except OSError:
        return []
    return [line for line in text.split("\n")[int(size > LOG_LIMIT) :] if line][-LINES_LIMIT:]
