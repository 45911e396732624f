"""Which host has the queue."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trainer.errors import UserError
from trainyard.cluster import service_host


def queue_host(groups: Mapping[str, Sequence[str]], variable: Callable[[str, str], Any]) -> str:
    """Return the host of the queue: the first of the group queue, head or cluster that is in the cluster (see roles/queue).

    Args:
        variable: returns a variable of a host, or None.

    Raises:
        UserError: there is none, or the queue is not installed.
    """
    name = service_host(groups)
    if not name:
        raise UserError(
            "queue: the inventory has no group cluster: add the hosts to one, as in inventory/hosts.example.yml"
        )
    if variable(name, "queue_state") != "present":
        raise UserError(
            f"the queue is not installed on {name}: set queue_state: present for the group cluster in the inventory, and "
            "run site.yml"
        )
    return name
