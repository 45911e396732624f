"""Logs on the dashboard, and the records of how runs were started."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from dashboard_lines import HostOfRuns, cluster_with, hosts, pages_of, run_line

from trainer.common.errors import UserError
from trainer.spec import make_spec
from trainyard.dashboard import log_streams as logs_module
from trainyard.dashboard.actions import Actions
from trainyard.dashboard.log_streams import AGAIN, RunLog
from trainyard.dashboard.project import Project
from trainyard.dashboard.state import ClusterView
from trainyard.run.launch.start_record import has_start, keep_start, options_of, read_start
from trainyard.run.launch_options import LaunchOptions
from trainyard.run.types import PreparedRun
from trainyard.wire.connection import Host, HostConnection, RemoteError

# Logs -------------------------------------------------------------------------------------------------------------------


def test_logs_of_all_ranks_grow_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs_module, "INTERVAL", 0.0)
    files = []
    for rank in (0, 1):
        (tmp_path / f"node{rank + 1}/r/logs").mkdir(parents=True)
        files.append(tmp_path / f"node{rank + 1}/r/logs/rank{rank}.log")
        files[-1].write_text("".join(f"line {number} of {rank}\n" for number in range(400)))
    cluster, log = cluster_with(("node1", run_line(0)), ("node2", run_line(1))), RunLog(("r", "", ""))
    streams: dict[str, Any] = {f"node{n}": HostOfRuns(tmp_path / f"node{n}") for n in (1, 2)}
    read = lambda place: asyncio.run(log.news(place, cluster, streams))  # noqa: E731
    # The log of rank 1 is shown although only node1 wrote a heartbeat.
    news, place = read(None)
    assert len(news["lines"]) == 300 and news["lines"][-1] == ["rank 1", "line 399 of 1"]
    assert read(place) == ({}, place)
    files[0].write_text(files[0].read_text() + "news\nhalf a li")
    news, place = read(place)
    assert news == {"lines": [["rank 0", "news"]], "error": ""}
    files[0].write_text("another start\n")
    streams["node2"].answers = False
    news, place = read(place)
    assert [line for _, line in news["lines"]] == [AGAIN, "another start"]
    assert news["error"] == "the host does not answer" and len(read(None)[0]["lines"]) == 303


# Starts -----------------------------------------------------------------------------------------------------------------


def keep(home: Path, **more: Any) -> None:
    spec = make_spec({"run": "r", "dataset": "data.jsonl", **more}, "the test")
    given = {"max_restarts": 3, "run_env": {"HF_TOKEN": "secret"}, "head": "node2", "follow": False}
    keep_start(home, PreparedRun(spec, [], {}), LaunchOptions.model_validate(given), ["node1", "node2"])


def test_a_start_is_kept_without_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there/data.jsonl").write_text("{}")
    (tmp_path / "there/work.py").write_text("")
    monkeypatch.chdir(tmp_path / "there")
    assert not has_start(tmp_path, "r")
    keep(tmp_path)
    file = tmp_path / ".trainyard/starts/r.json"
    assert has_start(tmp_path, "r") and "secret" not in file.read_text() and file.stat().st_mode & 0o777 == 0o600
    assert read_start(tmp_path, "r").spec.dataset == "data.jsonl"
    monkeypatch.chdir(tmp_path)
    record = read_start(tmp_path, "r")
    assert record.spec.dataset == str(tmp_path / "there/data.jsonl") and record.spec.model == "tiny"
    options = options_of(record, LaunchOptions.model_validate({"stall_limit": 5.0, "max_restarts": 1}))
    assert (options.max_restarts, options.head, options.stall_limit) == (3, "node2", 5.0)
    assert record.hosts == ["node1", "node2"] and record.spec.run == "r"
    # The dashboard follows the run, and names what is missing.
    assert options.follow and record.variables == ["HF_TOKEN"]
    monkeypatch.chdir(tmp_path / "there")
    keep(tmp_path, script="work.py")
    monkeypatch.chdir(tmp_path)
    assert read_start(tmp_path, "r").spec.script == str(tmp_path / "there/work.py")
    file.write_text("{}")
    with pytest.raises(UserError, match="start it again with trainyard train SPEC --run r"):
        read_start(tmp_path, "r")


def test_what_cannot_be_started_again_says_why(tmp_path: Path) -> None:
    def connect(host: Host) -> HostConnection:
        raise RemoteError(f"{host.name} is off")

    async def act(run: str, hosts: list[Host]) -> str:
        cluster = ClusterView(hosts)
        pages = pages_of(cluster)
        actions = Actions(hosts, connect, LaunchOptions(), pages, Project(tmp_path))
        assert actions.start(run) and not actions.start(run), "one action at a time on a run"
        await asyncio.gather(*actions._tasks)
        assert actions.deploy(run, "-rf", ""), "the next one may begin"
        await asyncio.gather(*actions._tasks)
        newest = pages.actions[run]
        assert newest.state == "failed" and "expected the name of a model" in newest.error
        [earlier] = newest.earlier
        assert earlier.state == "failed" and "\n" not in earlier.error
        return earlier.error

    assert "was not started from this project folder" in asyncio.run(act("unknown", hosts()))
    keep(tmp_path, dataset="ansible-docs")
    assert "was started on node2, which is not in this inventory" in asyncio.run(act("r", hosts(1)))
    said: list[str] = []
    Project(tmp_path).session_of("r", hosts(), connect, LaunchOptions(), report=said.append)
    assert said == ["warning: HF_TOKEN of run_env is not set: values are not kept, set them in the inventory"]
    known = LaunchOptions.model_validate({"run_env": {"HF_TOKEN": "x"}})
    session = Project(tmp_path).session_of("r", hosts(), connect, known, report=said.append)
    assert session.options.run_env == {"HF_TOKEN": "x"} and len(said) == 1
