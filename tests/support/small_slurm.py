"""A stand-in for a Slurm cluster on this machine: its programs run jobs as processes, so that tests need no Slurm.

Nothing is scheduled: a job starts at once, or waits while the file `hold` exists. Nodes are processes that share this machine's
folders. Tests on lab hosts use the real Slurm.

    python small_slurm.py PROGRAM FOLDER ARGUMENT...     a program, as the scripts that `SmallSlurm` writes call it
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

PROGRAMS = ("sbatch", "srun", "squeue", "sinfo", "scancel", "scontrol")
PARTITIONS = ("batch", "gpu")


class SmallSlurm:
    """The programs, and the jobs below a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.programs = folder, folder / "bin"
        self.programs.mkdir(parents=True)
        for name in PROGRAMS:
            text = f'#!/bin/sh\nexec {sys.executable} -I -S {Path(__file__).resolve()} {name} {folder} "$@"\n'
            (self.programs / name).write_text(text)
            (self.programs / name).chmod(0o755)

    def hold(self, on: bool) -> None:
        """Let jobs wait, or start."""
        (self.folder / "hold").touch() if on else (self.folder / "hold").unlink(missing_ok=True)

    def jobs(self) -> list[dict[str, Any]]:
        """Return all jobs in the order of their submission."""
        return [json.loads(file.read_text()) for file in sorted(self.folder.glob("job-*.json"))]

    def signal(self, job: int, number: signal.Signals) -> None:
        """Signal the steps of a job, as `--signal` does at the end of the time limit."""
        for pid in _steps(self.folder, job):
            os.kill(pid, number)

    def clean(self) -> None:
        """Kill all jobs."""
        for job in self.jobs():
            _kill(self.folder, job)


def main() -> int:
    program, folder, words = sys.argv[1], Path(sys.argv[2]), sys.argv[3:]
    return int(globals()[f"_{program}"](folder, words) or 0)


def _save(folder: Path, job: dict[str, Any]) -> None:
    file = folder / f"job-{job['id']:04d}.json"
    aside = file.with_suffix(f".{os.getpid()}")
    aside.write_text(json.dumps(job))
    aside.replace(file)


def _load(folder: Path, number: str | int) -> dict[str, Any]:
    return dict(json.loads((folder / f"job-{int(number):04d}.json").read_text()))


def _option(words: list[str], script: str, name: str, default: str = "") -> str:
    lines = [line.removeprefix("#SBATCH ") for line in script.split("\n") if line.startswith("#SBATCH ")]
    found = [word.partition("=")[2] for word in [*lines, *words] if word.startswith(f"--{name}=")]
    return found[-1] if found else default


def _sbatch(folder: Path, words: list[str]) -> int:
    script = sys.stdin.read()
    partition = _option(words, script, "partition", "batch")
    if partition not in PARTITIONS:
        print(f"sbatch: error: invalid partition specified: {partition}", file=sys.stderr)
        return 1
    if _option(words, script, "account") == "broke":
        print("allocation failure: Invalid account or account/partition combination specified", file=sys.stderr)
        return 1
    if "--test-only" in words:
        return 0
    number = len(list(folder.glob("job-*.json"))) + 1
    job = {"id": number, "state": "PENDING", "restart": 0, "nodes": int(_option(words, script, "nodes", "1")), "pid": 0}
    job |= {
        "output": _option(words, script, "output").replace("%%", "%"),
        "folder": _option(words, script, "chdir", "/"),
    }
    (folder / f"script-{number}").write_text(script)
    _save(folder, job)
    _start(folder, number)
    print(number)
    return 0


def _start(folder: Path, number: int) -> None:
    subprocess.Popen(
        [sys.executable, "-I", "-S", __file__, "job", str(folder), str(number)],
        **dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL),
        start_new_session=True,
    )


