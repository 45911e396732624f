"""What a version before this one wrote on disk can still be read."""

import json
from pathlib import Path

import yaml
from tables import table

from trainer.spec import changed_fields, make_spec
from trainyard.queue.run_folder import read_session
from trainyard.run.launch.start_record import read_start
from trainyard.run.plan.nodes import environment
from trainyard.run.stage.stage_files import plan_file
from trainyard.run.types import PlanEntry, PreparedRun, StagedFile

SPEC = {"run": "r", "model": "host:/m", "dataset": "host:/d.jsonl", "max_steps": 3, "rows_per_step": 32}
MODEL = {
    "kind": "model", "dest": "store/models/m-1", "sha256": {"w.safetensors": "b" * 64}, "bytes": 7, "digest": "c" * 64,
    "sizes": {"w.safetensors": 7}, "modes": {"w.safetensors": 0o600}, "src": "", "fetched_by": "node1", "config": "{}",
}  # fmt: skip


def test_the_starts_of_the_version_before_are_read(tmp_path: Path) -> None:
    folder = tmp_path / ".trainyard/starts"
    folder.mkdir(parents=True)
    record = {"spec": SPEC, "launch": {"max_restarts": 3}, "hosts": ["node1"], "folder": str(Path.cwd())}
    (folder / "r.json").write_text(json.dumps(record | {"variables": ["A"], "files": [], "origin": {}, "env": {}}))
    start = read_start(tmp_path, "r")
    assert [start.spec.max_steps, start.launch, start.hosts, start.variables] == table("old_records")["the_starts"]


def test_the_session_of_a_queued_run_of_the_version_before_is_read(tmp_path: Path) -> None:
    prepared = {"run": "r", "spec": SPEC, "files": [MODEL | {"src": "files/m"}], "origin": {"model": "m"}, "data": {}}
    session = {"hosts": [], "options": {}, "state": {"prepared": prepared, "plan": []}, "steps": {}, "continues": True}
    (tmp_path / "session.json").write_text(json.dumps(session))
    read = read_session(tmp_path)
    assert read.prepared.run == "r" and read.prepared.data is None and read.continues
    file = read.prepared.files[0]
    assert (file.src, file.dest) == (str(tmp_path / "files/m"), MODEL["dest"])


def test_the_files_of_a_run_folder_have_the_form_of_the_version_before() -> None:
    """plan.json has the fields that are not empty; spec.yml has the paths on the host, and equals the spec that it was made of."""
    entry = PlanEntry(
        *("node1", 0, [0, 1], "10.0.0.1", "eth0", 2, "/d/runs/r", "/d", ["python3", "-m", "x"]),
        attempt=2,
        versions={"torch": "2"},
        memory_mib=8,
        peers=["10.0.0.1"],
        claim="t",
        isolated=True,
    )
    assert json.loads(plan_file([entry])) == table("old_records")["the_files"]
    assert environment(entry, {"A": "b"}).splitlines()[:4] == [
        "PYTHONPATH=/d/runs/r/trainer.zip", "PYTHONUNBUFFERED=1", "GLOO_SOCKET_IFNAME=eth0", "NCCL_SOCKET_IFNAME=eth0",
    ]  # fmt: skip
    files = [
        StagedFile("model", "/m", "store/models/m-1", {}, "c" * 64, 7),
        StagedFile("dataset", "/d", "store/datasets/d", {}, "a" * 64, 1),
    ]
    spec = make_spec({name: value for name, value in SPEC.items() if name != "rows_per_step"}, "the test")
    written = yaml.safe_load(yaml.safe_dump(PreparedRun(spec, files, {}).spec_on("/d").model_dump(mode="json")))
    assert (written["model"], written["dataset"]) == ("/d/store/models/m-1", "/d/store/datasets/d")
    again = make_spec(written, "spec.yml")
    assert changed_fields(spec.model_copy(update={"model": again.model, "dataset": again.dataset}), again) == []
