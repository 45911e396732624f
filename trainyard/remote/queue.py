"""The queue on the queue host: the state of Slurm and of the folders of the runs, new runs, and changes of jobs.

Standard library only. Every run has a folder `<cluster_data_dir>/queue/<run>`. Its `request.json` and `session.json` are written
here, its `state.json` by the driver of the run.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import functools
import json
import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainer.supervise.link_free import link_free
from trainer.supervise.run_files import SupervisorError, hold_lock, read_json
from trainyard.remote.queue_job import command, submit
from trainyard.remote.queue_phases import LIVE

JOB_FORMAT = "%i|%P|%T|%r|%S|%e|%l|%N|%j"
NODE_FORMAT = "%N|%T|%c|%m|%G"
CONFIGURATION = "/etc/slurm/slurm.conf"
OURS = b"# trainyard: the queue"  # roles/queue/templates/slurm.conf.j2
RUNS_LIMIT = 2000  # folders of runs, the newest first
LINES_LIMIT = 10_000
TEXT_LIMIT = 1 << 18  # bytes of request.json and state.json
LOCK_LIMIT = 20.0  # s to wait for another controller that adds a run
LOCK = ".lock"
_COMMANDS = {"cancel": ["scancel"], "hold": ["scontrol", "hold"], "release": ["scontrol", "release"]}


def info(request: dict[str, Any]) -> dict[str, Any]:
    """Return the jobs and hosts of Slurm, and the runs of the queue.

    `request`: `folder` of the queue; `specs`, names of runs whose spec is returned, too; `recent`, number of runs
    without a job that are returned, the newest; without it, all runs are. Returns `jobs` and `nodes`: lines in
    JOB_FORMAT and NODE_FORMAT, times in seconds since the epoch; `hosts`: the hosts of each list of hosts among the
    jobs; `runs`: the texts of `request.json` and `state.json` by run; `specs`: the fields of the prepared run without
    paths; `now`.
    """
    os.environ["SLURM_TIME_FORMAT"] = "%s"  # of this process, which answers one request
    _check_owner(Path(os.environ.get("SLURM_CONF", CONFIGURATION)))
    jobs = _lines(["squeue", "--noheader", "--all", f"--format={JOB_FORMAT}"])
    nodes = _lines(["sinfo", "--noheader", "--Node", "--partition=normal", f"--format={NODE_FORMAT}"])
    words = [line.split("|", 8) for line in jobs if line.count("|") >= 8]
    hosts = {text: list(_host_names(text)) for text in sorted({row[7] for row in words} - {""})}
    folder, texts = Path(request["folder"]), ("request", "state")
    runs = _recent(_runs(folder), {row[8] for row in words}, request.get("recent"))
    return {
        "jobs": jobs,
        "nodes": nodes,
        "hosts": hosts,
        "runs": {run.name: {name: _text(run / f"{name}.json") for name in texts} for run in runs},
        "specs": {name: spec for name in request.get("specs", []) if (spec := _prepared(folder / name))},
        "now": time.time(),
    }


def add(request: dict[str, Any]) -> dict[str, Any]:
    """Write the folder of a run, and submit its job. Nothing is left if Slurm refuses the job.

    `request`: `folder` of the run; `contents`, {name: [mode, content in base64]}; `links`, {name: path of a file that
    the run needs in its folder}; `arguments` of sbatch. Returns `job`, its id; or `exists`, the id of a job of this
    name that waits or runs.
    """
    folder = Path(request["folder"])
    folder.parent.mkdir(parents=True, exist_ok=True)
    with hold_lock(folder.parent / LOCK, wait=LOCK_LIMIT) as locked:
        if refused := _refusal(folder, locked):
            return refused
        new = not folder.exists()
        folder.mkdir(mode=0o700, exist_ok=True)
        try:
            for name, (mode, content) in request["contents"].items():
                link_free(folder / name).write(base64.b64decode(content), mode)
            for name, path in request["links"].items():
                _link(folder / name, Path(path))
            return {"job": submit(folder, request["arguments"])}
        except (OSError, SupervisorError):
            if new:
                shutil.rmtree(folder, ignore_errors=True)
            raise


def again(request: dict[str, Any]) -> dict[str, Any]:
    """Submit a new job for a run that has ended, with the request of its last one. It resumes.

    `request`: `folder` of the run; `after`, the ids of jobs that must finish first. Returns what `add` does.
    """
    folder = Path(request["folder"])
    with hold_lock(folder.parent / LOCK, wait=LOCK_LIMIT) as locked:
        if refused := _refusal(folder, locked):
            return refused
        before, session, asked = (read_json(folder / f"{name}.json") for name in ("state", "session", "request"))
        if not before or not session or not asked or not isinstance(before.get("arguments"), list):
            return {"error": f"the folder of run {folder.name} is damaged: add the run again on the controller"}
        link_free(folder / "session.json").write(json.dumps(session | {"continues": True}).encode(), 0o600)
        content = json.dumps(asked | {"submitted": time.time()}, indent=1).encode()
        link_free(folder / "request.json").write(content, 0o600)
        arguments = [word for word in map(str, before["arguments"]) if not word.startswith("--dependency=")]
        if after := [str(int(job)) for job in request["after"]]:
            arguments.append(f"--dependency=afterok:{':'.join(after)}")
        return {"job": submit(folder, arguments)}


def _refusal(folder: Path, locked: bool) -> dict[str, Any]:
    """Return why the job of a run cannot be submitted now; empty if it can be."""
    if not locked:
        return {"error": f"another controller has not finished adding a run within {LOCK_LIMIT:.0f} s"}
    if ids := _lines(["squeue", "--noheader", f"--name={folder.name}", "--format=%i"]):
        return {"exists": int(ids[0])}
    if (read_json(folder / "state.json") or {}).get("phase") in LIVE:
        service = "systemctl status trainyard-queue"
        return {"error": f"run {folder.name} is still ending: try again in a few seconds, or see `{service}`"}
    return {}


def change(request: dict[str, Any]) -> dict[str, Any]:
    """Cancel, hold or release jobs, or give them another priority.

    `request`: `do`; `jobs`, their ids; `priority` for `do=priority`. Returns `changed`: the ids; `refused`: why a job
    was not changed, by its id.
    """
    changed, refused = [], {}
    for job in request["jobs"]:
        words = [*_COMMANDS[request["do"]], str(int(job))] if request["do"] in _COMMANDS else []
        words = words or ["scontrol", "update", f"JobId={int(job)}", f"Partition={request['priority']}"]
        try:
            command(words)
            changed.append(int(job))
        except SupervisorError as error:
            refused[str(job)] = str(error)
    return {"changed": changed, "refused": refused}


def _check_owner(path: Path) -> None:
    """Check that the role `queue` configured the Slurm of this host, by the first line. Raises SupervisorError."""
    with contextlib.suppress(OSError), path.open("rb") as file:
        if file.read(len(OURS)) != OURS:
            remedy = "python -m trainer config slurm writes a script for it"
            raise SupervisorError(f"its Slurm is not the queue of trainyard ({path}): {remedy}")


def _lines(words: Sequence[str]) -> list[str]:
    """Return the output of a program of Slurm by line. Raises SupervisorError."""
    return [line for line in command(words).split("\n") if line][:LINES_LIMIT]


@functools.lru_cache(1024)  # the sampler of the dashboard queries repeatedly
def _host_names(text: str) -> tuple[str, ...]:
    """Return the hosts of a list of Slurm, such as `node[1-3]`. Raises SupervisorError."""
    return tuple(_lines(["scontrol", "show", "hostnames", "--", text]))


def _recent(runs: list[Path], with_job: set[str], recent: int | None) -> list[Path]:
    """Return the runs that have a job, and the first `recent` of the others; all for None."""
    if recent is None:
        return runs
    others = [run for run in runs if run.name not in with_job]
    return [run for run in runs if run.name in with_job] + others[:recent]


def _link(target: Path, source: Path) -> None:
    """Give a file a second name, so that runs share its content; copy it to another file system. Raises OSError."""
    target.parent.mkdir(parents=True, exist_ok=True)
    target.unlink(missing_ok=True)
    try:
        target.hardlink_to(source)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        shutil.copyfile(source, target)


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
    """Return the fields of a run's spec, and the digests of its files; the session may also hold secrets."""
    try:
        prepared = json.loads((folder / "session.json").read_bytes())["state"]["prepared"]
        return {"spec": prepared["spec"], "digests": [[file["kind"], file["digest"]] for file in prepared["files"]]}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
