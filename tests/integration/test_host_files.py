"""Datasets and models that the hosts have already, and those that one host fetches from a stand-in for the hub."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_hub import FakeHub
from run_hosts import free_port

from trainer.common.errors import UserError
from trainer.common.files import sha256_file
from trainer.data.samples import read_samples
from trainer.data.tiny import make_tiny
from trainer.spec import make_spec
from trainyard.run.launch_options import make_options
from trainyard.run.prepare import hub
from trainyard.run.session import RunSession
from trainyard.run.stage.stage_files import release_claims
from trainyard.run.types import PreviousStart
from trainyard.wire import host_relay as relay
from trainyard.wire.connection import Host, HostConnection, Login, RemoteError
from trainyard.wire.openssh import LocalTransport
from trainyard.wire.run_errors import PlanError, RunError, StageError

SMALL = {"seq_length": 64, "total_batch_size": 4, "max_steps": 2, "eval_interval": 0, "loggers": "none"}


class Transport(LocalTransport):
    """Counts the bytes that the controller copies; `down` is a host whose requests fail."""

    def __init__(self, here: Here, host: Host) -> None:
        super().__init__()
        self.here, self.host = here, host

    def execute(self, command: str, stdin: bytes | None = None) -> tuple[int, bytes, bytes]:
        if any(self.host.name == host and verb in command for host, verb in self.here.failing):
            raise RemoteError("Connection reset by peer")
        return super().execute(command, stdin)

    def put(self, source: str, target: str) -> None:
        self.here.put += Path(source).stat().st_size
        super().put(source, target)


class Here:
    """Three hosts of this machine, and a dataset and a model on each."""

    def __init__(self, folder: Path, remote: bool, count: int = 3) -> None:
        self.folder, self.put, self.lines = folder, 0, []  # type: ignore[var-annotated]
        self.failing: set[tuple[str, str]] = set()
        login = Login("127.0.0.1") if remote else Login()
        self.hosts = [
            Host(f"node{n}", f"127.0.0.{n + 10}" if remote else "127.0.0.1", str(folder / f"node{n}"), sys.executable,
                 backend="process", login=login)
            for n in range(1, count + 1)
        ]  # fmt: skip

    def session(self, fields: dict[str, Any], check: bool = False, **options: Any) -> RunSession:
        chosen = make_options({"progress_interval": 0.2} | options)
        connect: Callable[[Host], HostConnection] = lambda host: HostConnection(host, Transport(self, host))  # noqa: E731
        spec = make_spec(SMALL | fields, "the test")
        return RunSession(
            self.hosts, connect, chosen, spec=spec, home=self.folder, report=self.lines.append, check=check
        )

    def staged(self, fields: dict[str, Any], **options: Any) -> RunSession:
        session = self.session(fields, **options)
        session.plan()
        session.stage()
        release_claims(session.state.plan, session.connect, session.state.token)
        return session


@pytest.fixture
def here(tmp_path: Path) -> Here:
    dataset = tmp_path / "srv/data.jsonl"
    dataset.parent.mkdir()
    dataset.write_text("".join(json.dumps({"instruction": f"q{n}", "output": f"a{n}"}) + "\n" for n in range(30)))
    make_tiny(read_samples(dataset), tmp_path / "srv/model", 1)
    return Here(tmp_path, remote=False, count=2)


@pytest.mark.slow
def test_a_dataset_and_a_model_of_the_hosts_are_used_there(here: Here) -> None:
    """The planner reads config.json from a host. Only the trainer leaves the controller. Equal contents are the same run."""
    files = {"dataset": f"host:{here.folder}/srv/data.jsonl", "model": f"host:{here.folder}/srv/model"}
    session = here.session(files | {"strategy": "auto"}, master_port=free_port())
    result = session.run()["result"]
    assert result["status"] == "finished" and result["samples"] > 0
    weights = (here.folder / "srv/model/model.safetensors").stat().st_size
    assert here.put < weights / 4, "the trainer for each host, not the model"
    entry = session.state.plan[1]
    for name in ("dataset", "model"):
        link = Path(getattr(session.spec_on(entry), name))
        assert link.is_symlink() and str(link.readlink()) == files[name].removeprefix("host:")
        assert link.is_relative_to(here.hosts[1].data_dir)
    copied = here.session(
        {"dataset": f"{here.folder}/srv/data.jsonl", "model": f"{here.folder}/srv/model", "strategy": "auto"}
    )
    copied.prepare()
    assert copied.run_name == session.run_name, "the name depends on the contents alone"


@pytest.mark.long
@pytest.mark.parametrize("prefix", [pytest.param("", id="copied"), pytest.param("host:", id="on the hosts")])
def test_a_teacher_reaches_the_hosts_as_the_model_does(prefix: str, here: Here) -> None:
    """The teacher is a model of the same tokenizer in another folder; two hosts train with it."""
    shutil.copytree(here.folder / "srv/model", here.folder / "srv/teacher")
    (here.folder / "srv/teacher/NOTE").write_text("another folder")
    fields = {"dataset": f"{here.folder}/srv/data.jsonl", "model": f"{here.folder}/srv/model", "strategy": "auto"}
    fields |= {"teacher": f"{prefix}{here.folder}/srv/teacher", "distill_alpha": 0.5}
    session = here.session(fields, master_port=free_port())
    assert session.run()["result"]["status"] == "finished"
    for host, entry in zip(here.hosts, session.state.plan, strict=True):
        assert session.spec_on(entry).strategy != "fsdp"
        teacher = Path(session.spec_on(entry).teacher)
        assert teacher.is_relative_to(host.data_dir) and teacher.is_symlink() == bool(prefix)
        assert (teacher / "NOTE").exists() and teacher != Path(session.spec_on(entry).model)


@pytest.mark.long
def test_the_contents_belong_to_the_run(here: Here) -> None:
    """A dataset that changes gives another run; one that changes after the plan is not staged."""
    files = {"dataset": f"host:{here.folder}/srv/data.jsonl", "model": f"host:{here.folder}/srv/model"}
    first = here.staged(files)
    with (here.folder / "srv/data.jsonl").open("a") as file:
        file.write('{"text": "more"}\n')
    second = here.session(files)
    second.plan()
    assert second.run_name != first.run_name
    with (here.folder / "srv/data.jsonl").open("a") as file:
        file.write('{"text": "even more"}\n')
    with pytest.raises(
        StageError, match=r"node\d: .*/srv/data.jsonl differs from the file that the run was planned with"
    ):
        second.stage()
    (here.folder / "node1/runs" / first.run_name / "checkpoints").mkdir()
    with pytest.raises(PlanError, match=rf"run {first.run_name} exists with another spec \(dataset: "):
        here.session(files | {"run": first.run_name}).plan()


def model_of(session: RunSession) -> Path:
    return Path(session.spec_on(session.state.plan[0]).model)


@pytest.mark.long
def test_a_copy_in_the_store_becomes_no_link_and_the_other_way_round(here: Here) -> None:
    local = {"dataset": f"{here.folder}/srv/data.jsonl", "model": f"{here.folder}/srv/model"}
    on_hosts = {name: f"host:{path}" for name, path in local.items()}
    first = here.staged(local)
    put = here.put
    assert model_of(here.staged(on_hosts)) == model_of(first)
    model = model_of(first)
    assert model.is_dir() and not model.is_symlink() and here.put == put
    shutil.rmtree(here.folder / "node1")
    linked = here.staged(on_hosts)
    assert model_of(linked).is_symlink()
    here.staged(local)
    assert model_of(linked).is_symlink(), "what is equal is not copied"


def message(session: RunSession) -> str:
    with pytest.raises((UserError, RunError)) as raised:
        session.prepare()
    assert str(raised.value).isprintable()
    return str(raised.value)


@pytest.mark.slow
def test_unequal_and_missing_files_are_named(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each host sees its own /srv through a path that differs by host; the message has hosts, difference and remedy."""
    here = Here(here.folder, remote=False)
    real = Transport.execute

    def own_view(self: Transport, command: str, stdin: bytes | None = None) -> tuple[int, bytes, bytes]:
        data = stdin and stdin.replace(b"/view/", f"/view-{self.host.name}/".encode())
        code, out, err = real(self, command, data)
        return code, out.replace(f"/view-{self.host.name}/".encode(), b"/view/"), err

    monkeypatch.setattr(Transport, "execute", own_view)
    for host in here.hosts:
        shutil.copytree(here.folder / "srv", here.folder / f"view-{host.name}")
    view = f"host:{here.folder}/view"
    dataset, model = {"dataset": f"{view}/data.jsonl", "fake_data": False}, {"model": f"{view}/model"}
    local = {"model": str(here.folder / "srv/model")}
    here.session(dataset | model).prepare()
    (here.folder / "view-node2/model/\x1b[2J.json").write_text("{}")
    text = message(here.session(dataset | model))
    assert "model: " in text and "is not the same on all hosts: node2 has" in text and "node1 has not" in text
    (here.folder / "view-node3/data.jsonl").write_text('{"text": "x"}\n')
    text = message(here.session(dataset | local))
    assert "node3 has 14 bytes (SHA-256 " in text and "copy it from one host to the others" in text
    for name in ("node2", "node3"):
        (here.folder / f"view-{name}/data.jsonl").unlink()
    text = message(here.session(dataset | local))
    assert f"dataset: node2, node3 have no {here.folder}/view/data.jsonl: mount or copy it there" in text
    os.mkfifo(here.folder / "view-node2/data.jsonl")
    assert "node2 cannot read" in message(here.session(dataset | local))
    (here.folder / "view-node1/model/config.json").unlink()
    shutil.rmtree(here.folder / "view-node2/model")
    shutil.rmtree(here.folder / "view-node3/model")
    for name in ("node2", "node3"):
        shutil.copytree(here.folder / "view-node1/model", here.folder / f"view-{name}/model")
    assert "view/model on the hosts has no config.json" in message(here.session(model | {"fake_data": True}))


