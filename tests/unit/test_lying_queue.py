"""Queue hosts and login hosts that lie: every operation ends with a result or one line, and they choose no path and no option."""

import itertools
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lying_host import NONSENSE, RUN, Cluster, Lie, check_line, encode, honest, lies, outside

from trainer.common.errors import UserError
from trainer.spec import make_spec
from trainyard.queue import requests
from trainyard.queue.carry import CheckpointCopy
from trainyard.queue.manage import ChangeOptions, change_runs, show_runs
from trainyard.queue.new_runs import NewRun
from trainyard.queue.queue_client import QueueClient
from trainyard.queue.request import QueueOptions
from trainyard.queue.requests import Site, add_runs
from trainyard.queue.slurm_lease import LeaseJob, Leases, leased_hosts
from trainyard.run.launch_options import make_options
from trainyard.wire.connection import RemoteError
from trainyard.wire.run_errors import RunError

OPTIONS = make_options({"lost_limit": 2.0, "progress_interval": 0})
Operation = Callable[[Cluster, Path], list[str]]


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    """Two hosts. The second one has the queue, and lies."""
    return Cluster(tmp_path)


def client(cluster: Cluster) -> QueueClient:
    return QueueClient(cluster.connect("node2"))


def listed(cluster: Cluster, folder: Path) -> list[str]:
    return list(show_runs(client(cluster), "list")["lines"])


def history(cluster: Cluster, folder: Path) -> list[str]:
    return list(show_runs(client(cluster), "history")["lines"])


def cancelled(cluster: Cluster, folder: Path) -> list[str]:
    return list(change_runs(client(cluster), "cancel", ChangeOptions(run=("waits", "busy")))["lines"])


def added(cluster: Cluster, folder: Path) -> list[str]:
    """Add a run `after` another one, on one host of two: both put words of the queue host into the options of sbatch."""
    spec = make_spec({"run": RUN, "model": "tiny", "fake_data": True}, "the test")
    run = NewRun(QueueOptions(after=("busy",), time_limit=5), spec, OPTIONS)
    home = folder / "out" / RUN
    site = Site(cluster.hosts[1:], True, client(cluster), cluster.connect, home, check_line, "t")
    return list(add_runs([run], site)["lines"])


def carried(cluster: Cluster, folder: Path) -> list[str]:
    """Carry the newest checkpoint from the host that lies to one without; the queue host keeps a copy."""
    home = folder / "out" / RUN
    home.mkdir(parents=True, exist_ok=True)
    return [CheckpointCopy(home, RUN, cluster.connect, check_line).carry(cluster.hosts[:1], cluster.hosts)]


def leased(cluster: Cluster, folder: Path) -> list[str]:
    job = LeaseJob(5, "RUNNING", 0, ("node1", "node2"), whole=True)
    leases = Leases(cluster.hosts, RUN, job, cluster.connect)
    grants = leases.grants() or {"node1": [], "node2": []}
    gpus = [gpu for host in leased_hosts(cluster.hosts, job, grants) for gpu in host.gpus or ()]
    assert all(re.fullmatch(r"\d{1,3}", gpu) for gpu in gpus)
    return [*gpus, *leases.lost().values()]


OPERATIONS: dict[str, tuple[Operation, str]] = {
    "list": (listed, "queue_info"),
    "history": (history, "queue_info"),
    "cancel": (cancelled, "queue_info"),
    "cancel-answer": (cancelled, "queue_change"),
    "add": (added, "queue_info"),
    "add-answer": (added, "queue_add"),
    "carry": (carried, "checkpoints"),
    "lease": (leased, "lease"),
}


@pytest.fixture(autouse=True)
def small_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """The archive of the driver is the same for every run, and takes a while."""
    monkeypatch.setattr(requests, "program_archive", lambda: b"zip")


def truth_of(name: str, cluster: Cluster) -> dict[str, Any]:
    """Return the honest answer of node2 to the verb of an operation."""
    host = cluster.hosts[1]
    return honest(OPERATIONS[name][1], {"specs": [RUN]}, host, 1)


