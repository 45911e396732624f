"""Reading an Ollama store: model names, complete and incomplete models, missing files, digests."""

from __future__ import annotations

import hashlib
import json
import os
import pwd
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plugins.module_utils.ollama_files import manifest_path, read_model
from plugins.modules import ollama_staging
from plugins.modules.ollama_store import damaged_blobs, missing_files
from trainyard.ollama.model_copy import StoredModel, copy_model
from trainyard.wire.run_errors import RunError


def model(store: Path, name: str, *contents: bytes) -> None:
    """Add a model with these layers to a store; the first one is its config."""
    layers = []
    for content in contents:
        digest = hashlib.sha256(content).hexdigest()
        (store / "blobs").mkdir(parents=True, exist_ok=True)
        (store / f"blobs/sha256-{digest}").write_bytes(content)
        layers.append({"digest": f"sha256:{digest}", "size": len(content)})
    path = store / manifest_path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"config": layers[0], "layers": layers[1:]}))


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("tiny", "registry.ollama.ai/library/tiny/latest"),
        ("llama3.2:1b", "registry.ollama.ai/library/llama3.2/1b"),
        ("me/mine:q4", "registry.ollama.ai/me/mine/q4"),
        ("hf.co/org/model:Q4_K_M", "hf.co/org/model/Q4_K_M"),
    ],
)
def test_names(name: str, path: str) -> None:
    assert manifest_path(name) == f"manifests/{path}"


@given(st.text(max_size=30))
def test_a_name_never_leaves_the_store(name: str) -> None:
    try:
        path = manifest_path(name)
    except ValueError:
        return
    assert len(path.split("/")) == 5 and not {"", ".", ".."} & set(path.split("/"))


def test_complete_and_incomplete_models(tmp_path: Path) -> None:
    model(tmp_path, "tiny", b"config", b"weights")
    found = read_model(tmp_path, "tiny")
    assert found and len(found["blobs"]) == 2
    assert read_model(tmp_path, "other") is None
    (tmp_path / found["blobs"][0]).write_bytes(b"")
    assert read_model(tmp_path, "tiny") is None
    (tmp_path / found["manifest"]).write_text('{"config": {"digest": "sha256:../../etc", "size": 1}, "layers": []}')
    assert read_model(tmp_path, "tiny") is None


@pytest.mark.parametrize(
    "change",
    [
        {"manifest": "manifests/../../../etc/cron.d/evil"},
        {"manifest": "manifests/registry.ollama.ai/library/other/latest"},
        {"blobs": ["blobs/../../../root/.ssh/authorized_keys"]},
        {"blobs": ["/etc/shadow"]},
        {"blobs": [1]},
        {"digest": None},
        {"blobs": None},
    ],
)
def test_a_head_names_only_files_of_the_model(tmp_path: Path, change: dict[str, Any]) -> None:
    """Root copies these files from the head, so another path would let the head write anywhere on its peers."""
    model(tmp_path, "tiny", b"config", b"weights")
    reported = {"tiny": {**(read_model(tmp_path, "tiny") or {}), **change}}
    with pytest.raises(ValueError, match="the head reports invalid paths for the model 'tiny'"):
        missing_files(tmp_path, reported)
    with pytest.raises(ValueError):
        missing_files(tmp_path, {"../../etc": {"manifest": "manifests/../../etc", "digest": "", "blobs": []}})


def test_missing_files(tmp_path: Path) -> None:
    head, other = tmp_path / "head", tmp_path / "other"
    model(head, "tiny", b"config", b"weights")
    wanted = {"tiny": read_model(head, "tiny")}
    blobs, manifests = missing_files(other, wanted)
    assert len(blobs) == 2 and manifests == ["manifests/registry.ollama.ai/library/tiny/latest"]
    model(other, "tiny", b"config", b"older weights")
    assert missing_files(other, wanted)[0] == [f"blobs/sha256-{hashlib.sha256(b'weights').hexdigest()}"]
    model(other, "tiny", b"config", b"weights")
    assert missing_files(other, wanted) == ([], [])


ME = pwd.getpwuid(os.geteuid())


def test_a_model_passes_to_another_store(tmp_path: Path) -> None:
    one, two, folder = tmp_path / "one", tmp_path / "two", tmp_path / "exchange/folder"
    model(one, "tiny", b"config", b"weights")
    (one / next(iter(read_model(one, "tiny")["blobs"]))).chmod(0o600)  # is copied, as others cannot read a link to it
    two.mkdir()
    params = {"folder": str(folder), "owner": ME.pw_name, "model": "tiny"}
    exported = ollama_staging.run({**params, "state": "exported", "path": str(one)}, False)["model"]
    assert exported == read_model(one, "tiny")
    assert all((folder / "store" / name).stat().st_mode & 0o777 == 0o644 for name in exported["sizes"])
    assert sorted((folder / "store" / name).stat().st_nlink for name in exported["blobs"]) == [1, 2]
    imported = {**params, "state": "imported", "path": str(two), "files": exported}
    assert ollama_staging.run(imported, False)["changed"]
    assert read_model(two, "tiny") == exported
    assert not ollama_staging.run(imported, False)["changed"]
    assert ollama_staging.run({**params, "state": "absent"}, False)["changed"] and not folder.exists()


@pytest.mark.parametrize("damage", ["content", "link", "missing", "manifest"])
def test_what_arrived_is_not_trusted(tmp_path: Path, damage: str) -> None:
    one, two, folder = tmp_path / "one", tmp_path / "two", tmp_path / "folder"
    model(one, "tiny", b"config", b"weights")
    two.mkdir()
    found = read_model(one, "tiny")
    assert found
    ollama_staging.export(one, found, folder, ME)
    victim = folder / "store" / (found["manifest"] if damage == "manifest" else found["blobs"][1])
    content = victim.read_bytes()
    victim.unlink()
    if damage == "link":
        (tmp_path / "secret").write_bytes(content)
        victim.symlink_to(tmp_path / "secret")
    elif damage != "missing":
        victim.write_bytes(content + b" ")
    with pytest.raises((OSError, ValueError)):
        ollama_staging.install(folder, two, found)
    assert read_model(two, "tiny") is None
    assert not list(two.rglob(".*"))


@pytest.mark.parametrize(
    "change",
    [
        {"manifest": "manifests/../../../../etc/x"},
        {"blobs": ["blobs/../../etc/shadow"]},
        {"sizes": {}},
        {"digest": "x"},
        {"sizes": None},
        {"more": 1},
    ],
)
def test_the_report_of_a_source_names_only_files_of_a_model(tmp_path: Path, change: dict[str, Any]) -> None:
    model(tmp_path, "tiny", b"config", b"weights")
    found = read_model(tmp_path, "tiny")
    assert found and set(StoredModel.model_validate(found).copies()) == {f"store/{name}" for name in found["sizes"]}

    def connect(name: str) -> Any:
        raise AssertionError("a host was contacted")

    with pytest.raises(RunError, match="node1: the report of the files of the model is invalid"):
        copy_model({**found, **change}, "node1", ["node2"], "/folder", connect)


def test_digests(tmp_path: Path) -> None:
    model(tmp_path, "tiny", b"config", b"weights")
    blobs = read_model(tmp_path, "tiny")["blobs"]
    assert damaged_blobs(tmp_path, blobs) == []
    (tmp_path / blobs[1]).write_bytes(b"x")
    assert damaged_blobs(tmp_path, blobs) == [blobs[1]]
