"""One host and its answers to the requests of preflight."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from trainyard.wire.connection import Host


@dataclass
class HostState:
    """A host and its answers. The answer to a request that was not sent is empty.

    Attributes:
        asked: the controller's clock before and after the `health` request, in seconds since the epoch.
    """

    host: Host  # its description in the inventory
    facts: dict[str, Any] = field(default_factory=dict)  # the answer of the verb `host_facts`
    health: dict[str, Any] = field(default_factory=dict)  # the answer of the verb `health`
    mesh: dict[str, Any] | None = None  # the answer of the verb `mesh`; None if the host did not take part
    asked: tuple[float, float] = (0.0, 0.0)
    error: str = ""  # why the host did not answer, in one line; empty if it did
    chosen: list[dict[str, Any]] | None = None  # the GPUs for the run; None before `assign_gpus`

    @property
    def name(self) -> str:
        """The inventory name."""
        return self.host.name

    @property
    def address(self) -> str:
        """The IP address at which peers reach the host."""
        return self.host.address

    @property
    def gpus(self) -> list[dict[str, Any]]:
        """The GPUs that the run uses on this host: the chosen ones, or all before `assign_gpus`."""
        found: list[dict[str, Any]] = self.facts["gpus"] if self.chosen is None else self.chosen
        return found

    @gpus.setter
    def gpus(self, chosen: list[dict[str, Any]]) -> None:
        self.chosen = chosen

    @property
    def device(self) -> dict[str, Any] | None:
        """The network device on the route to the head, as `health` describes it."""
        return next((row for row in self.health["devices"] if row["name"] == self.facts["interface"]), None)

    @property
    def link_to_head(self) -> dict[str, Any]:
        """The measured link to the head (`mbit`, `latency_ms`); empty if it was not measured."""
        links: dict[str, dict[str, Any]] = (self.mesh or {"lines": {}})["lines"]
        return next((link for link in links.values() if {"mbit", "latency_ms"} <= link.keys()), {})

    def as_dict(self) -> dict[str, Any]:
        """Return all answers in the form of the JSON report."""
        host = self.host
        answer: dict[str, Any] = {"address": host.address, "data_dir": host.data_dir, "python": host.python}
        if self.error:
            return answer | {"error": self.error}
        answer |= {"facts": self.facts, "health": self.health}
        return answer | ({"mesh": self.mesh} if self.mesh else {})


def responding(states: list[HostState]) -> list[HostState]:
    """Return the hosts that have answered every request so far."""
    return [state for state in states if not state.error]