def honest_but(name: str, cluster: Cluster, verb: str = "", answer: bytes = b"") -> Lie:
    """Return the answers of node2, which suit an operation except for one verb."""

    def lie(asked: str, request: dict[str, Any], truth: dict[str, Any]) -> Any:
        if asked == verb:
            return answer
        if name == "carry" and request.get("run_dir", "").startswith(cluster.hosts[0].data_dir):
            return {"steps": {}, "shards": {}}
        return truth_of(name, cluster) if asked == "run_list" else truth

    return lie


def attempt(name: str, cluster: Cluster, folder: Path, context: object) -> str:
    """Carry out an operation; check its lines, its time and its requests to the hosts; return its error or an empty
    string."""
    for transport in cluster.transports.values():
        transport.asked.clear()
    cluster.transports["node1"].lie = honest_but(name, cluster)
    start, error = time.monotonic(), ""
    try:
        for line in OPERATIONS[name][0](cluster, folder):
            check_line(line)
    except (RunError, RemoteError, UserError) as raised:
        error = str(raised)
        check_line(error)
    assert time.monotonic() - start < 60, context
    for verb, request in [found for transport in cluster.transports.values() for found in transport.asked]:
        check_request(verb, request, cluster, context)
    return error


def check_request(verb: str, request: dict[str, Any], cluster: Cluster, context: object) -> None:
    """Check that the controller chose every path and option of a request."""
    host = cluster.hosts[1]
    if verb == "queue_add":
        assert request["folder"] == f"{host.data_dir}/queue/{RUN}", context
        assert set(request["contents"]) == {"request.json", "session.json", "program.zip"}, context
        assert all(
            path.startswith(f"{host.data_dir}/store/") and ".." not in path for path in request["links"].values()
        )
        options = [re.fullmatch(r"--[a-z-]+(=[ -~]{0,4000})?", word) for word in request["arguments"]]
        assert all(options), (request["arguments"], context)
        after = [word for word in request["arguments"] if word.startswith("--dependency")]
        assert all(re.fullmatch(r"--dependency=afterok:\d{1,10}", word) for word in after), (after, context)
    if verb == "queue_change":
        assert request["do"] == "cancel" and all(type(job) is int for job in request["jobs"]), context
    if verb in ("checkpoints", "lease"):
        assert request["run_dir"] in {f"{one.data_dir}/runs/{RUN}" for one in cluster.hosts}, context


@pytest.mark.parametrize("name", OPERATIONS)
def test_honest_hosts_are_believed(name: str, cluster: Cluster, tmp_path: Path) -> None:
    cluster.transports["node2"].lie = honest_but(name, cluster)
    assert attempt(name, cluster, tmp_path, "the truth") == ""
    assert any(verb == OPERATIONS[name][1] for verb, _ in cluster.transports["node2"].asked)


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("stride", [pytest.param(1, marks=pytest.mark.long), 17], ids=["all", "some"])
def test_no_changed_value_breaks_an_operation(name: str, stride: int, cluster: Cluster, tmp_path: Path) -> None:
    """Every value of an answer is replaced by every hostile one, or removed; `some` tries every 17th of these."""
    for answer in itertools.islice(lies(truth_of(name, cluster)), 0, None, stride):
        cluster.transports["node2"].lie = honest_but(name, cluster, OPERATIONS[name][1], encode(answer))
        attempt(name, cluster, tmp_path, answer)
    assert outside(tmp_path) == []


@pytest.mark.parametrize("name", ["list", "add-answer", "carry"])
def test_nonsense_is_a_one_line_error(name: str, cluster: Cluster, tmp_path: Path) -> None:
    for kind, output in NONSENSE.items():
        cluster.transports["node2"].lie = honest_but(name, cluster, OPERATIONS[name][1], output)
        error = attempt(name, cluster, tmp_path, kind)
        assert error == "" or "node2" in error, (kind, error)
    assert outside(tmp_path) == []
