"""Reading an Ollama store: model names, complete and incomplete models, missing files, digests."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plugins.modules.ollama_store import damaged_blobs, manifest_path, missing_files, read_model


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


def test_digests(tmp_path: Path) -> None:
    model(tmp_path, "tiny", b"config", b"weights")
    blobs = read_model(tmp_path, "tiny")["blobs"]
    assert damaged_blobs(tmp_path, blobs) == []
    (tmp_path / blobs[1]).write_bytes(b"x")
    assert damaged_blobs(tmp_path, blobs) == [blobs[1]]
