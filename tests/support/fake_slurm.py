"""A stand-in for Slurm's programs: shell scripts that answer from files, so that tests need no Slurm.

The lines have the form that Slurm 22.05 prints (tests/unit/test_queue_front_state.py). Nothing is scheduled. Tests on lab hosts
use the real Slurm.
"""

import json
import time
from pathlib import Path
from typing import Any

from trainyard.queue.lease_step import AGAIN
from trainyard.queue.slurm_lease import ASKED_FOR

_SQUEUE = (
    'test -e "{folder}/down" && {{ echo "slurm_load_jobs error: Unable to contact slurm controller" >&2; exit 1; }}\n'
)
_SQUEUE += 'echo x >>"{folder}/asked"; cat "{folder}/jobs"\n'
_SINFO = 'cat "{folder}/nodes"\n'
_SCANCEL = 'sed -i "/^$1|/d" "{folder}/jobs"\n'
_SCONTROL = """\
case $1 in
show) echo "$4" | tr , '\\n' ;;
hold) sed -i "s/^\\($2|[a-z]*|PENDING\\)|[^|]*|/\\1|JobHeldUser|/" "{folder}/jobs" ;;
release) sed -i "s/^\\($2|[a-z]*|PENDING\\)|[^|]*|/\\1|Resources|/" "{folder}/jobs" ;;
update) job=${{2#JobId=}} to=${{3#Partition=}}
  if [ $to = critical ]; then echo "scontrol: error: Access/permission denied" >&2; exit 1; fi
  sed -i "s/^$job|[a-z]*|/$job|$to|/" "{folder}/jobs" ;;
esac
"""


class FakeSlurm:
    """The programs, their answers, and the folders of the runs. `programs`: folder for the PATH."""

    def __init__(self, folder: Path, data_dir: Path) -> None:
        """Write the programs. `data_dir`: `cluster_data_dir` of the queue host."""
        self.folder, self.runs = folder, data_dir / "queue"
        self.programs = folder / "bin"
        self.programs.mkdir(parents=True)
        scripts = {"squeue": _SQUEUE, "sinfo": _SINFO, "scancel": _SCANCEL, "scontrol": _SCONTROL}
        for name, script in scripts.items():
            (self.programs / name).write_text("#!/bin/sh\n" + script.format(folder=folder))
            (self.programs / name).chmod(0o755)
        self.set_jobs([])
        (folder / "nodes").write_text("node1|mixed|8|22848|gpu:rtx3090:2,vram:24\nnode2|mixed|4|8192|(null)\n")

    def set_jobs(self, lines: list[str]) -> None:
        """Set what squeue prints."""
        (self.folder / "jobs").write_text("".join(f"{line}\n" for line in lines))

    def add_run(
        self, run: str, phase: str = "waiting", attempts: list[dict[str, Any]] | None = None, **asked: Any
    ) -> None:
        """Write the folder of a run, with what its driver recorded."""
        folder = self.runs / run
        folder.mkdir(parents=True)
        (folder / "request.json").write_text(json.dumps({"run": run, "submitted": time.time() - 9000, **asked}))
        (folder / "state.json").write_text(json.dumps({"phase": phase, "attempts": attempts or []}))

    def asked(self) -> int:
        """Return how often squeue was called."""
        file = self.folder / "asked"
        return len(file.read_text().splitlines()) if file.exists() else 0

    def set_up(self, up: bool) -> None:
        """Let squeue answer, or fail as it does without slurmctld."""
        (self.folder / "down").unlink(missing_ok=True) if up else (self.folder / "down").touch()


def attempt(begin: float, end: float | None, reason: str = "", **hosts: list[str]) -> dict[str, Any]:
    """Return a start as a driver records it: GPUs by host."""
    shown = {host: {"gpus": gpus, "cpus": []} for host, gpus in hosts.items()}
    order = AGAIN if ASKED_FOR in reason else None
    return {"restart": 0, "begin": begin, "end": end, "hosts": shown, "order": order, "reason": reason}


def busy_queue(slurm: FakeSlurm) -> None:
    """Fill the queue: two runs that run, two that wait, one that is held, and some that have ended."""
    now = time.time()
    slurm.set_jobs(
        [
            f"1|normal|RUNNING|None|{now - 4000:.0f}|{now + 2400:.0f}|2:00:00|node1|first-run",
            f"2|low|RUNNING|None|{now - 900:.0f}|N/A|UNLIMITED|node2|tiny",
            f"3|normal|PENDING|Resources|{now + 2400:.0f}|N/A|30:00||wants-gpu",
            "4|low|PENDING|Dependency|N/A|N/A|30:00||after-it",
            "5|low|PENDING|JobHeldUser|N/A|N/A|UNLIMITED||parked",
            f"6|normal|RUNNING|None|{now - 300:.0f}|{now + 600:.0f}|30:00|node2|<script>window.executed=1</script>",
        ]
    )
    slurm.add_run("first-run", "running", [attempt(now - 4000, None, node1=["0", "1"])], gpus=2, gpu_memory=16)
    slurm.add_run("tiny", "running", [attempt(now - 900, None, node2=[])], priority="low", cores=1)
    slurm.add_run("wants-gpu", gpus=1, gpu_memory=16)
    slurm.add_run("after-it", priority="low", after=["first-run"])
    slurm.add_run("parked", priority="low")
    slurm.add_run("done", "finished", [attempt(now - 16_000, now - 9000, node1=["0"], node2=[])], gpus=1)
    two = [
        attempt(now - 8000, now - 6000, f"node1: {ASKED_FOR}", node1=["1"]),
        attempt(now - 5500, now - 4100, node1=["1"]),
    ]
    slurm.add_run("twice", "failed", two, gpus=1)
    slurm.add_run("short", "finished", [attempt(now - 5000, now - 4900, node2=[])], cores=1)
