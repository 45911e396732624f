"""Logs on the dashboard, the records of how runs were started, kept evaluations, and the board of Grafana."""

import asyncio
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from dashboard_lines import SCRIPT, HostOfRuns, cluster_with, gpu, host_line, hosts, pages_of, run_line
from prometheus_client.parser import text_string_to_metric_families

from trainer.common.errors import UserError
from trainer.spec import make_spec
from trainyard.dashboard import log_streams as logs_module
from trainyard.dashboard.actions import Actions
from trainyard.dashboard.log_streams import AGAIN, RunLog
from trainyard.dashboard.project import Project
from trainyard.dashboard.prometheus import exposition
from trainyard.dashboard.state import ClusterView
from trainyard.dashboard.views import Pages
from trainyard.evaluate import kept_evaluations as kept
from trainyard.evaluate.questions import Question
from trainyard.evaluate.scores import Answered, Outputs, summarise
from trainyard.run.launch.start_record import has_start, keep_start, options_of, read_start
from trainyard.run.launch_options import LaunchOptions
from trainyard.run.types import PreparedRun
from trainyard.wire.connection import Host, HostConnection, RemoteError


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


def result(count: int = 4, text: str = "no", files: Sequence[str] = ("a", "b")) -> dict[str, Any]:
    """Return a result of questions of several files; `run` has the second half of them right, `base` the first question."""
    asked = [
        Question(files[n % len(files)], ({"role": "user", "content": f"{SCRIPT}{n}?"},), f"{n}.") for n in range(count)
    ]
    reports = [
        Outputs("base", [Answered("0." if n == 0 else text, 1, False, 2.0, 3) for n in range(count)], 10.0),
        Outputs("run", [Answered(f"{n}." if 2 * n >= count else text, 1, True) for n in range(count)], 20.0),
    ]
    return summarise(asked, reports, 0)[0]


def test_what_is_kept_of_each_file(tmp_path: Path) -> None:
    path = kept.keep_evaluation(tmp_path, result())
    assert path.stat().st_mode & 0o777 == 0o600
    [found] = kept.kept_evaluations(path.parent).values()
    assert found.subjects == ["base", "run"] and [file.file for file in found.files] == ["a", "b"]
    first, second = found.files  # questions 0 and 2; 1 and 3
    assert [(each.subject, each.right, each.questions) for each in first.scores] == [("base", 1, 2), ("run", 1, 2)]
    assert (first.changes, second.changes) == ([kept.Change("run", 1, 1, 1.0)], [kept.Change("run", 1, 0, 1.0)])
    assert [(one.reference, one.answers) for one in first.changed] == [
        ("0.", [("0.", True), ("no", False)]),
        ("2.", [("no", False), ("2.", True)]),
    ]
    assert [one.reference for one in second.changed] == ["3."] and second.scores[1].tokens_per_second == 20.0


@pytest.mark.slow
def test_limits_of_size_and_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = kept.keep_evaluation(tmp_path, result(2000, "\N{GRINNING FACE}" * 2_500))
    assert path.stat().st_size < kept.LIMIT
    [found] = kept.kept_evaluations(path.parent).values()
    for file in found.files:
        assert file.changed and file.left_out + len(file.changed) == 500 + (file.file == "a")
    monkeypatch.setattr(kept, "KEPT", 3)
    os.utime(path, (1, 1))
    names = {kept.keep_evaluation(tmp_path, result()).stem for _ in range(3)}
    assert kept.kept_evaluations(path.parent).keys() == names and not path.exists()
    monkeypatch.setattr(kept, "LIMIT", 100)
    with pytest.raises(OSError, match="larger than"):
        kept.keep_evaluation(tmp_path, result())


def test_what_is_not_a_result_is_left_out(tmp_path: Path) -> None:
    path = kept.keep_evaluation(tmp_path, result())
    folder, content = path.parent, path.read_text()
    texts = ["", "[", "[" * 100_000, "{}", content.replace('"low"', '"no"'), "x" * (kept.LIMIT + 1)]
    for number, text in enumerate(texts):
        (folder / f"20260101-000000-00000{number}.json").write_text(text)
    (folder / "notes.json").write_text(content)
    os.mkfifo(folder / "20260101-000000-aaaaaa.json")
    assert list(kept.kept_evaluations(folder)) == [path.stem] and not kept.kept_evaluations(tmp_path / "none")


def page(pages: Pages, *names: str) -> str:
    return pages.page("evaluations", *names).partition("<main")[2]


def test_the_page_shows_the_scores_and_hostile_answers_as_text(tmp_path: Path) -> None:
    pages = pages_of(cluster_with(), tmp_path)
    assert "No evaluation is known" in page(pages)
    hostile = f"{SCRIPT}\x1b[2J\x00"
    path = kept.keep_evaluation(tmp_path / ".trainyard", result(text=hostile))
    asyncio.run(pages.evaluations.update())
    html = page(pages)
    assert "&lt;script&gt;" in html and SCRIPT not in html and not re.search("[\x00\x1b]", html)
    words = re.sub(r"<[^>]*>|\s+", " ", html)
    assert re.search(r"base → run : 1 wrong answers became right, 1 right ones wrong \(p = 1\.000\)", words)
    assert re.search(r"run *50 % *1 of 2 *9 % to 91 %", words)
    assert html == page(pages, path.stem) and page(pages, "20200101-000000-abcdef").count("<section") == 3


BOARD = json.loads((Path(__file__).resolve().parents[2] / "docs/grafana.json").read_text())


def metrics() -> dict[str, set[str]]:
    """Return the labels of every metric that /metrics has for one host that answers, and one run."""
    numbers = ("utilisation_percent", "memory_used_mib", "memory_total_mib", "temperature_c")
    run = run_line()
    run["state"]["ranks"]["0"]["tokens_per_second"] = 900.0
    cluster = cluster_with(("node1", host_line(1000.0, gpu(300) | dict.fromkeys(numbers, 70))), ("node1", run))
    families = text_string_to_metric_families(exposition(cluster).decode())
    return {sample.name: set(sample.labels) for family in families for sample in family.samples}


def test_the_board_names_what_the_dashboard_gives() -> None:
    known = metrics()
    targets = [(panel["title"], target) for panel in BOARD["panels"] for target in panel["targets"]]
    used: set[str] = set()
    for title, target in targets:
        names = set(re.findall(r"\btrainyard_\w+", target["expr"]))
        assert names and names <= set(known), (title, names - set(known))
        labels = set(re.findall(r"(\w+)=~?\"", target["expr"])) | set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
        assert all(labels <= known[name] for name in names), (title, labels)
        used |= names
    for variable in BOARD["templating"]["list"]:
        found = re.fullmatch(r"label_values\((\w+), (\w+)\)", variable["query"])
        assert found and found[2] in known[found[1]], variable["query"]
    assert set(known) == used  # a new metric gets its place on the board


def test_the_panels_do_not_overlap_and_ask_the_chosen_source() -> None:
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in BOARD["panels"])
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(cells) == len(set(cells)) and max(x for x, _ in cells) < 24
    assert {panel["datasource"]["uid"] for panel in BOARD["panels"]} == {"${DS_PROMETHEUS}"}
    assert [one["name"] for one in BOARD["__inputs"]] == ["DS_PROMETHEUS"]
    assert len({panel["id"] for panel in BOARD["panels"]}) == len(BOARD["panels"])
