"""The dashboard's state from the lines of hosts: bounded, and without paths that a host chooses."""

import asyncio
import itertools
import json
import time
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from dashboard_lines import SCRIPT, HostOfRuns, cluster_with, hosts, pages_of, receive, run_line
from tables import table

from trainer.supervise.link_free import link_free
from trainyard.dashboard import state as state_module
from trainyard.dashboard.app import Dashboard
from trainyard.dashboard.page_formats import duration, number, rate, size
from trainyard.dashboard.project import Project
from trainyard.dashboard.records import RunRecords
from trainyard.dashboard.state import ClusterView
from trainyard.dashboard.streams import _parse
from trainyard.dashboard.views import spec_rows, spec_values
from trainyard.remote import run_queries
from trainyard.remote import sampler as remote_sampler
from trainyard.remote.sampler import Sampler
from trainyard.wire.connection import Login, RemoteError
from trainyard.wire.replies import ReplyError, checked_reply


@pytest.mark.parametrize(
    ("spec", "expected"), table("dashboard_state")["the_page_of_a_run_has_the_command_of_tensorboard"], ids=str
)
def test_the_page_of_a_run_has_the_command_of_tensorboard(spec: dict[str, str], expected: str, tmp_path: Path) -> None:
    login = Login("box", "me", key_file="/key", extra_arguments=("-o", "X=y"))
    cluster = ClusterView([replace(host, login=login) for host in hosts()])
    nothing = cast(Any, None)
    board = Dashboard(cluster, {}, nothing, nothing, nothing, Project(tmp_path))
    receive(cluster, "node1", run_line(1))
    assert board._tensorboard(cluster.runs["r"], spec) == "", "rank 0 writes the files"
    receive(cluster, "node2", run_line(0))
    program = "'/usr/bin/python3 -m tensorboard.main --logdir /data2/runs/r/tensorboard'"
    assert board._tensorboard(cluster.runs["r"], spec) == (expected + program if expected else "")


@pytest.mark.parametrize(
    "line", [b'{"kind": "shell"}', b'{"kind": ["run"]}', b"{not json", b'{"error": "there is no Python"}', b"{" * 5000]
)
def test_what_is_no_line_of_a_sampler_ends_the_connection(line: bytes) -> None:
    with pytest.raises((RemoteError, ReplyError)):
        _parse(line)


@pytest.mark.parametrize(
    "line",
    [
        run_line(name="../../etc"),
        run_line(name="<script>"),
        run_line() | {"checkpoints": [{"step": -1, "bytes": 0, "time": 0}]},
        {"kind": "host", "now": 1e300},
        {"kind": "beat", "now": "<b>"},
    ],
)
def test_an_invalid_line_is_reported_and_nothing_else(line: dict[str, Any]) -> None:
    cluster = cluster_with(("node1", line))
    assert not cluster.runs and not cluster.hosts["node1"].sample
    assert [event.kind for event in cluster.events.values()] == ["warning"]
    assert _parse(b"Welcome to node1!\n") is None


def test_a_failure_names_the_rank_that_caused_it() -> None:
    failed = run_line(1, "failed", failures=[{"rank": 1, "exit_code": -9, "signal": "SIGKILL"}])
    cluster = cluster_with(("node1", run_line(0)), ("node2", failed), ("node2", failed))
    run = cluster.runs["r"]
    assert (run.status, run.cause) == ("failed", "rank 1 on node2 was killed by SIGKILL")
    assert [event.kind for event in cluster.events.values()] == ["started", "failed"]
    assert run.parts["node1"].run_dir == "/data1/runs/r", "the folder comes from the inventory, not from the host"


def test_a_lost_host_of_a_live_run_is_its_cause() -> None:
    cluster = cluster_with(("node1", run_line(0)), ("node2", run_line(1)))
    cluster.lost("node2", "sends nothing for 4 s")
    assert cluster.runs["r"].cause == "node2 has not answered for 4 s (sends nothing for 4 s)"
    cluster.receive("node2", "beat", {"now": time.time()})
    assert cluster.runs["r"].cause == "" and cluster.hosts["node2"].connected
    assert [event.kind for event in cluster.events.values()][-2:] == ["lost", "back"]


def test_events_and_runs_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_module, "EVENTS", 5)
    monkeypatch.setattr(state_module, "RUNS", 3)
    cluster = cluster_with(*(("node1", run_line(name=f"r{place}")) for place in range(9)))
    for place in range(9):
        cluster.add_event("warning", f"event {place}", at=2000.0 + place, host="node2")
    # The newest events of each host: a host that sends many does not displace those of others.
    assert len(cluster.runs) == 3 and [event.text for event in cluster.events.values()] == [
        *(f"run r{place} started on 2 hosts" for place in (1, 2)),
        *(f"event {place}" for place in (6, 7, 8)),
    ]


