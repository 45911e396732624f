"""The queue on the dashboard: how its page presents an answer of the queue host, and when it queries the host."""

import asyncio
import json
import os
import queue
import re
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest
from dashboard_lines import SCRIPT, hosts, pages_of, receive, run_line
from fake_slurm import FakeSlurm
from test_queue_front_state import NOW, answer, state, utc

from trainer.common.errors import UserError
from trainer.supervise.run_files import SupervisorError
from trainyard.dashboard import queue_watch, timeline
from trainyard.dashboard.actions import Actions
from trainyard.dashboard.allocation import Allocation
from trainyard.dashboard.project import Project
from trainyard.dashboard.queue_watch import QueueWatch, make_view
from trainyard.dashboard.state import ClusterView, DashboardRun
from trainyard.dashboard.timeline import Timeline
from trainyard.dashboard.views import Pages
from trainyard.queue.manage import ChangeOptions, change_runs
from trainyard.queue.queue_client import QueueClient, QueueState
from trainyard.queue.queue_tables import list_queue
from trainyard.remote import queue as remote_queue
from trainyard.remote import queue_job
from trainyard.remote.sampler import Sampler
from trainyard.run.launch_options import LaunchOptions
from trainyard.wire.connection import Host, HostConnection, RemoteError
from trainyard.wire.replies import checked_reply

__all__ = ["utc"]


class QueueHost:
    """Answers the query `queue`, or does not."""

    def __init__(self, **changed: Any) -> None:
        self.changed, self.asked, self.error = changed, 0, ""

    async def ask(self, query: str, **request: Any) -> dict[str, Any]:
        assert query == "queue" and request["recent"] > 0
        self.asked += 1
        if self.error:
            raise RemoteError(self.error)
        return answer(**self.changed)


def watch(host: QueueHost, name: str = "node1") -> QueueWatch:
    return QueueWatch(ClusterView(hosts()), {"node1": host}, lambda: name)


def updated(host: QueueHost) -> QueueWatch:
    """Return the queue after an answer."""
    found = watch(host)
    asyncio.run(found.update())
    return found


def page(found: QueueWatch) -> str:
    return pages_of(found._cluster, queue=found).page("queue", queue=found)


