"""The servers that write completions of a run, as its plan names them and as the sandbox of the first host lets them be reached."""

from __future__ import annotations

import socket
from urllib.parse import urlsplit

from trainer.common.formats import counted
from trainer.config import RunSpec
from trainer.config.rollout_fields import require_addresses, server_name
from trainyard.run.types import PlanEntry

_SHOWN = 8  # servers in a line


def plan_servers(spec: RunSpec, entries: list[PlanEntry]) -> list[str]:
    """Let the first host reach the servers; return the line of the plan about them. Raises UserError if they have no addresses."""
    if not spec.rollout_servers or not entries:
        return []
    require_addresses(spec)
    entries[0].servers = server_addresses(spec)
    names = ", ".join(map(server_name, spec.rollout_servers[:_SHOWN]))
    more = len(spec.rollout_servers) - _SHOWN
    ranks = "the ranks and " if spec.rollout_ranks else ""
    age = f"at most {counted(spec.max_staleness, 'step')} old" if spec.max_staleness else "never old"
    return [f"completions: written by {ranks}{names}{f' and {more} more' if more > 0 else ''}; {age} (max_staleness)"]


def server_addresses(spec: RunSpec) -> list[str]:
    """Return the IP addresses of the servers that write completions; none for a name that is not known here."""
    found: list[str] = []
    for url in spec.rollout_servers:
        parts = urlsplit(url)
        try:
            found += [str(entry[4][0]) for entry in socket.getaddrinfo(parts.hostname, parts.port or 80)]
        except (OSError, ValueError):
            continue
    return list(dict.fromkeys(found))