def test_pages_escape_and_are_rendered_once_for_all_browsers() -> None:
    cluster = cluster_with(("node1", run_line()))
    cluster.lost("node1", SCRIPT)
    pages = pages_of(cluster)
    html = pages.page("nodes") + pages.page("events") + pages.page("runs", "")
    assert SCRIPT not in html and "&lt;script&gt;alert" in html
    before = pages.regions("nodes")
    assert pages.regions("nodes") is before
    cluster.change()
    assert pages.regions("nodes") is not before and list(before["hosts"]) == ["host-0", "host-1"]


def test_the_page_of_many_runs_is_rendered_in_a_second() -> None:
    pages = pages_of(cluster_with(*(("node1", run_line(status="finished", name=f"r{n}")) for n in range(500))))
    began = time.process_time()
    assert pages.page("runs", "all").count("<tr id=") == 500 and time.process_time() - began < 1.0
    assert pages.page("runs", "").count("<tr id=") == 100


def test_the_share_of_communication_is_shown_where_it_is_measured() -> None:
    measured = run_line()
    measured["state"]["ranks"]["0"]["comm_share"] = [0.1, 0.3]
    pages = pages_of(cluster_with(("node1", measured), ("node1", run_line(name="other"))))
    rows = pages.regions("runs", "")["runs"]
    assert "20 %" in rows["run-r"] and "%" not in rows["run-other"]
    head = {name: pages.regions("run", name)["head"]["run-head"] for name in ("r", "other")}
    assert "20 % <small>of the time" in head["r"] and "not measured" in head["other"]
    assert "10 %" in pages.regions("run", "r")["ranks"]["run-ranks"]


def test_records_grow_and_begin_again_after_a_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainyard.dashboard.records.INTERVAL", 0.0)
    monkeypatch.setattr(run_queries, "CHUNK", 200)
    (tmp_path / "r").mkdir()
    line = lambda step, loss=1.5: json.dumps({"step": step, "loss": loss, "step_seconds": [0.1, 0.2]}) + "\n"  # noqa: E731
    file, cluster, records = tmp_path / "r/metrics.jsonl", cluster_with(("node1", run_line())), RunRecords("r")
    file.write_text("".join(map(line, range(1, 21))) + '{"step": 21, "lo')
    streams: Any = {"node1": HostOfRuns(tmp_path)}
    read = lambda place: asyncio.run(records.news(place, cluster, streams))  # noqa: E731
    news, place = read(None)
    assert news["columns"]["step"] == list(range(1, 21)) and read(place) == ({}, place)
    file.write_text("".join(map(line, range(1, 21))) + line(21) + "[1]\nnull\n" + line(22, float("nan")))
    news, place = read(place)
    assert (news["first"], news["columns"]["step"], news["columns"]["loss"]) == (20, [21, 22], [1.5, None])
    (tmp_path / "r/new").write_text(line(1, 9.0) + line(2, 8.0))
    (tmp_path / "r/new").replace(file)
    news, _ = read(place)
    assert (news["first"], news["generation"], news["columns"]["loss"]) == (0, 1, [9.0, 8.0])


def test_the_metrics_of_a_method_have_curves() -> None:
    records = RunRecords("r")
    plain = {"step": 1, "loss": 1.0}
    learned = {"step": 2, "loss": 0.5, "metrics": {"reward": 0.25, "kl": float("inf"), "reward/mine": 3}}
    for record in (plain, learned):
        records._add_step(checked_reply("metrics.jsonl line", record))
    assert records.series()["metrics"] == {"reward": [None, 0.25], "kl": [None, None], "reward/mine": [None, 3]}
    for step in range(3, 200):
        records._add_step(
            checked_reply("metrics.jsonl line", {"step": step, "loss": 1, "metrics": {f"m{step}": 1, "kl": 0.5}})
        )
    found = records.series(100)["metrics"]
    assert len(found) == 64 and {len(values) for values in found.values()} == {99} and set(found["kl"]) == {0.5}


def test_a_run_of_any_length_takes_a_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainyard.dashboard.records.STEPS", 100)
    records = RunRecords("r")
    for step in range(1, 10_001):
        records._add_step({"step": step, "loss": float(step), "step_seconds": [0.1] * 1000, "metrics": {"kl": 0.5}})
        assert len(records.metrics["kl"]) == len(records.columns["step"])
        assert len(records.columns["step"]) <= 100
    steps = records.columns["step"]
    assert steps[0] == 1 and {b - a for a, b in itertools.pairwise(steps)} == {128}
    assert records.columns["loss"] == [float(step) for step in steps] and records.generation == 7
    assert {len(ranks) for ranks in records.columns["step_seconds"]} == {64}


