"""The traffic between the controller and many hosts: the bytes per host hardly grow with the number of hosts."""

import base64
import functools
import json
import resource
import subprocess
import sys
import time
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import lying_host
import pytest
from lying_host import RUN
from tables import table

from trainer.spec import make_spec
from trainer.supervise.status import shorten
from trainyard.run.launch_options import make_options
from trainyard.run.session import RunSession
from trainyard.run.types import PreparedRun, SessionState, StagedFile
from trainyard.wire.run_errors import PlanError

LATENCY = 0.05  # s of a request: Python starts on the host
STEP = 0.5  # s of a training step
POLL = 0.2  # s between two checks of a host while a request waits for a change


def prepared_run(rows: int) -> PreparedRun:
    """Return a run whose files are already on the hosts."""
    spec = make_spec({"run": RUN, "model": "tiny", "fake_data": True, "total_batch_size": rows}, "the test")
    return PreparedRun(spec, [StagedFile("trainer", "/dev/null", "store/t.zip", {"": "0" * 64}, "0" * 64, 1)], {})


class Cluster(lying_host.Cluster):
    """Hosts with one rank each, whose run ends `duration` seconds after its start. It counts the bytes of each verb.

    Sizes are those of real answers: a heartbeat has the step times of all ranks, node.json the names of all hosts.
    """

    def __init__(self, count: int, folder: Path, duration: float) -> None:
        super().__init__(folder, count)
        self.duration, self.began, self.plan = duration, 0.0, ""
        self.names, self.times = [host.name for host in self.hosts], [0.1234] * count
        self.verbs: dict[str, list[int]] = {}
        for number, transport in enumerate(self.transports.values()):
            transport.lie = functools.partial(self.answer, number)

    def state(self, number: int, request: dict[str, Any], answer: dict[str, Any]) -> dict[str, Any]:
        """Return the status of a host's part of the run, when it changes or after the seconds of the request."""
        deadline = time.monotonic() + request.get("wait", 0.0)
        while time.monotonic() < min(deadline, self.began + self.duration):
            time.sleep(POLL)
        ran = time.monotonic() - self.began
        ended, steps = ran >= self.duration, int(self.duration / STEP)
        rank = answer["ranks"][str(number)] | {"step": min(steps, int(ran / STEP)), "steps": steps, "error": None}
        rank |= {"status": "finished" if ended else "training", "time": time.time()}
        rank |= {"step_seconds": self.times, "comm_share": self.times}
        node = answer["node"] | {"hosts": self.names, "failures": [], "status": "finished" if ended else "running"}
        answer |= {"status": node["status"], "node": node, "ranks": {str(number): rank}, "logs": {}}
        return shorten(answer) if request.get("brief") else answer

    def answer(self, number: int, verb: str, request: dict[str, Any], answer: dict[str, Any]) -> dict[str, Any]:
        """Return the answer of a host."""
        if verb == "run_status":
            answer = self.state(number, request, answer)
        if verb == "health":
            peers = [host for host in self.hosts if host is not self.hosts[number]]
            answer["names"]["addresses"] = {peer.name: [peer.address] for peer in peers}
            answer |= {"busy": [], "torchruns": [], "clock": [time.time(), time.time()], "files": {}, "wsl": None}
            answer["gpu"] = {"cards": 0, "gpus": [], "users": [], "exclusive": []}
        if verb == "begin":
            self.began = self.began or time.monotonic()
            answer = {"now": time.time()}
        if verb == "commit":
            self.plan = request["contents"]["plan.json"][1]
        self.verbs.setdefault(verb, []).append(len(json.dumps(request)) + len(json.dumps(answer)))
        time.sleep(LATENCY)
        return answer


def recorded(count: int, folder: Path) -> Cluster:
    """Return the traffic of a session with simulated hosts until their run ended."""
    cluster = Cluster(count, folder, duration=1.0)
    state = SessionState(prepared=prepared_run(count))
    session = RunSession(
        cluster.hosts, cluster.connect, make_options({}), home=folder, report=lambda _: None, state=state
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
    program = table("many_hosts")["program"]
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
