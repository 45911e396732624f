"""What a command of the trainer outside of a run needs on a host, as merge and evaluate."""

from __future__ import annotations

from typing import Any

from trainyard.run.types import PlanEntry, StagedFile
from trainyard.wire.connection import Host


def apart_request(
    host: Host, trainer: StagedFile, run_dir: str, values: dict[str, Any], limit: float
) -> dict[str, Any]:
    """Return the request for a command of the trainer on a host with the input `values`, see trainyard/remote/apart.py."""
    return {
        "trainer": f"{host.data_dir}/{trainer.dest}",
        "digest": trainer.digest,
        "run_dir": run_dir,
        "reads": [],
        "backend": host.backend,
        "limit": limit,
        "input": values,
    }


def copy_entry(host: Host) -> PlanEntry:
    """Return what `copy_to_hosts` needs to know of a host."""
    return PlanEntry(host.name, address=host.address, data_dir=host.data_dir)
