"""The lease of a run on this host, under the queue: a file that the step of a Slurm job keeps locked. Standard library only."""

from __future__ import annotations

from pathlib import Path

from trainer.supervise.run_files import SupervisorError, is_locked


def check_lease(lease: str) -> None:
    """Check that a run may use this host. Raises SupervisorError if its lease has ended.

    Args:
        lease: the file of the lease; empty without a queue.
    """
    if lease and not is_locked(Path(lease)):
        raise SupervisorError(f"the lease of this host has ended ({Path(lease).name}): the queue starts the run again")
