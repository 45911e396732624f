"""The project on the controller, as far as the dashboard uses it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainyard.connection import Host
from trainyard.ollama.deploy import server_urls


@dataclass(frozen=True)
class Project:
    """The project's folder, with the starts of runs and the progress of other programs, and what the inventory says of Ollama.

    Attributes:
        home: the folder.
        ollama_urls: of hosts, see `deploy.server_urls`; without those of a host, its address and port.
    """

    home: Path
    ollama_urls: Mapping[str, list[str]] = field(default_factory=dict)

    @classmethod
    def of(cls, home: Path, hosts: Iterable[Host], variables: Mapping[str, Mapping[str, Any]]) -> Project:
        """Return the project with what the `variables` of each host, by its name, say of Ollama."""
        return cls(home, {host.name: server_urls(variables[host.name]) for host in hosts})

    @property
    def work(self) -> Path:
        """Folder of created files and records."""
        return self.home / ".trainyard"

    def urls_of(self, host: Host) -> list[str]:
        """Return the addresses at which a host may reach its own Ollama."""
        known = {"cluster_address": host.address, "ollama_port": host.ollama_port}
        return self.ollama_urls.get(host.name) or server_urls(known)
