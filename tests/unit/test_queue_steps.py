"""Teachers, deployments and students in the queue: what the controller checks, and what it sends to the queue host."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from fake_queue import HOSTS, FakeQueue

from trainer.common.errors import UserError
from trainer.data.samples import read_samples
from trainer.data.tiny import make_tiny
from trainyard.inventory import Cluster
from trainyard.ollama.prompts import read_prompts
from trainyard.ollama.teachers import Candidate
from trainyard.queue import manage, requests, steps
from trainyard.queue.new_runs import NewRun, read_runs
from trainyard.queue.requests import Site, add_runs
from trainyard.queue.run_folder import read_session
from trainyard.queue.steps import Servers, servers_of
from trainyard.run.launch_options import make_options
from trainyard.run.prepare.spec_files import PreparedRun

TOP = Path(__file__).resolve().parents[2]
HOST = HOSTS[0]
SERVERS = Servers(
    {"node1": ["http://127.0.0.1:11434"]}, [Candidate("node1", "http://user:secret@10.0.0.1:11434", True)]
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a dataset, a model and prompts."""
    found = tmp_path_factory.mktemp("files")
    (found / "d.jsonl").write_text('{"prompt": "a", "completion": "b"}\n' * 8)
    make_tiny(read_samples(found / "d.jsonl"), found / "model", 0)
    (found / "p.csv").write_text("question\nWhat follows 1?\nWhat follows 2?\nWhat follows 1?\n")
    return found


def read(**values: Any) -> list[NewRun]:
    return read_runs(values, make_options, TOP, lambda line: None)


