"""The login host's side of a run on a Slurm cluster: checks before a job is submitted. Standard library only."""

from __future__ import annotations

import re
import secrets
from pathlib import Path
from typing import Any

from trainer.supervise.link_free import LinkFreePath
from trainer.supervise.run_files import SupervisorError
from trainer.supervise.slurm_state import command, find_program

INSPECT_LIMIT = 60.0  # s for a step that inspects the nodes
IMMEDIATE = 5  # s for Slurm to start that step
_FOUND = re.compile(r"trainyard ([A-Za-z0-9._-]{1,255}) (shared|unshared) (python|torch|none)")
# Says what one node has: the folder with the file of this check, and the interpreter.
_INSPECT = """\
folder=unshared python=none
[ ! -e "$1" ] || folder=shared
if [ -x "$2" ]; then
    python=python
    "$2" -I -c 'import importlib.util, sys; sys.exit(not importlib.util.find_spec("torch"))' && python=torch
fi
echo "trainyard $SLURMD_NODENAME $folder $python"
"""


def check(request: dict[str, Any]) -> dict[str, Any]:
    """Check whether this cluster would accept a job, and inspect its nodes that are free now.

    Args:
        request: `script`, the batch script; `options`, those of srun that ask for the same kind of nodes; `partition`;
            `data_dir`; `python`; `write`, whether to write a file for the inspection of the nodes.

    Returns:
        `refused`, why Slurm would not accept the job, or an empty string; `partitions` of the cluster, where the one that was
        asked for is unknown; `nodes`, for each that was inspected [name, whether it has the folder, "torch", "python" or
        "none"]; `unseen`, why no node was inspected.
    """
    find_program("sbatch")
    answer: dict[str, Any] = {"refused": "", "partitions": [], "nodes": [], "unseen": ""}
    known = [line.strip() for line in command(["sinfo", "--noheader", "--format=%R"]).split("\n") if line.strip()]
    if unknown := set(filter(None, request["partition"].split(","))) - set(known):
        return answer | {
            "refused": f"there is no partition {sorted(unknown)[0]}",
            "partitions": sorted(set(known))[:50],
        }
    try:
        command(["sbatch", "--test-only", "--output=/dev/null"], request["script"])
    except SupervisorError as error:
        return answer | {"refused": str(error)}
    if request["write"]:
        try:
            answer["nodes"] = _inspect_nodes(request)
        except SupervisorError as error:
            answer["unseen"] = str(error)
    return answer


def _inspect_nodes(request: dict[str, Any]) -> list[tuple[str, bool, str]]:
    """Return the properties of the nodes. Raises SupervisorError if no node is free now, or Slurm refuses the step."""
    file = LinkFreePath(Path(request["data_dir"]), f".shared-{secrets.token_hex(8)}")
    file.root.mkdir(parents=True, exist_ok=True)
    file.make_file()
    # One core of each node, for a minute; the working directory may be missing there.
    words = [
        "srun",
        "--quiet",
        f"--immediate={IMMEDIATE}",
        *request["options"],
        "--time=1",
        "--chdir=/",
        "--input=none",
    ]
    try:
        text = command([*words, "/bin/sh", "-c", _INSPECT, "sh", str(file), request["python"]], limit=INSPECT_LIMIT)
    finally:
        file.remove(missing_ok=True)
    found = [match for line in text.splitlines() if (match := _FOUND.fullmatch(line))]
    return [(match[1], match[2] == "shared", match[3]) for match in found]
