"""The traffic between the controller and many hosts: the bytes per host hardly grow with the number of hosts."""

from __future__ import annotations

import base64
import json
import resource
import subprocess
import sys
import zlib
from dataclasses import replace
from pathlib import Path

import pytest
from simulated_hosts import Cluster, prepared_run

from trainer.supervise.status import shorten
from trainyard.run.launch_options import make_options
from trainyard.run.session import RunSession
from trainyard.run.types import SessionState
from trainyard.wire.connection import Host, HostConnection
from trainyard.wire.run_errors import PlanError


class Recording(Cluster):
    """Keeps the bytes of requests and answers by verb."""

    def __init__(self, count: int, folder: Path) -> None:
        super().__init__(count, folder, duration=1.0)
        self.verbs: dict[str, list[int]] = {}
        self.plan = ""

    def connect(self, host: Host) -> HostConnection:
        connection = super().connect(host)
        execute = connection.transport.execute

        def recorded(command: str, stdin: bytes | None = None) -> tuple[int, bytes, bytes]:
            answer = execute(command, stdin)
            verb = command.rpartition(" ")[2] if not command.startswith("cd -P") else "begin"
            size, _, rest = (stdin or b"0\n").partition(b"\n")
            request = rest[int(size) :] if size.isdigit() else stdin or b""
            self.verbs.setdefault(verb, []).append(len(request) + len(answer[1]))
            if verb == "commit":
                self.plan = json.loads(request)["contents"]["plan.json"][1]
            return answer

        connection.transport.execute = recorded  # type: ignore[method-assign]
        return connection


def recorded(count: int, folder: Path) -> Recording:
    """Return the traffic of a session with simulated hosts until their run ended."""
    cluster = Recording(count, folder)
    state = SessionState(prepared=prepared_run(count))
    session = RunSession(
        cluster.hosts, cluster.connect, make_options({}), home=folder, report=lambda line: None, state=state
    )
    for step in (session.plan, session.preflight, session.stage, session.launch, session.follow):
        result = step()
    assert result["status"] == "finished" and len(result["hosts"]) == count
    return cluster


@pytest.mark.slow
def test_the_bytes_per_host_hardly_grow(tmp_path: Path) -> None:
    few, many = (recorded(count, tmp_path / str(count)) for count in (20, 160))
    plan = json.loads(zlib.decompress(base64.b64decode(many.plan)))
    assert [entry["host"] for entry in plan] == many.names
    for verb, factor in (("run_status", 1.3), ("commit", 4), ("begin", 1.3)):
        mean = [sum(cluster.verbs[verb]) / len(cluster.verbs[verb]) for cluster in (few, many)]
        # One host of all has the times of all ranks.
        assert mean[1] <= factor * mean[0], f"{verb}: {mean}"


@pytest.mark.parametrize("node", [None, {"hosts": ["a", "b"], "status": "running"}])
def test_a_short_status_keeps_what_differs_between_hosts(node: dict[str, object] | None) -> None:
    rank = {"step": 3, "step_seconds": [1.0, 2.0], "comm_share": [0.1, 0.2]}
    state = {"node": node, "ranks": {"0": rank, "1": rank}, "status": "running"}
    short = shorten(state)
    assert short["ranks"] == {"0": rank, "1": {"step": 3}} and short["status"] == "running"
    assert short["node"] == (node and {"hosts": [], "status": "running"})
    assert state["ranks"]["1"] == rank, "the state itself is unchanged"


def test_many_requests_raise_the_limit_of_open_files() -> None:
    """A thousand requests at once exceed the usual soft limit; in a separate process, because the limit stays
    raised."""
    program = (
        "import resource; from trainyard.wire.connection import FanOut;"
        "hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1];"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard));"
        "FanOut({'a': dict}).wait(5); print(resource.getrlimit(resource.RLIMIT_NOFILE)[0]);"
        "FanOut({str(n): dict for n in range(150)}).wait(5); print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    assert list(map(int, done.stdout.split())) == [1024, min(1756, hard)]


def test_a_host_beyond_equal_pipelines_is_left_out_of_the_plan(tmp_path: Path) -> None:
    cluster, prepared = Cluster(3, tmp_path, duration=1.0), prepared_run(8)
    spec = prepared.spec.model_copy(
        update={"strategy": "diloco", "replica_strategy": "pipeline", "replica_hosts": 2, "automatic": ()}
    )

    def session(**options: object) -> RunSession:
        state = SessionState(prepared=replace(prepared, spec=spec))
        made = make_options(options)
        return RunSession(cluster.hosts, cluster.connect, made, home=tmp_path, report=lambda line: None, state=state)

    allowed = session(min_nodes=2)
    assert f"{cluster.names[2]} is left out: every pipeline has 2 hosts" in allowed.plan()["lines"]
    assert [entry.host for entry in allowed.state.plan] == cluster.names[:2]
    with pytest.raises(PlanError, match="replica_hosts: 3 hosts cannot form pipelines of 2 hosts each"):
        session().plan()