def _job(folder: Path, words: list[str]) -> None:
    """Run a job to its end."""
    number = int(words[0])
    while (folder / "hold").exists():
        time.sleep(0.05)
    job = _load(folder, number)
    if job["state"] != "PENDING":
        return
    names = ",".join(f"n{place}" for place in range(job["nodes"]))
    env = {**os.environ, "SLURM_JOB_ID": str(number), "SLURM_JOB_NODELIST": names, "SLURM_NNODES": str(job["nodes"])}
    env["SLURM_RESTART_COUNT"] = str(job["restart"])
    with Path(job["output"]).open("ab") as sink:
        script = subprocess.Popen(
            ["bash", folder / f"script-{number}"], cwd=job["folder"], env=env, stdout=sink, stderr=sink
        )
        _save(folder, job | {"state": "RUNNING", "pid": os.getpid()})
        code = script.wait()
    now = _load(folder, number)
    if now["state"] == "REQUEUED":
        _save(folder, now | {"state": "PENDING", "restart": now["restart"] + 1})
        _start(folder, number)
    elif now["state"] == "RUNNING":
        _save(folder, now | {"state": "FAILED" if code else "COMPLETED"})


def _srun(folder: Path, words: list[str]) -> int:
    options = []
    while words[0].startswith("--"):
        options.append(words.pop(0))
    output, number = _option(options, "", "output"), os.environ.get("SLURM_JOB_ID", "0")
    nodes = int(_option(options, "", "nodes") or os.environ.get("SLURM_NNODES", "1"))
    tasks = []
    for place in range(nodes):
        env = {**os.environ, "SLURM_NODEID": str(place), "SLURM_NNODES": str(nodes), "SLURMD_NODENAME": f"n{place}"}
        log = re.sub("%(.)", lambda found, here=place: {"n": str(here), "%": "%"}[found[1]], output)
        sink = Path(log).open("ab") if log else None  # noqa: SIM115  the step writes it to its end
        tasks.append(subprocess.Popen(words, env=env, stdout=sink, stderr=sink, start_new_session=True))
    (folder / f"step-{number}").write_text(" ".join(str(task.pid) for task in tasks))
    codes = [0] * nodes
    while any(task.poll() is None for task in tasks):
        if any(task.returncode for task in tasks if task.returncode is not None):
            for task in tasks:
                _kill_group(task.pid)
        time.sleep(0.05)
    codes = [task.returncode for task in tasks]
    return max(abs(code) for code in codes)


def _steps(folder: Path, job: int) -> list[int]:
    """Return all processes of the step of a job."""
    file = folder / f"step-{job}"
    return [pid for first in (file.read_text().split() if file.exists() else []) for pid in _below(int(first))]


def _below(pid: int) -> list[int]:
    try:
        children = [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []
    return [pid, *(found for child in children for found in _below(child))]


def _kill_group(pid: int) -> None:
    for found in _below(pid):
        try:
            os.kill(found, signal.SIGKILL)
        except ProcessLookupError:
            continue


def _kill(folder: Path, job: dict[str, Any]) -> None:
    for pid in _steps(folder, job["id"]):
        _kill_group(pid)
    for child in _below(job["pid"])[1:] if job["pid"] else []:
        _kill_group(child)


def _squeue(folder: Path, words: list[str]) -> int:
    file = folder / f"job-{int(_option(words, '', 'jobs')):04d}.json"
    if not file.exists() or (folder / "forgotten").exists():
        print("slurm_load_jobs error: Invalid job id specified", file=sys.stderr)
        return 1
    job = json.loads(file.read_text())
    print(
        f"{job['state']}|{'Resources' if job['state'] == 'PENDING' else 'None'}|2026-01-01T14:20:00|n[0-1]|{job['folder']}"
    )
    return 0


def _sinfo(folder: Path, words: list[str]) -> None:
    print("\n".join(PARTITIONS))


def _scancel(folder: Path, words: list[str]) -> None:
    job = _load(folder, words[-1])
    _save(folder, job | {"state": "CANCELLED"})
    _kill(folder, job)


def _scontrol(folder: Path, words: list[str]) -> None:
    if words[:2] == ["show", "hostnames"]:
        print("\n".join(words[2].split(",")))
    elif words[:2] == ["show", "node"]:
        print(f"NodeName={words[2]} Arch=x86_64\n   NodeAddr=127.0.0.1 NodeHostName={words[2]} Version=22.05.8")
    elif words[0] == "requeue":
        job = _load(folder, words[1])
        _save(folder, job | {"state": "REQUEUED"})
        if "SLURM_JOB_ID" not in os.environ:  # the script itself ends by itself
            _kill(folder, job)


if __name__ == "__main__":
    sys.exit(main())
