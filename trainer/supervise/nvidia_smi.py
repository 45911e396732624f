"""Queries of the NVIDIA driver. Standard library only."""

from __future__ import annotations

import re
import shutil
import subprocess

TIME_LIMIT = 20.0  # s
WSL = "/usr/lib/wsl/lib/nvidia-smi"  # a folder that WSL2 adds to the PATH of its own shells only, not of SSH's


def program() -> str:
    """Return the path of nvidia-smi, or an empty string without a driver."""
    return shutil.which("nvidia-smi") or shutil.which(WSL) or ""


def query(*fields: str, subject: str = "gpu") -> list[list[str]]:
    """Return the values of `fields` for every GPU, or for every process that computes on one; none without a driver.

    Sizes are numbers in MiB. `nvidia-smi --help-query-gpu` and `--help-query-compute-apps` list the fields. `fields`:
    names of fields, one value each; only the last one's may hold a comma. `subject`: "gpu" or "compute-apps".
    """
    rows = _lines(f"--query-{subject}={','.join(fields)}", "--format=csv,noheader,nounits")
    values = [[value.strip() for value in row.split(",", len(fields) - 1)] for row in rows]
    return [row for row in values if len(row) == len(fields)]


def nvlinks() -> dict[str, int]:
    """Return {UUID of a GPU: number of its active NVLinks}, for the GPUs that have some."""
    found: dict[str, int] = {}
    uuid = ""
    for line in _lines("nvlink", "--status"):
        if match := re.search(r"\(UUID: ([\w-]+)\)", line):
            uuid = match[1]
        elif uuid and re.fullmatch(r"\s*Link \d+: [\d.]+ GB/s", line):
            found[uuid] = found.get(uuid, 0) + 1
    return found


def _lines(*arguments: str) -> list[str]:
    """Return the lines that nvidia-smi prints; none if it fails."""
    try:
        done = subprocess.run([program(), *arguments], capture_output=True, text=True, timeout=TIME_LIMIT, check=False)
    except (OSError, subprocess.SubprocessError):
        return []
    return done.stdout.splitlines() if done.returncode == 0 else []


def mib(value: str) -> int:
    """Return a size of `query` in MiB; 0 for a GPU without separate memory ("[N/A]")."""
    return int(float(value)) if value.replace(".", "", 1).isdigit() else 0