@pytest.mark.parametrize("text", ["host:data.jsonl", "host:", "host:/a/../etc/shadow"])
def test_only_absolute_paths_are_paths_of_hosts(here: Here, text: str) -> None:
    assert "give the absolute path on the hosts, as host:/path" in message(here.session({"dataset": text}))


@pytest.mark.slow
def test_check_mode_writes_nothing_on_hosts(here: Here) -> None:
    files = {"dataset": f"host:{here.folder}/srv/data.jsonl", "model": f"host:{here.folder}/srv/model"}
    session = here.session(files | {"strategy": "auto"}, check=True)
    session.plan()
    assert session.stage()["changed"]
    assert not any((here.folder / host.name).exists() for host in here.hosts)


# The hub ----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def stand_in(here: Here, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    repository = here.folder / "hub/datasets/org/qa"
    for split in ("train", "test"):
        (repository / "data").mkdir(parents=True, exist_ok=True)
        shutil.copy(here.folder / "srv/data.jsonl", repository / f"data/{split}.jsonl")
        with (repository / f"data/{split}.jsonl").open("a") as file:
            file.write(json.dumps({"text": split}) + "\n")
    (repository / ".gitattributes").write_text("*.bin filter=lfs\n")
    shutil.copytree(here.folder / "srv/model", here.folder / "hub/models/org/small")
    server = FakeHub(here.folder / "hub")
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(relay, "MINIMUM", 0)
    yield server
    server.close()


