"""Lines of a host's sampler, and the state and pages that a dashboard makes of them."""

import json
from pathlib import Path
from typing import Any

from trainer.supervise.link_free import link_free
from trainyard.dashboard.evaluation_watch import EvaluationWatch
from trainyard.dashboard.project import Project
from trainyard.dashboard.queue_watch import QueueWatch
from trainyard.dashboard.state import ClusterView
from trainyard.dashboard.streams import _parse
from trainyard.dashboard.views import Pages
from trainyard.remote.run_queries import QUERIES
from trainyard.wire.connection import Host, RemoteError
from trainyard.wire.replies import checked_reply

SCRIPT = "<script>alert(1)</script>"


def hosts(count: int = 2) -> list[Host]:
    return [Host(f"node{i + 1}", "127.0.0.1", f"/data{i + 1}", "/usr/bin/python3") for i in range(count)]


def run_line(rank: int = 0, status: str = "running", name: str = "r", **more: Any) -> dict[str, Any]:
    """Return a line about a run of two hosts; `more` are fields of node.json."""
    ended = 1060.0 if status in ("failed", "finished") else None
    node = {"run": name, "node_rank": rank, "ranks": [rank], "hosts": ["node1", "node2"], "attempt": 1}
    node |= {"started": 1000.0, "ended": ended, "status": status, "failures": [], **more}
    state = {"status": status, "alive": status == "running", "now": 1050.0, "run_dir": "/etc", "node": node}
    beat = {"rank": rank, "status": "training", "step": 7, "steps": 40, "loss": 5.3, "time": 1050.0}
    state["ranks"] = {str(rank): beat}
    return {"kind": "run", "name": name, "state": state, "checkpoints": [], "result": None}


def gpu(power: float | None, uuid: str = "GPU-1") -> dict[str, Any]:
    names = ("utilisation_percent", "memory_used_mib", "memory_total_mib", "temperature_c", "power_limit_w")
    return {"uuid": uuid, "name": "a card", "power_w": power} | dict.fromkeys(names)


def host_line(now: float, *gpus: dict[str, Any]) -> dict[str, Any]:
    numbers = ("uptime", "cpu_percent", "load", "memory_total", "memory_available", "disk_total", "disk_free")
    numbers += ("disk_read", "disk_written", "received", "sent")
    line = dict.fromkeys(numbers, 0.0) | {"kind": "host", "now": now, "cores": 2, "interface": "", "link_mbit": 0}
    return line | {"gpus": list(gpus)}


def receive(cluster: ClusterView, host: str, line: dict[str, Any]) -> None:
    """Let a host send a line."""
    parsed = _parse(json.dumps(line).encode())
    assert parsed
    cluster.receive(host, *parsed)


def cluster_with(*lines: tuple[str, dict[str, Any]]) -> ClusterView:
    """Return a cluster of two hosts that have sent these lines."""
    cluster = ClusterView(hosts())
    for host, line in lines:
        receive(cluster, host, line)
    return cluster


def pages_of(cluster: ClusterView, home: Path = Path("/nowhere"), queue: QueueWatch | None = None, **how: Any) -> Pages:
    queue = queue or QueueWatch(cluster, {}, lambda: "node1")
    return Pages(cluster, "token", queue, EvaluationWatch(cluster, Project(home)), **how)


class HostOfRuns:
    """Answers queries about the runs of a folder of this machine, or does not."""

    def __init__(self, runs: Path) -> None:
        self.runs, self.answers = runs, True

    async def run(self) -> None:
        """Do nothing: the test sends the lines."""

    async def ask(self, query: str, **request: Any) -> dict[str, Any]:
        if not self.answers:
            raise RemoteError("the host does not answer")
        return checked_reply(f"query {query}", json.loads(json.dumps(QUERIES[query](link_free(self.runs), request))))
