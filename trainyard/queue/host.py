"""Which host has the queue. Whether Slurm runs there, only the host can tell: site.yml may have got `queue_state` with -e."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from trainer.errors import UserError
from trainyard.cluster import service_host


def queue_host(groups: Mapping[str, Sequence[str]]) -> str:
    """Return the host of the queue: the first of the group queue, head or cluster that is in the cluster (see roles/queue).

    Raises:
        UserError: there is none.
    """
    if name := service_host(groups):
        return name
    raise UserError(
        "queue: the inventory has no group cluster: add the hosts to one, as in inventory/hosts.example.yml"
    )