HUB = {"dataset": "org/qa", "model": "org/small"}


@pytest.mark.long
def test_one_host_fetches_from_the_hub_and_passes_it_on(here: Here, stand_in: FakeHub) -> None:
    """Every file leaves the hub once, and nothing but the trainer leaves the controller."""
    cluster = Here(here.folder, remote=True)
    session = cluster.staged(HUB)
    names = sorted(stand_in.downloads)
    assert names == sorted({*names}) and {"data/train.jsonl", "model.safetensors"} <= {*names}
    assert cluster.put < 1_000_000 and not [line for line in cluster.lines if "warning" in line]
    specs = [session.spec_on(entry) for entry in session.state.plan]
    for name in ("model.safetensors", "config.json"):
        assert len({sha256_file(Path(spec.model, name)) for spec in specs}) == 1
    assert len({sha256_file(Path(spec.dataset, "data/test.jsonl")) for spec in specs}) == 1
    assert len(read_samples(Path(specs[2].dataset))) == 31, "the split train only"
    again = cluster.staged(HUB)
    assert sorted(stand_in.downloads) == names and again.run_name == session.run_name
    without_owner = cluster.staged(HUB | {"dataset": "qa"})
    assert len(read_samples(Path(without_owner.spec_on(without_owner.state.plan[1]).dataset))) == 31
    stand_in.close()
    assert cluster.staged(HUB).run_name == session.run_name, "the hub is down: what was fetched before is used"
    assert any("cannot reach the hub" in line and "fetched before" in line for line in cluster.lines)


