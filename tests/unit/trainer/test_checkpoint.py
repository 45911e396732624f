"""Checkpoints are complete or absent, and the newest complete one is found."""

import gc
import json
import math
import os
import resource
import shutil
import subprocess
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from trainer_runs import names

from trainer.common.errors import UserError
from trainer.common.finite import all_finite, checkpoint_finite
from trainer.distributed.world import World
from trainer.records.checkpoint import MANIFEST, complete_checkpoints, find_checkpoint, find_defect, write_checkpoint
from trainer.strategy.full_state_dict import read_full, write_full

ALONE = World(0, 1, 0, 0, torch.device("cpu"))


def save_bytes(size: int = 1000) -> Callable[[Path], None]:
    def save(folder: Path) -> None:
        save_file({"x": torch.arange(size, dtype=torch.uint8)}, folder / "trained.safetensors")
        torch.save({"optimizer": torch.ones(size // 4)}, folder / "optimizer.pt")

    return save


def write(folder: Path, step: int, keep: int = 9, size: int = 1000) -> Path:
    return write_checkpoint(folder, step, {"totals": {"tokens": step}}, save_bytes(size), keep)


def damage_byte(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no manifest": (lambda path: (path / MANIFEST).unlink(), "manifest.json is missing"),
    "half a manifest": (lambda path: os.truncate(path / MANIFEST, 20), "manifest.json is unreadable ("),
    "list of files": (lambda path: (path / MANIFEST).write_text('{"files": []}'), "manifest.json is unreadable ("),
    "deep json": (lambda path: (path / MANIFEST).write_text("[" * 100_000), "manifest.json is unreadable ("),
    "other json": (lambda path: (path / MANIFEST).write_text("{}"), "manifest.json is unreadable ("),
    "cut off": (lambda path: os.truncate(path / "optimizer.pt", 100), "optimizer.pt has 100 of "),
    "file lost": (lambda path: (path / "trained.safetensors").unlink(), "trained.safetensors is missing"),
    "one bit": (lambda path: damage_byte(path / "optimizer.pt"), "the contents of optimizer.pt are damaged"),
    "no state": (lambda path: (path / "state.json").unlink(), "state.json is missing"),
}


def test_a_complete_checkpoint(tmp_path: Path) -> None:
    path = write(tmp_path, 7)
    assert path == tmp_path / "step-00000007"
    assert find_defect(path) == ""
    assert json.loads((path / "state.json").read_text()) == {"step": 7, "totals": {"tokens": 7}}
    assert names(path) == [MANIFEST, "optimizer.pt", "state.json", "trained.safetensors"]
    assert find_checkpoint(tmp_path, ALONE, print) == path
    assert names(tmp_path) == ["step-00000007"]


@pytest.mark.parametrize("how", list(DAMAGE))
def test_a_damaged_checkpoint_is_ignored_and_logged(how: str, tmp_path: Path) -> None:
    harm, why = DAMAGE[how]
    older, newer = write(tmp_path, 5), write(tmp_path, 10)
    harm(newer)
    messages: list[str] = []
    assert find_checkpoint(tmp_path, ALONE, messages.append) == older
    assert len(messages) == 1 and messages[0].startswith(f"checkpoint: {newer} is incomplete ({why}")
    assert messages[0].endswith("): ignored")
    harm(older)
    with pytest.raises(UserError, match=r"none in .* is complete, so the run cannot resume: restore one, or set"):
        find_checkpoint(tmp_path, ALONE, messages.append)


def test_no_checkpoint(tmp_path: Path) -> None:
    assert find_checkpoint(tmp_path / "no folder", ALONE, print) is None
    assert find_checkpoint(tmp_path, ALONE, print) is None
    (tmp_path / ".tmp-step-00000003").mkdir()
    (tmp_path / "step-x").mkdir()
    (tmp_path / "notes.txt").write_text("mine")
    assert find_checkpoint(tmp_path, ALONE, print) is None


def test_only_the_newest_checkpoints_are_kept(tmp_path: Path) -> None:
    for step in (2, 4, 100, 6_000_000):
        write(tmp_path, step, keep=2)
    assert sorted(complete_checkpoints(tmp_path)) == [100, 6_000_000]
    write(tmp_path, 6_000_001, keep=1)
    assert sorted(complete_checkpoints(tmp_path)) == [6_000_001]


@pytest.mark.parametrize("keep", [1, 2])
def test_a_damaged_later_checkpoint_does_not_evict_a_complete_one(keep: int, tmp_path: Path) -> None:
    write(tmp_path, 10)
    damage_byte(write(tmp_path, 20) / "optimizer.pt")
    write(tmp_path, 15, keep=keep)  # resumed from 10
    assert sorted(complete_checkpoints(tmp_path)) == [10, 15][-keep:]
    write(tmp_path, 20, keep=keep)
    assert sorted(complete_checkpoints(tmp_path)) == [15, 20][-keep:]


def test_the_same_step_replaces_the_checkpoint_and_the_leftovers_of_a_killed_writer(tmp_path: Path) -> None:
    write(tmp_path, 4, size=100)
    (tmp_path / ".tmp-step-00000004").mkdir()
    (tmp_path / ".tmp-step-00000004" / "optimizer.pt").write_bytes(b"half")
    path = write(tmp_path, 4, size=200)
    assert names(tmp_path) == ["step-00000004"] and not find_defect(path)
    assert (path / "trained.safetensors").stat().st_size > 200


def test_equal_states_give_equal_files(tmp_path: Path) -> None:
    one, two = (write(tmp_path / place, 3) for place in "ab")
    assert (one / MANIFEST).read_bytes() == (two / MANIFEST).read_bytes()


def test_a_failing_save_raises_its_own_error(tmp_path: Path) -> None:
    def broken(folder: Path) -> None:
        raise RuntimeError("a bug")

    write(tmp_path, 1)
    with pytest.raises(RuntimeError, match="a bug"):
        write_checkpoint(tmp_path, 2, {}, broken, 2)
    assert names(tmp_path) == ["step-00000001"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 2 MB, or a limit on the size of a file where mounting is not allowed."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = os.geteuid() == 0 and (
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", folder], check=False).returncode == 0
    )
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if not mounted:
        import signal

        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, hard))
    try:
        yield folder
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        if mounted:
            subprocess.run(["umount", "-l", folder], check=True)


def save_only(name: str, size: int) -> Callable[[Path], None]:
    def save(folder: Path) -> None:
        if name == "torch":
            torch.save({"x": torch.zeros(size, dtype=torch.uint8)}, folder / "optimizer.pt")
        elif name == "safetensors":
            save_file({"x": torch.zeros(size, dtype=torch.uint8)}, folder / "trained.safetensors")
        else:
            (folder / "x").write_bytes(bytes(size))

    return save


@pytest.mark.parametrize("writer", ["torch", "safetensors", "plain"])
def test_a_full_disk_is_a_one_line_error_and_loses_nothing(writer: str, small_disk: Path) -> None:
    folder = small_disk / "checkpoints"
    write_checkpoint(folder, 5, {}, save_only(writer, 500_000), 2)
    with pytest.raises(UserError) as caught:
        write_checkpoint(folder, 10, {}, save_only(writer, 5_000_000), 2)
    text = str(caught.value)
    assert text.startswith(f"checkpoint: cannot write step 10 to {folder}: ") and "\n" not in text
    assert text.endswith("the checkpoint of step 5 remains: free disk space and start the run again to resume")
    assert names(folder) == ["step-00000005"]
    assert find_defect(folder / "step-00000005") == ""
    # The traceback keeps torch's writer and its deleted file alive; a run ends with that error.
    del caught
    gc.collect()
    write_checkpoint(folder, 10, {}, save_only(writer, 500_000), 2)
    assert sorted(complete_checkpoints(folder)) == [5, 10]


# Weights that are not finite ----------------------------------------------------------------------------------------------


def save_weights(value: float) -> Callable[[Path], None]:
    def save(folder: Path) -> None:
        save_file({"x": torch.tensor([1.0, value]), "step": torch.tensor([2])}, folder / "trained.safetensors")

    return save


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_weights_that_are_not_finite_replace_no_checkpoint(value: float, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 1, {}, save_weights(0.5), 1)
    with pytest.raises(UserError, match=r"^checkpoint: the weights of step 2 are not finite: "):
        write_checkpoint(tmp_path, 2, {}, save_weights(value), 1)
    assert names(tmp_path) == ["step-00000001"]


def test_an_older_version_may_have_kept_weights_that_are_not_finite(tmp_path: Path) -> None:
    older = write_checkpoint(tmp_path, 1, {}, save_weights(0.5), 2)
    newer = write_checkpoint(tmp_path, 2, {}, save_weights(math.nan), 2, verified=True)
    for path in (older, newer):
        manifest = json.loads((path / MANIFEST).read_text())
        assert manifest.pop("finite") is True
        (path / MANIFEST).write_text(json.dumps(manifest))
    messages: list[str] = []
    assert find_checkpoint(tmp_path, ALONE, messages.append) == older
    assert messages == [f"checkpoint: {newer} has weights that are not finite: ignored"]
    shutil.rmtree(older)
    with pytest.raises(UserError, match=r"none in .* is complete with finite weights, so the run cannot resume: "):
        find_checkpoint(tmp_path, ALONE, messages.append)


@pytest.mark.parametrize("value", [1.0, math.nan, math.inf])
def test_the_weights_of_a_sharded_checkpoint(value: float, tmp_path: Path) -> None:
    moments = {"x": torch.full((2, 2), math.inf)}
    state = {"trained": {"x": torch.ones(3, 5), "y": torch.tensor([[1.0, value]])}, "exp_avg": moments}
    dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path, single_file_per_rank=True), no_dist=True)
    assert checkpoint_finite(tmp_path, names(tmp_path)) == math.isfinite(value)
    assert checkpoint_finite(tmp_path, [".metadata"]), "the shard of another host"


