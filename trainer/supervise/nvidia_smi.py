"""Queries of the NVIDIA driver. Standard library only."""

from __future__ import annotations

import subprocess

TIME_LIMIT = 20.0  # s


def query(*fields: str, subject: str = "gpu") -> list[list[str]]:
    """Return the values of `fields` for every GPU, or for every process that computes on one; none without a driver.

    Sizes are numbers in MiB. `nvidia-smi --help-query-gpu` and `--help-query-compute-apps` list the fields.

    Args:
        fields: names of fields, one value each; only the last one's may hold a comma.
        subject: "gpu" or "compute-apps".
    """
    arguments = [f"--query-{subject}={','.join(fields)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(
            ["nvidia-smi", *arguments], capture_output=True, text=True, timeout=TIME_LIMIT, check=False
        )
    except (OSError, subprocess.SubprocessError):
        return []
    rows = done.stdout.splitlines() if done.returncode == 0 else []
    values = [[value.strip() for value in row.split(",", len(fields) - 1)] for row in rows]
    return [row for row in values if len(row) == len(fields)]


def mib(value: str) -> int:
    """Return a size of `query` in MiB; 0 for a GPU without separate memory ("[N/A]")."""
    return int(float(value)) if value.replace(".", "", 1).isdigit() else 0