@pytest.mark.slow
@pytest.mark.parametrize("transfer", [pytest.param("controller", marks=pytest.mark.long), "auto"])
def test_the_hosts_of_a_pipeline_go_on_without_the_first_one(here: Here, stand_in: FakeHub, transfer: str) -> None:
    """Every host has the model, so that no host fetches it again."""
    cluster = Here(here.folder, remote=True)
    options = {"transfer": transfer, "min_nodes": 2, "max_restarts": 3}
    session = cluster.staged(HUB | {"strategy": "pipeline", "run": "r"}, **options)
    folders = [Path(session.spec_on(entry).model) for entry in session.state.plan]
    assert len({sha256_file(folder / "model.safetensors") for folder in folders}) == 1
    names = sorted(stand_in.downloads)
    assert names == sorted({*names}) and not [line for line in cluster.lines if "warning" in line]
    cluster.failing.add(("node1", ""))
    lost = PreviousStart(True, 1, ["node1"])
    session._make_plan(lost)
    assert [entry.host for entry in session.state.plan] == ["node2", "node3"]
    session._stage(lost)
    assert sorted(stand_in.downloads) == names


@pytest.mark.slow
@pytest.mark.parametrize("transfer", [pytest.param("controller", marks=pytest.mark.long), "auto"])
def test_the_controller_relays_where_hosts_do_not_reach_each_other(
    here: Here, stand_in: FakeHub, transfer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay, "CONNECT", 0.5)
    cluster = Here(here.folder, remote=True)
    cluster.failing = {("node1", "hub_fetch"), ("node3", "relay")}
    session = cluster.staged(HUB, transfer=transfer)
    assert any(line.startswith("node1 cannot fetch org/qa from the hub: Connection reset") for line in cluster.lines)
    assert len(stand_in.downloads) == len({*stand_in.downloads})
    digests = {sha256_file(Path(session.spec_on(entry).model, "model.safetensors")) for entry in session.state.plan}
    assert len(digests) == 1
    assert bool([line for line in cluster.lines if line.startswith("warning: the relay failed")]) == (
        transfer == "auto"
    )


def test_a_host_cannot_name_files_outside_its_folder(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Here(here.folder, remote=True)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    answer = {"names": {"../../../.ssh/authorized_keys": [1, "0" * 64]}, "texts": {}, "unreachable": ""}
    monkeypatch.setattr(HostConnection, "call", lambda *_, **__: answer)
    access = cluster.session({})._access(cluster.hosts)
    assert hub.fetch_on_host("model", "org/small", access, cluster.lines.append) is None
    assert cluster.lines[1:] == [
        f"{host.name} cannot fetch org/small from the hub: sent a name that no file of the hub has"
        for host in cluster.hosts
    ]
