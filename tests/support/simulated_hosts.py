"""Hosts that exist only in this process: they answer the controller's requests as hosts of a run on N hosts do.

Sizes are those of real answers: a heartbeat has the step times of all ranks, node.json the names of all hosts.
"""

from __future__ import annotations

import json
import shlex
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lying_host import RUN, honest

from trainer.spec import make_spec
from trainer.supervise.status import shorten
from trainyard.run.types import PreparedRun, StagedFile
from trainyard.wire.connection import Host, HostConnection

LATENCY = 0.05  # s of a request: Python starts on the host
STEP = 0.5  # s of a training step
POLL = 0.2  # s between two checks of a host while a request waits for a change


def prepared_run(rows: int) -> PreparedRun:
    """Return a run whose files are already on the hosts."""
    spec = make_spec({"run": RUN, "model": "tiny", "fake_data": True, "total_batch_size": rows}, "the test")
    return PreparedRun(spec, [StagedFile("trainer", "/dev/null", "store/t.zip", {"": "0" * 64}, "0" * 64, 1)], {})


@dataclass
class Cluster:
    """`count` hosts with one rank each. Their run ends `duration` seconds after its start."""

    count: int
    folder: Path
    duration: float
    began: float = 0.0

    def __post_init__(self) -> None:
        self.hosts = [
            Host(f"node{n:04}", f"10.0.{n // 250}.{n % 250 + 1}", f"{self.folder}/data{n}", "/usr/bin/python3")
            for n in range(self.count)
        ]
        self.names = [host.name for host in self.hosts]
        self.times = [0.1234] * self.count
        self.numbers = {host.name: number for number, host in enumerate(self.hosts)}

    def connect(self, host: Host) -> HostConnection:
        return HostConnection(host, SimulatedTransport(self, host))

    def state(self, number: int, request: dict[str, Any]) -> dict[str, Any]:
        """Return the status of a host's part of the run, when it changes or after the seconds of the request."""
        deadline = time.monotonic() + request.get("wait", 0.0)
        while time.monotonic() < min(deadline, self.began + self.duration):
            time.sleep(POLL)
        ran = time.monotonic() - self.began
        ended = ran >= self.duration
        status, host = "finished" if ended else "training", self.hosts[number]
        answer = honest("run_status", request, host, number)
        steps = int(self.duration / STEP)
        rank = answer["ranks"][str(number)] | {"status": status, "step": min(steps, int(ran / STEP)), "steps": steps}
        rank |= {"error": None, "step_seconds": self.times, "comm_share": self.times, "time": time.time()}
        node = answer["node"] | {"hosts": self.names, "failures": [], "run": RUN, "node_rank": number}
        node |= {"status": "finished" if ended else "running", "ranks": [number]}
        answer |= {"status": node["status"], "node": node, "ranks": {str(number): rank}, "logs": {}}
        return shorten(answer) if request.get("brief") else answer

    def answer(self, verb: str, request: dict[str, Any], host: Host) -> dict[str, Any]:
        """Return the answer of a host."""
        number = self.numbers[host.name]
        if verb == "run_status":
            return self.state(number, request)
        answer = honest(verb, request, host, number)
        if verb == "health":
            answer["names"]["addresses"] = {other.name: [other.address] for other in self.hosts if other is not host}
            answer |= {"busy": [], "torchruns": [], "clock": [time.time(), time.time()], "files": {}, "wsl": None}
            answer["gpu"] = {"cards": 0, "gpus": [], "users": []}
        if verb == "begin":
            self.began = self.began or time.monotonic()
            answer = {"now": time.time()}
        return answer


class SimulatedTransport:
    """Answers in this process."""

    kind = "ssh"

    def __init__(self, cluster: Cluster, host: Host) -> None:
        self.cluster, self.host = cluster, host

    def execute(self, command: str, stdin: bytes | None = None) -> tuple[int, bytes, bytes]:
        verb, request = parse(command, stdin or b"")
        answer = json.dumps(self.cluster.answer(verb, request, self.host)).encode() + b"\n"
        time.sleep(LATENCY)
        return 0, answer, b""

    def put(self, source: str, target: str) -> None:
        """Accept a file."""

    def fetch(self, source: str, target: str) -> None:
        """Return an empty file."""
        Path(target).write_bytes(b"")

    def abort(self) -> None:
        """End nothing."""


def parse(command: str, stdin: bytes) -> tuple[str, dict[str, Any]]:
    """Return the verb and the request of a command."""
    if command.startswith("cd -P"):
        return "begin", {}
    verb = shlex.split(command)[-1]
    if verb == "start":
        return verb, json.loads(stdin)
    size, _, rest = stdin.partition(b"\n")
    return verb, json.loads(rest[int(size) :]) if stdin else {}
