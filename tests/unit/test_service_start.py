"""The record with which the service of the dashboard starts a run again: every kind of file, without paths of the controller."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from trainer.common.errors import UserError
from trainer.spec import make_spec
from trainyard.run.launch.start_record import options_of, read_service_start, service_hosts, service_run, service_start
from trainyard.run.launch_options import LaunchOptions
from trainyard.run.stage.transfer import receive_request, staged_copies
from trainyard.run.types import PlanEntry, PreparedRun, StagedFile
from trainyard.wire.connection import Host

HOSTS = {name: Host(name, "10.0.0.1", "/data", "/usr/bin/python3", env={"A": name}) for name in ("node1", "node2")}
OUTSIDE = ("/etc/passwd", "store/../../x", "store/a/../../../x", "runs/r/x")
ON_HOSTS = StagedFile("dataset", "", "store/datasets/abc.jsonl", {}, "a" * 64, 0, on_hosts="/mnt/data.jsonl")


def on_controller(folder: Path, kind: str, name: str = "") -> StagedFile:
    """Return a file of the controller, or of a folder that has it and config.json."""
    folder.mkdir(exist_ok=True)
    path = folder / (name or "model.safetensors")
    path.write_bytes(b"content")
    path.chmod(0o600)
    digests = {"" if name else path.name: hashlib.sha256(b"content").hexdigest()}
    if not name:
        (folder / "config.json").write_text("{}")
    return StagedFile.of(path if name else folder, f"store/{kind}s/x-{kind}", digests, kind)


def record(tmp_path: Path, entries: list[PlanEntry], **fields: Any) -> dict[str, Any]:
    hub: dict[str, Any] = {"sizes": {"model.safetensors": 5}, "fetched_by": "node2", "config": "{}", "src": ""}
    files = [
        ON_HOSTS,
        on_controller(tmp_path / "files", "script", "work.py"),
        on_controller(tmp_path / "model", "model"),
        replace(on_controller(tmp_path / "teacher", "teacher"), **hub),
        on_controller(tmp_path / "files", "trainer", "trainer.zip"),
    ]
    spec = make_spec({"run": "r", "model": str(tmp_path / "model"), "dataset": "host:/mnt/data.jsonl", **fields}, "it")
    prepared = PreparedRun(spec, files, {"model": "m"})
    options = LaunchOptions.model_validate({"run_env": {"B": "2"}, "collect_to": "/home/me", "max_restarts": 3})
    found: dict[str, Any] = json.loads(service_start(prepared, options, HOSTS, entries))
    return found


def test_every_file_is_one_that_the_hosts_have(tmp_path: Path) -> None:
    found = record(tmp_path, [PlanEntry("node2", 0, [0]), PlanEntry("node1", 1, [1])])
    assert found["launch"] == {"max_restarts": 3} and found["env"]["node1"] == {"A": "node1", "B": "2"}
    (tmp_path / "r.json").write_text(json.dumps(found))
    start = read_service_start(tmp_path / "r.json", "r")
    assert [host.env["A"] for host in service_hosts(start, list(HOSTS.values()))] == ["node1", "node2"]
    assert options_of(start, LaunchOptions()).max_restarts == 3
    prepared = service_run(start, tmp_path / "work")
    assert prepared.spec == start.spec and prepared.has_dataset
    dataset, script, model, teacher, trainer = prepared.files
    assert dataset == ON_HOSTS
    assert [file.fetched_by for file in (script, model, teacher)] == ["node2"] * 3
    assert model.config == teacher.config == "{}" and {file.src for file in prepared.files[:-1]} == {""}
    assert Path(trainer.src).is_relative_to(tmp_path / "work"), "the trainer is that of the service"
    copies = staged_copies(prepared.files)
    weights, _ = copies["store/models/x-model/model.safetensors"], copies["store/scripts/x-script"]
    assert (weights.source, weights.size, weights.mode) == ("", 7, 0o600)
    assert receive_request(PlanEntry("node1", data_dir="/data"), prepared.files, copies)["links"] == {
        "/data/store/datasets/abc.jsonl": ("/mnt/data.jsonl", "a" * 64)
    }


def test_no_path_of_the_controller_is_in_a_record_and_its_hosts_and_name_are_checked(tmp_path: Path) -> None:
    found = record(tmp_path, [PlanEntry("node1")])
    assert found["files"][2]["fetched_by"] == "node1"
    for file in found["files"]:
        assert not str(file.get("src")) and str(tmp_path) not in json.dumps({**file, "src": ""})
    (tmp_path / "r.json").write_text(json.dumps(found))
    with pytest.raises(UserError, match="was started on node2, which the service does not know"):
        service_hosts(read_service_start(tmp_path / "r.json", "r"), [HOSTS["node1"]])
    with pytest.raises(UserError, match="that of another run"):
        read_service_start(tmp_path / "r.json", "other")


BAD: list[tuple[Callable[[dict[str, Any]], Any], str]] = [
    *((lambda bad, path=path: bad["files"][1].update(dest=path), "dest") for path in OUTSIDE),
    (lambda bad: bad["files"][1].update(src="/etc/shadow"), "src"),
    (lambda bad: bad["files"][1].update(sha256={"../x": "0" * 64}), "sha256"),
    (lambda bad: bad["files"][1].update(sha256={"": "0"}), "sha256"),
    (lambda bad: bad["files"][1].update(kind="trainer"), "kind"),
    (lambda bad: bad["launch"].update(collect_to="/tmp/x"), "collect_to"),
    (lambda bad: bad["launch"].update(evil=1), "unknown launch option"),
    (lambda bad: bad["spec"].update(run="other"), "another run"),
    (lambda bad: bad.update(env={}), "another run"),
    (lambda bad: bad["spec"].update(strategy="evil"), "strategy"),
    (lambda bad: bad.update(more=1), "more"),
]


@pytest.mark.parametrize(("change", "why"), BAD)
def test_a_record_that_is_not_valid_is_refused(tmp_path: Path, change: Callable[[Any], Any], why: str) -> None:
    bad = record(tmp_path, [PlanEntry("node1")])
    change(bad)
    (tmp_path / "r.json").write_text(json.dumps(bad))
    with pytest.raises(UserError, match="the record of its start is not valid") as error:
        read_service_start(tmp_path / "r.json", "r")
    assert why in str(error.value) and "\n" not in str(error.value)
    (tmp_path / "r.json").write_text("[" * 5000)
    with pytest.raises(UserError, match="not valid"):
        read_service_start(tmp_path / "r.json", "r")