def test_all_kinds_of_tensors_are_checked() -> None:
    assert all_finite([]) and all_finite([torch.empty(0), torch.tensor([1, 2])])
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        big = torch.full((7, 3), torch.finfo(dtype).max, dtype=dtype)
        assert all_finite([big, -big]), "large, but finite"
        for value in (math.nan, math.inf, -math.inf):
            bad = big.clone()
            bad[6, 2] = value
            assert not all_finite([big, torch.empty(0), bad.requires_grad_()])


# Full state dicts ----------------------------------------------------------------------------------------------------

SHAPES = {name: torch.Size(shape) for name, shape in {"b": (3, 4), "a.weight": (5,), "c": (), "d": (0, 2)}.items()}


def values() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {name: torch.randn(shape) for name, shape in SHAPES.items()}


def test_what_is_written_is_read(tmp_path: Path) -> None:
    write_full(tmp_path, "trained", SHAPES, iter(values().items()))
    found = read_full(tmp_path, "trained")
    assert found.keys() == SHAPES.keys()
    for name, value in values().items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=0)


def test_other_data_types_and_layouts_are_written_as_contiguous_float32(tmp_path: Path) -> None:
    given = torch.arange(6, dtype=torch.bfloat16).view(3, 2).T
    write_full(tmp_path, "trained", {"w": given.shape}, [("w", given)])
    found = read_full(tmp_path, "trained")["w"]
    assert found.dtype == torch.float32 and torch.equal(found, given.float())


def test_one_tensor_at_a_time_is_in_memory(tmp_path: Path) -> None:
    alive: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
    most = 0

    def assembled() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal most
        for number in range(8):
            value = torch.full((100,), float(number))
            alive.add(value)
            most = max(most, len(alive))
            yield f"w{number}", value

    write_full(tmp_path, "exp_avg", {f"w{number}": torch.Size([100]) for number in range(8)}, assembled())
    assert most <= 2  # the one before is freed when the next one is there
    assert [float(value[-1]) for value in read_full(tmp_path, "exp_avg").values()] == list(range(8))


def test_ranks_without_values_write_nothing(tmp_path: Path) -> None:
    write_full(tmp_path / "absent", "trained", SHAPES, iter(()))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("names", [["b", "c", "d"], ["b", "a.weight", "c"], ["b", "a.weight", "c", "d", "e"]])
def test_other_values_than_announced_are_an_error(names: list[str], tmp_path: Path) -> None:
    found = values() | {"e": torch.zeros(1)}
    with pytest.raises(RuntimeError, match="checkpoint: trained"):
        write_full(tmp_path, "trained", SHAPES, ((name, found[name]) for name in names))
