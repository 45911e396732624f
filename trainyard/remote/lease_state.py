"""A host's side of a lease of the queue: whether it is held, and its end. Standard library only."""

from __future__ import annotations

import fcntl
from pathlib import Path
from typing import Any

from trainer.supervise.link_free import run_folder
from trainer.supervise.run_files import holds_lock, is_locked, read_json, write_json


def lease(request: dict[str, Any]) -> dict[str, Any]:
    """Return the state of a lease on this host, and end it if the driver requests that.

    `request`: `path` of the lease; `run_dir`; `end`, the exit code with which the step ends, and `restart`, the number
    of the allocation of the job that it ends. Returns `held`, whether the step of the job is alive; `restart`, the
    number of its allocation; `gpus` that Slurm has granted; `ending`, whether Slurm has asked it to end; `time` of
    that, or else of its begin (s since the epoch); `alive`, whether ranks of the run are alive.
    """
    path = Path(request["path"])
    if "end" in request:
        order = {"run": Path(request["run_dir"]).name, "restart": request["restart"], "code": request["end"]}
        write_json(path.with_name(f"{path.name}.end"), order)
    found = read_json(path.with_name(f"{path.name}.json")) or {}
    return {
        "held": is_locked(path, fcntl.lockf),
        "restart": found.get("restart", -1),
        "gpus": found.get("gpus", []),
        "ending": bool(found.get("ending")),
        "time": found.get("time", 0.0),
        "alive": holds_lock(run_folder(request["run_dir"])),
    }