def file_of(folder: Path, target: Path, **students: Any) -> dict[str, Any]:
    """Write a queue file of a teacher, which is deployed, and two students; return the values that add it."""
    student = {"after": "teacher", "prompts": str(folder / "p.csv"), "columns": {"prompt": "question"}, "time_limit": 9}
    document = {
        "model": str(folder / "model"),
        "runs": [
            {"run": "teacher", "dataset": str(folder / "d.jsonl"), "deploy_name": "mine", "deploy_as": "merged"},
            {"run": "student", "grid": {"lr": ["1e-4", "3e-4"]}, **student, **students},
        ],
    }
    target.write_text(yaml.safe_dump(document))
    return {"file": str(target)}


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"deploy_as": "merged"}, "queue: deploy_as has no effect without deploy_name"),
        ({"temperature": 1}, "queue: temperature has no effect without prompts"),
        ({"deploy_name": "a b"}, "queue: deploy_name: expected the name of a model, such as mine:latest, got 'a b'"),
        ({"deploy_name": "a", "template": "no/such"}, "template: cannot read"),
        ({"prompts": "p", "run": "r", "samples": 0}, "queue: samples: expected an integer >= 1"),
        ({"prompts": "p", "run": "r", "dataset": "d"}, "queue: the dataset is made of the teacher's answers"),
        ({"prompts": "p"}, "prompts: name the run that trains on the answers: set run=NAME"),
        ({"prompts": "p", "run": "r", "model": "tiny"}, "prompts: the model tiny is made of its dataset"),
        ({"prompts": "p", "run": "r", "teacher_pull": True}, "teacher_pull: unknown name"),
    ],
)
def test_mistakes_are_one_line(values: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as caught:
        read(**{"model": "org/model", **values})
    assert said in str(caught.value) and "\n" not in str(caught.value)


@pytest.fixture
def staged(monkeypatch: pytest.MonkeyPatch) -> dict[str, PreparedRun]:
    """The runs whose files would be copied to the queue host, by name. The converter of models is a stand-in."""
    found: dict[str, PreparedRun] = {}

    def converter_archive(folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "converter-1.zip").write_bytes(b"converter")
        return folder / "converter-1.zip"

    monkeypatch.setattr(steps, "converter_archive", converter_archive)

    def stage(prepared: PreparedRun, *_: Any) -> tuple[PreparedRun, dict[str, str]]:
        found[prepared.run] = prepared
        files = [dataclasses.replace(file, src=f"files/{file.dest}") for file in prepared.files]
        return dataclasses.replace(prepared, files=files), {}

    monkeypatch.setattr(requests, "stage", stage)
    return found


def add(queue: FakeQueue, home: Path, servers: Servers = SERVERS, **values: Any) -> list[str]:
    lines: list[str] = add_runs(read(**values), queue.site(home, servers=servers))["lines"]
    return lines


def test_what_the_steps_need_is_sent_with_the_run(folder: Path, tmp_path: Path, staged: dict[str, PreparedRun]) -> None:
    (tmp_path / "t.gotmpl").write_text("{{ .Prompt }}\n")
    values = file_of(folder, tmp_path / "s.yml", temperature=0.1, eval_prompts=str(folder / "p.csv"))
    document = yaml.safe_load((tmp_path / "s.yml").read_text())
    document["runs"][0]["template"] = str(tmp_path / "t.gotmpl")
    (tmp_path / "s.yml").write_text(yaml.safe_dump(document))
    queue = FakeQueue()
    lines = add(queue, tmp_path, **values)
    assert list(queue.added) == ["teacher", "student-lr1e-4", "student-lr3e-4"]
    assert ", and 60 minutes for the deployment (job 101)" in lines[0]
    assert lines[1].startswith("added run student-lr1e-4, priority normal, 1 host after teacher; time limit 9 minutes")

    request, contents, arguments = queue.added["teacher"]
    assert request.deploy_name == "mine" and request.time_limit >= 70 and not any("dependency" in w for w in arguments)
    sent = json.loads(contents["session.json"])["steps"]
    assert (
        sent["deploy"]["urls"] == {"node1": ["http://127.0.0.1:11434"]}
        and sent["deploy"]["template"] == "{{ .Prompt }}"
    )
    assert (sent["deploy"]["options"]["run"], sent["deploy"]["options"]["deploy_as"]) == ("teacher", "merged")

    request, contents, arguments = queue.added["student-lr1e-4"]
    assert "--dependency=afterok:101" in arguments and "secret" not in request.model_dump_json() + " ".join(arguments)
    (tmp_path / "r").mkdir()
    (tmp_path / "r/session.json").write_bytes(contents["session.json"])
    session = read_session(tmp_path / "r")
    assert session.steps["student"]["options"]["teacher"] == "mine"
    assert session.steps["student"]["options"]["temperature"] == 0.1
    assert session.steps["student"]["machines"][0]["url"] == "http://user:secret@10.0.0.1:11434"
    spec = session.prepared.spec
    assert spec.columns == {} and not spec.fake_data and spec.eval_start
    assert [file.dest for file in staged["teacher"].files][-1] == "store/deploy/converter-1.zip"
    kinds = {file.kind: file for file in staged["student-lr1e-4"].files}
    assert set(kinds) == {"model", "trainer", "prompts", "eval_prompts"}
    chats = read_prompts(Path(kinds["prompts"].src))
    assert [chat[0]["content"] for chat in chats] == ["What follows 1?", "What follows 2?"]
    assert Path(kinds["prompts"].src).stat().st_mode & 0o777 == 0o600


def test_two_runs_do_not_deploy_one_model(folder: Path, tmp_path: Path) -> None:
    listed = [{"run": "a", "grid": {"lr": ["1e-4", "3e-4"]}, "deploy_name": "mine"}]
    (tmp_path / "s.yml").write_text(yaml.safe_dump({"model": str(folder / "model"), "runs": listed}))
    with pytest.raises(UserError, match="deploy_name: the runs a-lr1e-4 and a-lr3e-4 would both deploy mine"):
        read(file=str(tmp_path / "s.yml"))


def test_the_teacher_of_a_student_is_known_or_refused(folder: Path, tmp_path: Path, staged: Any) -> None:
    one = {
        "model": str(folder / "model"),
        "run": "s",
        "prompts": str(folder / "p.csv"),
        "columns": {"prompt": "question"},
    }
    queue = FakeQueue(
        {"old": {"deploy_name": "old:v1"}, "other": {"deploy_name": "other"}},
        old="finished",
        plain="finished",
        other="waiting",
    )
    add(queue, tmp_path, **one, after="old")
    assert json.loads(queue.added["s"][1]["session.json"])["steps"]["student"]["options"]["teacher"] == "old:v1"
    add(queue, tmp_path, **one | {"run": "t", "ollama_teacher": "llama3:8b"})
    assert json.loads(queue.added["t"][1]["session.json"])["steps"]["student"]["options"]["teacher"] == "llama3:8b"
    for after, said in (
        ("plain", "run s: prompts: the model that answers is not known: set ollama_teacher, or let one run"),
        ("old,other", "prompts: the model that answers is not known: the runs of after deploy old:v1, other: set"),
    ):
        with pytest.raises(UserError, match=said):
            add(queue, tmp_path, **one, after=after)


def test_a_run_that_has_finished_is_added_again_for_its_deployment(folder: Path, tmp_path: Path, staged: Any) -> None:
    values = file_of(folder, tmp_path / "s.yml")
    queue = FakeQueue(teacher="finished")
    add(queue, tmp_path, **values)
    assert next(iter(queue.added)) == "teacher" and "--dependency=afterok:101" in queue.added["student-lr1e-4"][2]
    queue = FakeQueue({"teacher": {"deploy_name": "mine"}}, teacher="finished")
    assert add(queue, tmp_path, **values)[0] == "run teacher is finished: nothing to do"
    assert list(queue.added) == ["student-lr1e-4", "student-lr3e-4"]
    with pytest.raises(UserError, match="run teacher is in the queue without deploy_name: cancel it, and add it again"):
        add(FakeQueue(teacher="waiting"), tmp_path, **values)


def test_other_prompts_are_another_run(folder: Path, tmp_path: Path, staged: dict[str, PreparedRun]) -> None:
    values = file_of(folder, tmp_path / "s.yml")
    queue = FakeQueue()
    add(queue, tmp_path, **values)
    before = staged["student-lr1e-4"]
    spec = {"spec": before.spec.model_dump(mode="json"), "digests": [[file.kind, file.digest] for file in before.files]}
    queue.found = dataclasses.replace(queue.found, specs={"student-lr1e-4": spec})
    add(queue, tmp_path, **values)
    (tmp_path / "other.jsonl").write_text('{"prompt": "What follows 3?"}\n')
    changed = file_of(folder, tmp_path / "s.yml", prompts=str(tmp_path / "other.jsonl"), columns={})
    with pytest.raises(UserError, match=r"exists with another spec \(prompts: another content"):
        add(queue, tmp_path, **changed)


def test_a_missing_converter_is_left_to_the_queue_host(
    folder: Path, tmp_path: Path, staged: dict[str, PreparedRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    def offline(path: Path) -> Path:
        raise UserError("cannot download the model converter")

    monkeypatch.setattr(steps, "converter_archive", offline)
    add(FakeQueue(), tmp_path, **file_of(folder, tmp_path / "s.yml"))
    assert "converter" not in {file.kind for file in staged["teacher"].files}
    lines: list[str] = []
    for options, count in (({"deploy_name": "a"}, 1), ({"deploy_name": "a", "deploy_as": "adapter"}, 1), ({}, 1)):
        steps.converter_files(steps.read_steps(options), tmp_path, lines.append)
        assert len(lines) == count and "the queue host downloads it" in lines[0]


def test_servers_are_looked_up_only_for_runs_that_need_them(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A variable of a host takes Ansible milliseconds."""
    sites: list[Site] = []
    monkeypatch.setattr(manage, "add_runs", lambda runs, site: sites.append(site) or {})
    asked: list[str] = []

    class Variables(dict[str, Any]):
        def get(self, name: str, default: Any = None) -> Any:
            asked.append(name)
            return super().get(name, default)

    variables = {"node1": Variables(queue_state="present", ollama_port=5000)}
    connect: Any = lambda name: type("Connection", (), {"host": HOST})()  # noqa: E731
    cluster = Cluster([HOST], {"cluster": ["node1"]}, variables, connect, make_options)
    for values in ({"model": "tiny"}, file_of(folder, tmp_path / "s.yml")):
        manage.manage_queue({"do": "add", **values}, cluster, TOP, lambda line: None, False)
    plain, full = sites
    assert not plain.servers.urls and full.servers.urls == {"node1": ["http://127.0.0.1:5000"]}
    assert asked.count("ollama_port") == 1


def test_addresses_of_servers_come_from_the_inventory(folder: Path, tmp_path: Path, staged: Any) -> None:
    variables: dict[str, dict[str, Any]] = {
        "node1": {"cluster_address": "10.0.0.1", "ollama_port": 5000},
        "found": {"discovered_url": "http://10.0.0.9:11434"},
    }
    groups = {"cluster": ["node1"], "discovered": ["found"]}
    none: Any = lambda name: None  # noqa: E731
    cluster = Cluster([HOST], groups, variables, none, make_options)
    servers = servers_of(cluster)
    assert servers.urls == {"node1": ["http://127.0.0.1:5000", "http://10.0.0.1:5000"]}
    assert [(each.name, each.trusted) for each in servers.teachers] == [("node1", True), ("found", False)]
    for values, count in (({}, 1), ({"teachers": "all"}, 1), ({"teachers": "all", "ollama_teacher": "llama3:8b"}, 2)):
        queue = FakeQueue()
        add(queue, tmp_path, servers, **file_of(folder, tmp_path / "s.yml", **values))
        sent = json.loads(queue.added["student-lr1e-4"][1]["session.json"])["steps"]
        assert len(sent["student"]["machines"]) == count
        assert sent["student"]["options"]["teacher_mixed"] == ("ollama_teacher" not in values)
    bad = Servers({"node1": ["https://user:secret@10.0.0.1"]}, servers.teachers)
    with pytest.raises(UserError, match="node1: ollama_url is no address of a server") as caught:
        add(FakeQueue(), tmp_path, bad, **file_of(folder, tmp_path / "s.yml"))
    assert "secret" not in str(caught.value)
