"""What a rank has written into a finished run, as evaluate and deploy read it on the controller."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import yaml

from trainer.common.errors import UserError
from trainyard.deploy.trained_run import TrainedRun, find_copies, find_run
from trainyard.wire.connection import Host, HostConnection
from trainyard.wire.openssh import LocalTransport

CONFIG = {"model_type": "llama", "hidden_size": 64}


def find(folder: Path, spec: str, **result: str) -> TrainedRun:
    """Return what the controller finds in a run with this spec."""
    run = folder / "data/runs/r"
    run.mkdir(parents=True, exist_ok=True)
    (run / "spec.yml").write_text(spec)
    (run / "result.json").write_text(json.dumps({"status": "finished", "adapter_sha256": "ab" * 32, **result}))
    host = Host("node1", "127.0.0.1", str(folder / "data"), sys.executable)
    return find_run("r", {"node1": host}, {"node1": HostConnection(host, LocalTransport())}, with_base=True)


def test_a_spec_whose_aliases_take_all_memory_is_refused(tmp_path: Path) -> None:
    lines = ["a0: &a0 {k: 1}", *(f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 10)}]}}" for i in range(1, 6))]
    with pytest.raises(UserError, match=r"node1: .*alias"):
        find(tmp_path, "\n".join(lines))


def test_the_configuration_of_the_base_model_is_read(tmp_path: Path) -> None:
    for model in (tmp_path / "models/base", tmp_path / "data/runs/other/model"):
        model.mkdir(parents=True)
        (model / "config.json").write_text(json.dumps(CONFIG))
        found = find(tmp_path, yaml.safe_dump({"model": str(model)}))
        assert (found.base, found.base_name) == (CONFIG, model.name)


def test_no_other_file_is_taken_for_it(tmp_path: Path) -> None:
    secret, model = tmp_path / ".docker", tmp_path / "data/runs/other/model"
    secret.mkdir()
    model.parent.mkdir(parents=True)
    (secret / "config.json").write_text('{"auths": {}}')
    model.symlink_to(secret)
    assert not find(tmp_path, yaml.safe_dump({"model": str(secret)})).base
    (secret / "config.json").write_text(json.dumps(CONFIG))
    assert not find(tmp_path, yaml.safe_dump({"model": str(model)})).base, "a link in a folder of runs"


def test_only_hosts_with_the_same_weights_have_the_run(tmp_path: Path) -> None:
    hosts = {}
    for number, digest in enumerate(("a", "b", "a")):
        name = f"node{number + 1}"
        find(tmp_path / name, "model: /m", adapter_sha256=digest * 64)
        hosts[name] = Host(name, "127.0.0.1", str(tmp_path / name / "data"), sys.executable)
    connections = {name: HostConnection(host, LocalTransport()) for name, host in hosts.items()}
    assert [copy.host.name for copy in find_copies("r", hosts, connections)] == ["node1", "node3"]