@pytest.mark.parametrize("name", ["..", "../r", "r/../../r", "/etc", ""])
def test_queries_stay_in_the_folder_of_runs(tmp_path: Path, name: str) -> None:
    (tmp_path / "runs/r/logs").mkdir(parents=True)
    (tmp_path / "secret.log").write_text("secret")
    for query in ("log", "search", "describe", "records"):
        request = {"run": name, "file": "metrics.jsonl", "since": 0, "text": "secret", "offset": 0, "inode": 0}
        with pytest.raises((ValueError, OSError)):
            run_queries.QUERIES[query](link_free(tmp_path / "runs"), request)
    with pytest.raises((ValueError, OSError)):
        run_queries.log(link_free(tmp_path / "runs"), {"run": "r", "file": "../../../secret.log", "since": 0})


def test_a_search_in_a_large_log_takes_little_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "r/logs/rank0.log"
    log.parent.mkdir(parents=True)
    search = lambda text: run_queries.search(link_free(tmp_path), {"run": "r", "file": log.name, "text": text})  # noqa: E731
    log.write_text("step 1\nERROR here\nstep 2\n")
    assert search("error") == {"lines": ["ERROR here"], "found": 1, "skipped": 0}
    monkeypatch.setattr(run_queries, "SEARCH_LIMIT", 1 << 20)
    monkeypatch.setattr(run_queries, "PART", 1 << 16)
    # A list of its lines takes 18 MiB.
    log.write_bytes(b"ab\n" * (1 << 20) + b"the end" + b"x" * 5000)
    tracemalloc.start()
    found = search("B")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 << 20
    assert found["lines"] == ["ab"] * 500 and found["skipped"] == (2 << 20) + 5007
    assert found["found"] == ((1 << 20) - 5007) // 3
    end = search("THE END")
    assert (end["found"], [len(line) for line in end["lines"]]) == (1, [4000])


def test_the_sampler_looks_at_a_limited_number_of_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_sampler, "CHECKPOINT_FILES", 10)
    for step, name in itertools.product(range(1, 5), range(4)):
        folder = tmp_path / f"r/checkpoints/step-{step:08}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.pt").write_bytes(b"xx")
    found = remote_sampler.checkpoints(link_free(tmp_path / "r"))
    assert [(entry["step"], entry["bytes"]) for entry in found] == [(2, 4), (3, 8), (4, 8)]


def test_the_sampler_sends_a_run_once_until_it_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[dict[str, Any]] = []
    monkeypatch.setattr(Sampler, "_send", staticmethod(sent.append))
    monkeypatch.setattr(Sampler, "_receive", lambda self: None)
    monkeypatch.setattr(Sampler, "_repeat", lambda self, *arguments: None)
    folder = tmp_path / "runs/r/state"
    folder.mkdir(parents=True)
    (tmp_path / "runs/<script>").mkdir()
    (folder / "node.json").write_text(json.dumps(run_line(status="finished")["state"]["node"]))
    sampler = Sampler({"data_dir": str(tmp_path), "address": "127.0.0.1", "ollama_urls": []})
    for _ in range(2):
        sampler._send_runs(every=True)
    assert [line["name"] for line in sent] == ["r"] and _parse(json.dumps(sent[0]).encode())
    (folder / "node.json").write_text("{")
    (folder / "other").write_text("")
    sampler._send_runs(every=True)
    assert sent[-1] == {"kind": "unreadable", "name": "r"}


def test_specs_are_compared_by_field() -> None:
    one, two = "lr: 0.1\nmodel: tiny\nlora_targets: [q, v]\n", "lr: 0.2\nmodel: tiny\n"
    specs = {"a": spec_values(one), "b": spec_values(two)}
    assert spec_rows(specs, differences=True) == [("lr", ["0.1", "0.2"]), ("lora_targets", ["q, v", ""])]
    for text in ("- no mapping", "a: [", "a: [" + "1," * 20_000 + "]"):  # the last one takes long to parse
        assert spec_values(text) == {}


def test_numbers_have_units() -> None:
    assert (size(3 << 30), size(12), size(None)) == ("3.0 GiB", "12 B", "–")
    assert [duration(time) for time in (42, 102, 3723, None)] == ["42 s", "1:42 min", "1:02:03 h", "–"]
    assert (rate(1890.2), rate(None), number(5.30999), number(float("nan"))) == ("1.9k tok/s", "–", "5.31", "–")
