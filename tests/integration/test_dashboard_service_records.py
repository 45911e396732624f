"""The service of the dashboard and the controller: starts that the controller sends, with real runs of two hosts."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from dashboard_lines import pages_of
from dashboard_site import start_training, write_inventory
from run_hosts import TOP, Bed, until

from trainyard.dashboard.actions import Actions
from trainyard.dashboard.project import Project
from trainyard.dashboard.state import ClusterView
from trainyard.dashboard.views import Action
from trainyard.run.follow.manage_runs import stop_run
from trainyard.run.launch_options import LaunchOptions
from trainyard.service_records import WAIT, ServiceRecords
from trainyard.wire.connection import Host, HostConnection, Login, RemoteError
from trainyard.wire.openssh import LocalTransport

pytestmark = pytest.mark.slow
RUN = f"service-{os.getpid()}"
STEPS = 60


@pytest.fixture(scope="module")
def bed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bed]:
    found = Bed(tmp_path_factory.mktemp("service"))
    yield found
    found.clean()
    (TOP / f".trainyard/starts/{RUN}.json").unlink(missing_ok=True)


def hosts(bed: Bed) -> list[Host]:
    login = Login("", "", 0)
    return [
        Host(f"node{i}", "127.0.0.1", str(bed.folder / f"node{i}"), sys.executable, backend="process", login=login)
        for i in (1, 2)
    ]


def connect(host: Host) -> HostConnection:
    return HostConnection(host, LocalTransport())


def folder(bed: Bed) -> Path:
    """Return the folder of the service on node1, as the role creates it."""
    found = bed.folder / "node1/dashboard"
    found.mkdir(mode=0o700, parents=True, exist_ok=True)
    (found / "config.json").touch()
    return found


def start_again(bed: Bed, run: str) -> Action:
    """Start a run again as the service does; return the action."""

    async def act() -> Action:
        cluster = ClusterView(hosts(bed))
        pages = pages_of(cluster)
        project = Project(folder(bed), is_service=True)
        actions = Actions(hosts(bed), connect, LaunchOptions(), pages, project)
        assert actions.start(run)
        await asyncio.gather(*actions._tasks)
        return pages.actions[run]

    return asyncio.run(act())


def test_a_run_of_the_controller_is_started_again_without_its_files(bed: Bed) -> None:
    there = folder(bed)
    variables: dict[str, Any] = {"dashboard_state": "present", "cluster_env": {"SECRET": "of the inventory"}}
    inventory = write_inventory(bed, {"node1": {}, "node2": {}}, **variables)
    data = bed.folder / "controller/data.jsonl"
    data.parent.mkdir()
    data.touch(0o600)
    more = ["--checkpoint-interval=5", "-e", json.dumps({"run_env": {"TOKEN": "of the start"}})]
    more.append(f"--collect-to={bed.folder / 'copies'}")
    training = start_training(bed, inventory, RUN, STEPS, *more, dataset=str(data))
    try:
        step = lambda: bed.state(0, RUN).get("step") or 0  # noqa: E731
        until(lambda: step() > 5 or training.poll() is not None, 300, "the first steps")
        record = there / f".trainyard/received/starts/{RUN}.json"
        assert record.stat().st_mode & 0o777 == 0o600 and record.parent.stat().st_mode & 0o777 == 0o700
        kept = json.loads(record.read_text())
        assert [file["src"] for file in kept["files"]] == ["", ""] and "collect_to" not in kept["launch"]
        stop_run(RUN, hosts(bed), lambda name: connect(hosts(bed)[int(name[-1]) - 1]), LaunchOptions())
        assert training.wait(120) == 0, (bed.folder / "train.log").read_text()
    finally:
        training.kill()
        training.wait(20)
    assert "warning" not in (bed.folder / "train.log").read_text() and 5 < step() < STEPS
    # The service has none of the controller's files, and a host has lost its copy of the dataset.
    shutil.rmtree(data.parent)
    stored = next((bed.folder / "node2/store/datasets").glob("*.jsonl"))
    stored.unlink()

    assert "has no record of its start: start it on the controller" in start_again(bed, "unknown").error
    ended = start_again(bed, RUN)
    assert ended.state == "done", (ended.error, ended.lines)
    assert step() == STEPS and any(f"run {RUN}" in line or RUN in line for line in ended.lines)
    ranks = "".join((bed.run_dir(i, RUN) / f"logs/rank{i}.log").read_text() for i in (0, 1))
    assert "resuming from step" in ranks and not (bed.folder / "copies").exists()
    assert stored.is_file() and stored.stat().st_mode & 0o777 == 0o600
    for i in (0, 1):
        environment = (bed.run_dir(i, RUN) / "env").read_text()
        assert "of the inventory" in environment and "of the start" in environment


def test_a_service_that_does_not_answer_does_not_delay_a_start(bed: Bed) -> None:
    lines, told = list[str](), threading.Event()

    class Hanging(HostConnection):
        def call(self, verb: str, request: dict[str, Any], *, python: str = "") -> dict[str, Any]:
            told.wait(20)
            raise RemoteError("node1 is off")

    records = ServiceRecords("node1", lambda name: Hanging(hosts(bed)[0], LocalTransport()), lines.append)
    began = time.monotonic()
    records.keep("starts/r.json", "{}")
    assert WAIT <= time.monotonic() - began < WAIT + 2 and "no answer within 3 s" in lines[0]
    records.keep("starts/r.json", "{}")
    assert time.monotonic() - began < WAIT + 2 and len(lines) == 1
    told.set()


def test_a_host_without_the_service_keeps_nothing_and_only_known_names_are_kept(bed: Bed, tmp_path: Path) -> None:
    lines = list[str]()
    other = hosts(bed)[1]
    records = ServiceRecords("node2", lambda name: connect(other), lines.append)
    records.keep("starts/r.json", "{}")
    records.keep("starts/r.json", "{}")
    assert lines == [
        "warning: the service of the dashboard on node2 does not get a record: it is not installed: run site.yml"
    ]
    assert not Path(other.data_dir, "dashboard").exists()
    for name in ("../x.json", "starts/../../x.json", "starts/r", "deploy/r.json", "other/r.json", "/etc/x.json"):
        with pytest.raises(Exception, match="is not the name of a record"):
            connect(hosts(bed)[0]).call("keep_record", {"folder": str(folder(bed)), "name": name, "content": ""})