def attempts(**runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the folders of the runs, some with the records of their drivers."""
    folders = answer()["runs"]
    for run, found in runs.items():
        folders[run]["state"] = json.dumps({"phase": "finished", "attempts": found})
    return folders


def make_timeline(queue: QueueState, found: ClusterView | None = None, scale: str = "6 hours") -> Timeline:
    """Return the timeline of a new answer of a cluster without hosts."""
    return Allocation(found or ClusterView([])).timeline(scale, queue, time.time())[1]


def bars(found: Timeline) -> dict[str, list[str]]:
    return {row.label: [bar.span.run for bar in row.bars] for row in found.rows}


def test_the_page_has_the_words_of_list_and_the_runs_that_have_just_ended() -> None:
    found = make_view(state(), NOW)
    listed = list_queue(state())["runs"]
    assert [(run["run"], run["reason"]) for run in found.live] == [(run["run"], run["reason"]) for run in listed]
    assert next(run for run in found.live if run["run"] == "two")["start"] == 1795431930  # as Slurm expects
    html = page(updated(QueueHost()))
    assert "waits for free hosts" in html and "is held: release it with do=release run=held" in html
    assert html.count("/queue/held/release") == 1 and "/queue/held/hold" not in html and "/queue/busy/hold" not in html
    assert "/queue/busy/cancel" in html and "1 held" in html and "waits for the end of busy, small" in html
    over = {"hosts": {}, "begin": NOW - 60, "end": NOW - 9}
    past = make_view(state(runs=attempts(ok=[over], bad=[over | {"end": NOW - 3}], stopped=[over | {"end": 9}])), NOW)
    assert [run["run"] for run in past.ended] == ["bad", "ok"]


def test_the_timeline_has_gpus_of_the_drivers_and_the_jobs_of_slurm() -> None:
    gpus = {"node2": {"gpus": ["0"]}, "node1": {"gpus": []}}
    first = {"hosts": gpus, "begin": NOW - 7200, "end": NOW - 3600, "reason": "preempted"}
    runs = attempts(busy=[first, {"hosts": {"node2": {"gpus": ["0", "1"]}}, "begin": NOW - 8, "end": None}])
    names = {"node2": ["node2"], "node3": ["node3"], "node[1-2]": ["node1", "node2"]}
    found = make_timeline(state(runs=runs, hosts=names))
    assert bars(found) == {
        "node1": ["busy"],
        "node2 GPU 0": ["busy", "busy"],
        "node2 GPU 1": ["busy"],
        "node3, no recorded GPU": ["small"],
        "node3 GPU 0": [],
    }
    running = [span for span in found.spans if span.running]
    assert {(span.run, span.host, span.gpu, span.until) for span in running} == {
        ("busy", "node2", "0", 1795431930),
        ("busy", "node2", "1", 1795431930),
        ("small", "node3", "", 1795431330),
    }
    assert [span.state for span in found.spans if span.end == NOW - 3600] == ["preempted", "preempted"]


def test_the_drawing_moves_every_30_seconds_so_that_an_equal_answer_sends_nothing() -> None:
    drawn = {}
    for later in (0, 3, 29, 31):
        found = updated(QueueHost(now=NOW // 30 * 30 + 60 + later))
        drawn[later] = pages_of(found._cluster, queue=found).regions("queue")["timeline"]
    assert drawn[0] == drawn[3] == drawn[29] != drawn[31]


def test_jobs_of_other_users_and_lists_of_hosts_are_in_the_timeline() -> None:
    job = f"20|low|RUNNING|None|{NOW - 3000:.0f}|N/A|UNLIMITED|node[1-2]|other"
    found = make_timeline(state(jobs=[job], hosts={"node[1-2]": ["node1", "node2"]}, runs={}))
    shown = {label: runs for label, runs in bars(found).items() if runs}
    assert shown == {"node1": ["other"], "node2, no recorded GPU": ["other"]}
    assert found.spans[0].end - found.spans[0].begin == 3000


def test_runs_that_share_a_host_have_lanes_of_their_own() -> None:
    jobs = [f"{number}|low|RUNNING|None|{NOW - 600:.0f}|N/A|UNLIMITED|node1|job{number}" for number in range(30)]
    found = make_timeline(state(jobs=jobs, hosts={"node1": ["node1"]}, runs={}))
    row = next(row for row in found.rows if row.label == "node1")
    assert row.lanes == timeline.LANES and len(found.spans) == 30  # the table has those without a lane
    assert len({bar.lane for bar in row.bars}) == timeline.LANES
    places = {row.label: top for top, row in found.places}
    assert sorted(places.values()) == list(places.values()) and found.height > max(places.values())


@pytest.mark.parametrize(
    "changed",
    [
        {"nodes": [f"{SCRIPT[:60]}|idle|2|100|gpu:x:999999"] + [f"n{n}|idle|1|1|gpu:9999" for n in range(4000)]},
        {"jobs": [f"1|low|RUNNING|None|{NOW - 9:.0f}|1|1|node1|{SCRIPT}"], "hosts": {"node1": [SCRIPT] * 4000}},
        {"runs": attempts(ok=[{"hosts": {SCRIPT: {"gpus": [SCRIPT, "0", 7]}}, "begin": NOW - 9, "end": NOW}] * 5000)},
        {"runs": attempts(ok=[{"hosts": {"node1": {"gpus": "01"}}, "begin": -1e300, "end": "x"}])},
        {"now": -1e15},
        {"jobs": ["1|low|RUNNING|None|9999999999|0|1|node1|x"], "now": 1e15},
    ],
)
def test_hostile_answers_are_bounded_and_escaped(changed: dict[str, Any]) -> None:
    begun = time.process_time()
    found = updated(QueueHost(**changed))
    html = page(found)
    assert not found.error
    assert time.process_time() - begun < 3 and len(html) < 2_000_000
    assert "<script>alert" not in html and not re.search(r"(nan|inf)%", html)


def test_a_queue_that_does_not_answer_says_since_when_and_keeps_its_last_answer() -> None:
    host = QueueHost()
    found = updated(host)
    host.error = "squeue: Unable to contact slurm controller"
    asyncio.run(found.update())
    since = found.since
    asyncio.run(found.update())
    assert found.since == since > 0 and found.view and host.asked == 3
    html = page(found)
    assert "has not answered since" in html and "Unable to contact slurm controller" in html and "two" in html
    host.error = ""
    asyncio.run(found.update())
    assert "has not answered since" not in page(found)


def test_the_queue_host_is_asked_only_while_a_page_is_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue_watch, "PAUSE", 0.02)
    host = QueueHost()

    async def look() -> tuple[int, int, int]:
        found = watch(host)
        task = asyncio.create_task(found.run())
        await asyncio.sleep(0.1)
        before = host.asked
        with found.page():
            while host.asked < 3:
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)  # the question that was in progress
        after = host.asked
        await asyncio.sleep(0.15)
        task.cancel()
        return before, after, host.asked

    before, after, end = asyncio.run(asyncio.wait_for(look(), 10))
    assert before == 0 and end == after >= 3


def test_without_a_queue_the_page_says_how_to_get_one() -> None:
    host = QueueHost()
    found = watch(host)
    host.error = (
        "Slurm is not installed: set queue_state: present for the group cluster in the inventory, and run site.yml"
    )
    asyncio.run(found.update())
    html = page(found)
    assert "set queue_state: present for the group cluster in the inventory" in html and "<table" not in html
    host.error = ""
    asyncio.run(found.update())
    assert "new" in page(found), "the queue was installed meanwhile"
    assert "is not among the hosts" in watch(QueueHost(), "node9").missing


class SlurmConnection(HostConnection):
    """Answers the verbs of the queue in the place of a host."""

    def __init__(self) -> None:
        self.host = Host("node1", "127.0.0.1", "/data", "/usr/bin/python3")
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def call(self, verb: str, request: dict[str, Any], *, python: str = "") -> dict[str, Any]:
        self.calls.append((verb, request))
        return answer() if verb == "queue_info" else {"changed": request["jobs"], "refused": {}}


def test_an_action_changes_the_job_and_shows_its_lines() -> None:
    async def act() -> tuple[SlurmConnection, Pages, list[bool]]:
        found = watch(QueueHost())
        pages = pages_of(found._cluster, queue=found)
        connection = SlurmConnection()
        connect = lambda host: cast(HostConnection, connection)  # noqa: E731
        actions = Actions([connection.host], connect, LaunchOptions(), pages, Project(Path("/nowhere")))
        with pytest.raises(UserError, match="priority"):
            actions.change_queue("new", "priority", "")
        begun = [actions.change_queue("new", "priority", "high"), actions.change_queue("new", "hold", "")]
        begun.append(actions.change_queue("busy", "hold", ""))
        await asyncio.gather(*actions._tasks)
        return connection, pages, begun

    connection, pages, begun = asyncio.run(act())
    assert begun == [True, False, True]  # one action at a time on a run
    changes = [request for verb, request in connection.calls if verb == "queue_change"]
    assert changes == [{"do": "priority", "jobs": [3], "priority": "high"}]
    assert pages.actions["new"].lines == ["run new, which is waiting, changed to high"]
    busy = pages.actions["busy"]
    assert busy.state == "failed" and "only a run that waits can be held" in busy.error


class AgainConnection(SlurmConnection):
    """The queue host with other states of runs."""

    def __init__(self, **runs: str) -> None:
        super().__init__()
        folders = answer()["runs"]
        for run, phase in runs.items():
            folders[run]["state"] = json.dumps({"phase": phase, "attempts": []})
        folders["later"]["request"] = json.dumps({"run": "later", "after": ["ok", "busy"]})
        jobs = [line for line in answer()["jobs"] if not line.endswith(("|later", "|low"))]
        self.told = answer(runs=folders, jobs=jobs)

    def call(self, verb: str, request: dict[str, Any], *, python: str = "") -> dict[str, Any]:
        self.calls.append((verb, request))
        return self.told if verb == "queue_info" else {"job": 30}


def test_a_run_that_has_ended_is_added_again_after_the_runs_that_it_waits_for() -> None:
    connection = AgainConnection(later="failed", ok="finished", low="cancelled", bad="stopped")
    client = QueueClient(connection)
    change = lambda *names, **how: change_runs(client, "again", ChangeOptions(run=names), **how)  # noqa: E731
    assert change("later", check=True)["lines"] == ["run later, which had failed, would be added again"]
    assert not [verb for verb, _ in connection.calls if verb == "queue_again"]
    assert change("later", "ok")["lines"] == [
        "run ok is finished: nothing to do",
        "run later, which had failed, added again (job 30)",
    ]
    busy = client.state().jobs["busy"].number
    assert connection.calls[-2] == ("queue_again", {"folder": "/data/queue/later", "after": [busy]})
    with pytest.raises(UserError, match="run busy is running: only a run that has ended can be added again"):
        change("busy")
    with pytest.raises(UserError, match="has no run nobody"):
        change("nobody")
    connection.told = AgainConnection(later="failed", ok="failed").told
    with pytest.raises(UserError, match="run later waits for run ok, which has failed: add that one again, too"):
        change("later")
    assert change("later", "ok")["lines"] == [
        "run ok, which had failed, added again (job 30)",
        "run later, which had failed, added again (job 30)",
    ]
    asked = [request["after"] for verb, request in connection.calls if verb == "queue_again"]
    assert asked[-2:] == [[], [30, busy]]
    html = page_of(connection)
    assert html.count('action="/queue/later/again"') == 1 and 'action="/queue/ok/again"' in html


def test_the_page_of_a_run_says_what_the_queue_can_do_with_it() -> None:
    connection = AgainConnection(later="failed", low="failed")
    found = watch(QueueHost(runs=connection.told["runs"], jobs=connection.told["jobs"]))
    pages = pages_of(found._cluster, queue=found, can_start=lambda run: True)

    def action(run: str) -> str:
        state = found._cluster.runs[run] = DashboardRun(run)
        state.status = "failed"
        found._cluster.change()
        return pages.regions("run", run)["action"]["run-action"]

    assert 'action="/runs/later/start"' in action("later"), "the queue has not answered yet"
    asyncio.run(found.update())
    assert 'action="/queue/later/again"' in action("later") and "/start" not in action("later")
    assert "has a job in the queue" in action("busy") and "<form" not in action("busy")
    assert 'action="/runs/other/start"' in action("other")


def page_of(connection: AgainConnection) -> str:
    folders = connection.told["runs"]
    for run in ("later", "ok"):
        folders[run]["state"] = json.dumps(
            {"phase": "failed", "attempts": [{"begin": NOW - 60, "end": NOW - 9, "hosts": {}}]}
        )
    return page(updated(QueueHost(runs=folders, jobs=connection.told["jobs"])))


def test_the_queue_host_submits_the_last_request_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[Sequence[str]] = []
    jobs: list[str] = []

    def command(words: Sequence[str], stdin: str = "") -> str:
        said.append(words)
        return "\n".join(jobs) if words[0] == "squeue" else "31" if words[0] == "sbatch" else ""

    monkeypatch.setattr(remote_queue, "command", command)
    monkeypatch.setattr(queue_job, "command", command)
    folder = tmp_path / "queue/r"
    folder.mkdir(parents=True)
    again = lambda *after: remote_queue.again({"folder": str(folder), "after": after})  # noqa: E731
    assert "is damaged: add the run again on the controller" in again()["error"]
    before = {"job": 5, "phase": "running", "attempts": [], "exit": None, "submitted": 1.0}
    before["arguments"] = ["--job-name=r", "--nodes=2", "--dependency=afterok:1:2"]
    session = {"hosts": [{"name": "node1", "data_dir": "/data"}], "options": {"run_env": {"TOKEN": "secret"}}}
    for name, value in {"state": before, "session": session, "request": {"run": "r", "submitted": 1.0}}.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    assert "is still ending" in again()["error"]
    (folder / "state.json").write_text(json.dumps(before | {"phase": "failed", "given_up": "x"}))
    jobs.append("9")
    assert again() == {"exists": 9}
    jobs.clear()
    assert again(7) == {"job": 31}
    [words] = [words for words in said if words[0] == "sbatch"]
    assert [word for word in words if word.startswith("--dependency")] == ["--dependency=afterok:7"]
    assert "--nodes=2" in words and not any("secret" in word for words in said for word in words)
    kept = json.loads((folder / "session.json").read_text())
    assert kept == session | {"continues": True} and (folder / "session.json").stat().st_mode & 0o777 == 0o600
    state = json.loads((folder / "state.json").read_text())
    assert (state["job"], state["phase"], "given_up" in state) == (31, "waiting", False)
    assert json.loads((folder / "request.json").read_text())["submitted"] > time.time() - 60


def test_a_hanging_slurm_blocks_neither_the_sampler_nor_the_next_question(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: queue.Queue[dict[str, Any]] = queue.Queue()
    answers = threading.Event()

    def info(request: dict[str, Any]) -> dict[str, Any]:
        assert request == {"folder": str(tmp_path / "queue"), "recent": 5}
        assert answers.wait(10)
        raise SupervisorError("squeue: down")

    monkeypatch.setattr(Sampler, "_send", staticmethod(sent.put))
    monkeypatch.setattr(Sampler, "_receive", lambda self: None)
    monkeypatch.setattr(Sampler, "_repeat", lambda self, *arguments: None)
    monkeypatch.setattr(remote_queue, "info", info)
    sampler = Sampler({"data_dir": str(tmp_path), "address": "127.0.0.1", "ollama_urls": []})
    ask = lambda number: sampler._reply(json.dumps({"id": number, "query": "queue", "recent": 5}).encode())  # noqa: E731
    ask(1)
    ask(2)
    first = sent.get(timeout=5)
    assert first["id"] == 2 and first["error"] == "Slurm has not answered the question before this one"
    sampler._reply(b"[]")
    assert sent.get(timeout=5)["id"] == 0
    answers.set()
    assert sent.get(timeout=5) == {"kind": "reply", "id": 1, "error": "squeue: down"}
    ask(3)
    assert sent.get(timeout=5)["id"] == 3


def test_recent_runs_are_those_with_a_job_and_the_newest_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The programs of Slurm are stand-ins, see fake_slurm."""
    slurm = FakeSlurm(tmp_path / "slurm", tmp_path)
    for number, run in enumerate(("waits", "old", "new")):
        slurm.add_run(run)
        os.utime(slurm.runs / run, (1000 + number, 1000 + number))
    slurm.set_jobs(["1|low|PENDING|Resources|N/A|N/A|UNLIMITED||waits", "2|low|RUNNING|None|9|N/A|UNLIMITED|a,b|other"])
    monkeypatch.setenv("PATH", f"{slurm.programs}:{os.environ['PATH']}")
    asked = {"folder": str(slurm.runs)}
    assert set(remote_queue.info(asked | {"recent": 1})["runs"]) == {"waits", "new"}
    assert set(remote_queue.info(asked)["runs"]) == {"waits", "old", "new"}
    hosts = checked_reply("query queue", remote_queue.info(asked | {"recent": 1}))["hosts"]
    assert hosts == {"a,b": ["a", "b"]}


def run_of(name: str, begin: float, end: float | None, devices: Sequence[str] = (), **rank: Any) -> dict[str, Any]:
    """Return a line of a host's sampler about a run that began and ended then."""
    status = "running" if end is None else "finished"
    line = run_line(name=name, status=status, started=begin, ended=end, devices=list(devices))
    line["state"]["ranks"]["0"] |= {"time": begin + 5, **rank}
    return line


def test_without_a_queue_the_run_folders_say_who_had_which_gpu() -> None:
    found, now = ClusterView(hosts()), time.time()
    found.hosts["node1"].sample = {"gpus": [{"uuid": "GPU-a"}, {"uuid": "GPU-b"}]}
    for host, run in (
        ("node1", run_of("trains", now - 600, None, ["GPU-b"], eta=1200.0)),
        ("node1", run_of("before", now - 4000, now - 700, ["GPU-a", "GPU-b"])),
        ("node2", run_of("cores", now - 20_000, now - 10_000)),
        ("node2", run_of("yesterday", now - 90_000, now - 80_000)),
        ("node2", run_of("future", now + 90_000, now + 91_000)),
    ):
        receive(found, host, run)
    drawn = Allocation(found).timeline("6 hours", None, 0.0)[1]
    assert bars(drawn) == {"node1 GPU 0": ["before"], "node1 GPU 1": ["before", "trains"], "node2": ["cores"]}
    [running] = [span for span in drawn.spans if span.running]
    assert running.until == pytest.approx(now + 1200, abs=5)
    week = Allocation(found).timeline("7 days", None, 0.0)[1]
    assert bars(week)["node2"] == ["yesterday", "cores"]
    pages = pages_of(found)
    html = pages.page("queue", "7 days", queue=pages.queue)
    assert 'href="/runs/yesterday"' in html and "in the last 7 days" in html


def test_a_run_of_the_queue_is_not_shown_twice_and_the_timeline_follows_new_runs() -> None:
    found = ClusterView(hosts())
    first = {"hosts": {"node2": {"gpus": ["0"]}}, "begin": NOW - 7200, "end": NOW - 3600, "reason": "", "order": 10}
    queue = state(runs=attempts(busy=[first]), jobs=[])
    allocation = Allocation(found)
    asked = time.time()
    runs = lambda: [span.run for span in allocation.timeline("6 hours", queue, asked)[1].spans]  # noqa: E731
    assert runs() == ["busy"]
    receive(found, "node2", run_of("busy", NOW - 7199, NOW - 3601, ["GPU-a"]))
    receive(found, "node2", run_of("by-hand", NOW - 500, NOW - 400, ["GPU-a"]))
    assert runs() == ["by-hand", "busy"]


def test_preemptions_and_lost_hosts_of_the_queue_are_events() -> None:
    one = {"hosts": {"node1": {}}, "begin": NOW - 900, "end": NOW - 600, "order": 75}
    ended = [
        one | {"reason": "node1: Slurm has asked for the host"},
        one | {"begin": NOW - 500, "end": NOW - 400, "reason": "node1: does not answer"},
        one | {"begin": NOW - 300, "end": NOW - 200, "order": 1, "reason": SCRIPT},
    ]
    runs = attempts(busy=ended)
    runs["bad"]["state"] = json.dumps({"phase": "failed", "exit": {"reason": "no such model"}})
    found = updated(QueueHost(runs=runs))
    asyncio.run(found.update())
    events = [(one.kind, one.text, one.run) for one in found._cluster.events.values() if one.run == "busy"]
    assert events == [
        ("preempted", "run busy returned to the queue: node1: Slurm has asked for the host", "busy"),
        ("requeued", "run busy returned to the queue: node1: does not answer", "busy"),
    ]
    failed = [one for one in found._cluster.events.values() if one.kind == "failed"]
    assert {one.run for one in failed} >= {"bad"}
    html = pages_of(found._cluster, queue=found).page("events")
    assert "Slurm has asked for the host" in html and "<script>alert" not in html
