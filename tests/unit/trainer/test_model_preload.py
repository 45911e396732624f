"""The code and the weights that are in memory before ranks start."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from threading import Event

import pytest

pytest.importorskip("torch")

from trainer.config import RunSpec
from trainer.distributed import model_preload
from trainer.distributed.model_preload import import_architecture, weight_files, weights_in_memory
from trainer.spec import make_spec

SIZE = 40 << 20  # bytes of a file, much more than a process reads otherwise


def spec_of(folder: Path) -> RunSpec:
    return make_spec({"model": str(folder), "fake_data": True}, "the test")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    for name in ("model/model.safetensors", "run/layers/0.safetensors"):
        (tmp_path / name).parent.mkdir(parents=True)
        with (tmp_path / name).open("wb") as file:
            file.truncate(SIZE)
    (tmp_path / "model/folder.safetensors").mkdir()
    return tmp_path / "model"


def bytes_read() -> int:
    rows = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(rows["rchar"])


@pytest.mark.parametrize(("share", "files"), [(2 * SIZE, 2), (2 * SIZE - 1, 0)])
def test_weights_are_read_where_memory_allows(
    share: int, files: int, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The layers that ranks received count, too."""
    monkeypatch.setattr(model_preload, "available_bytes", lambda device, processes: share)
    before = bytes_read()
    model_preload._read(weight_files(spec_of(model), model.parent / "run"), Event())
    assert (bytes_read() - before) // SIZE == files


def test_the_end_of_the_imports_ends_the_reading(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = Event()

    def available(device: str, processes: int) -> int:
        started.set()
        return 1 << 50

    monkeypatch.setattr(model_preload, "available_bytes", available)
    with (model / "model.safetensors").open("wb") as file:
        file.truncate(1 << 43)  # would take hours
    before = bytes_read()
    with weights_in_memory(spec_of(model), None):
        assert started.wait(30)
    assert bytes_read() - before < 1 << 40


def test_a_model_of_the_hub_is_left_to_the_ranks() -> None:
    assert weight_files(spec_of(Path("org/name")), None) == []
    import_architecture(spec_of(Path("org/name")))


@pytest.mark.parametrize("kind", ["starcoder2", "os.path", 7, None])
def test_the_code_of_the_architecture_is_imported(kind: object, tmp_path: Path) -> None:
    """A name that transformers does not know imports nothing."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    before = set(sys.modules)
    import_architecture(spec_of(tmp_path))
    assert ("transformers.models.starcoder2.modeling_starcoder2" in set(sys.modules) - before) is (kind == "starcoder2")
