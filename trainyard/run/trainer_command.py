"""What a command of the trainer outside of a run needs on a host, as merge and evaluate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trainer.files import sha256_file
from trainyard.connection import Host
from trainyard.run.trainer_archive import trainer_archive


def trainer_file(work: Path) -> dict[str, Any]:
    """Return the entry of the trainer's archive for `copy_to_hosts`. `work`: folder on the controller for created files."""
    archive = trainer_archive(work)
    digest = sha256_file(archive)
    return {"src": str(archive), "dest": f"store/trainers/{digest[:16]}.zip", "sha256": {"": digest}}


def apart_request(
    host: Host, file: dict[str, Any], run_dir: str, values: dict[str, Any], limit: float
) -> dict[str, Any]:
    """Return the request for a command of the trainer on a host, see trainyard/remote/apart.py.

    Args:
        file: see `trainer_file`.
        run_dir: the only folder that it writes.
        values: its input.
        limit: in seconds.
    """
    return {
        "trainer": f"{host.data_dir}/{file['dest']}",
        "digest": file["sha256"][""],
        "run_dir": run_dir,
        "reads": [],
        "backend": host.backend,
        "limit": limit,
        "input": values,
    }


def copy_entry(host: Host) -> dict[str, Any]:
    """Return what `copy_to_hosts` needs to know of a host."""
    return {"host": host.name, "address": host.address, "data_dir": host.data_dir}
