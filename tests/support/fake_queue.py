"""A stand-in for the queue host and the hosts of its runs, for tests of what the controller adds; tests/lab has real ones."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainyard.queue.queue_client import QueueState, SlurmJob, SlurmNode
from trainyard.queue.request import Request
from trainyard.queue.requests import Site
from trainyard.wire.connection import Host

HOSTS = [Host(f"node{number}", f"10.0.0.{number}", "/data", "/usr/bin/python3") for number in (1, 2)]


class FakeQueue:
    """The queue host, which has these runs.

    Attributes:
        found: what it says.
        added: request, contents and arguments of each run that was added.
    """

    host = HOSTS[0]

    def __init__(self, requests: Mapping[str, dict[str, Any]] | None = None, nodes: int = 1, **states: str) -> None:
        """Take the state of each run, waiting or how it ended, and fields of their requests."""
        self.added: dict[str, tuple[Request, Mapping[str, bytes], list[str]]] = {}
        self.found = QueueState(
            jobs={run: SlurmJob(50, run, "normal", "PENDING") for run, state in states.items() if state == "waiting"},
            nodes={host.name: SlurmNode(host.name, "idle", 2, 8192) for host in HOSTS[:nodes]},
            requests={run: Request(run=run, **(requests or {}).get(run, {})) for run in states},
            states={run: {"phase": state} for run, state in states.items()},
            now=2.0,
        )

    def state(self, specs: Any = ()) -> QueueState:
        return self.found

    def add(self, request: Request, contents: Mapping[str, bytes], links: Any, arguments: list[str]) -> int:
        self.added[request.run] = request, contents, arguments
        return 100 + len(self.added)

    def site(self, home: Path, files: Mapping[str, Mapping[str, str]] | None = None, **more: Any) -> Site:
        """Return where runs are added. `files`: the texts of files in the folders of runs, by host and name."""

        class Connection:
            def __init__(self, name: str) -> None:
                self.files = (files or {}).get(name, {})

            def call(self, verb: str, request: dict[str, Any]) -> dict[str, Any]:
                assert verb == "read_files"
                return {"text": {name: text for name, text in self.files.items() if name in request["text"]}}

        hosts, connect = HOSTS[: len(self.found.nodes)], Connection
        return Site(hosts, False, self, connect, home, lambda line: None, "token", **more)  # type: ignore[arg-type]
