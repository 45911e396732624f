"""Checkpoints that are whole or not there: written aside, fsynced, renamed; every host keeps its own copy."""

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from trainer.errors import DiskError, UserError, disk_trouble
from trainer.files import sha256_file, sync_files, sync_folder
from trainer.world import World

MANIFEST = "manifest.json"
_NAME = re.compile(r"step-(\d{8})")
_CHUNK = 64 << 20  # bytes of one broadcast when a host is given a checkpoint


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.1f} MB"


def write_checkpoint(folder: Path, step: int, state: dict[str, Any], save: Callable[[Path], None], keep: int) -> Path:
    """Write the checkpoint of `step` below `folder` and drop all but the newest `keep` whole ones.

    Raises:
        UserError: the disk is full or cannot be written; what was half written is gone, older checkpoints are as they were.
    """
    final, aside = folder / f"step-{step:08d}", folder / f".tmp-step-{step:08d}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for left in folder.glob(".tmp-*"):
            shutil.rmtree(left)
        aside.mkdir()
        save(aside)
        (aside / "state.json").write_text(json.dumps({"step": step} | state))
        files = {
            file.name: {"bytes": file.stat().st_size, "sha256": sha256_file(file)} for file in sorted(aside.iterdir())
        }
        (aside / MANIFEST).write_text(json.dumps({"step": step, "files": files}))
        sync_files(aside)
        if final.exists():
            shutil.rmtree(final)
        aside.rename(final)
        sync_folder(folder)
    except Exception as error:
        shutil.rmtree(aside, ignore_errors=True)
        if isinstance(error, OSError) or disk_trouble(error):
            raise _unwritten(folder, step, error) from error
        raise
    # A later one is damaged, or this run would have gone on from it: it must not push a whole one out.
    for old in sorted(old for old in whole_checkpoints(folder, check=False) if old <= step)[:-keep]:
        shutil.rmtree(folder / f"step-{old:08d}")
    return final


def _unwritten(folder: Path, step: int, error: Exception) -> DiskError:
    free = shutil.disk_usage(folder).free if folder.exists() else 0
    why = disk_trouble(error) or str(error).strip().splitlines()[0]
    kept = sorted(whole_checkpoints(folder, check=False))
    rest = f"step {kept[-1]} is kept" if kept else "there is no older one"
    return DiskError(
        f"checkpoint: step {step} could not be written to {folder}: {why} ({_megabytes(free)} free); {rest}: "
        "make room and start the run again, it goes on from there"
    )


def why_not_whole(path: Path, *, check: bool = True) -> str:
    """Return what is wrong with a checkpoint folder, or an empty string. `check`: compare contents, not only sizes."""
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        for name, expected in manifest["files"].items():
            file = path / name
            size = file.stat().st_size if file.exists() else -1
            if size != expected["bytes"]:
                return f"{name} has {size} of {expected['bytes']} bytes" if size >= 0 else f"{name} is missing"
            if check and sha256_file(file) != expected["sha256"]:
                return f"the contents of {name} are damaged"
    except FileNotFoundError:
        return f"{MANIFEST} is missing"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{MANIFEST} cannot be read ({type(error).__name__})"
    return ""


def _shared(path: Path, own: Collection[str]) -> str:
    """Return the digest of a checkpoint but for the files named in `own`, of which every host has its own."""
    if not own:
        return sha256_file(path / MANIFEST)
    files = json.loads((path / MANIFEST).read_text())["files"]
    shared = sorted((name, about["sha256"]) for name, about in files.items() if name not in own)
    return hashlib.sha256(json.dumps(shared).encode()).hexdigest()


def whole_checkpoints(
    folder: Path, *, check: bool = True, say: Callable[[str], None] | None = None, own: Collection[str] = ()
) -> dict[int, str]:
    """Return {step: digest} of the whole checkpoints below `folder`; a word through `say` for others.

    The digest is that of the manifest, or of all files but those in `own`.
    """
    found = {}
    for path in sorted(folder.glob("step-*")) if folder.is_dir() else []:
        name = _NAME.fullmatch(path.name)
        if not name:
            continue
        problem = why_not_whole(path, check=check)
        if not problem:
            found[int(name[1])] = _shared(path, own)
        elif say:
            say(f"checkpoint: {path} is not whole ({problem}): left aside")
    return found


def agree(folder: Path, world: World, say: Callable[[str], None], own: Collection[str] = ()) -> Path | None:
    """Find the newest checkpoint that any host has whole, give it to the hosts that lack it, and return its folder.

    In DDP one copy is enough, so a run outlives every host but one. Every rank must call this. `own`: files of which
    every host keeps its own; a host that has none gets another's.

    Raises:
        UserError: there are checkpoints, but none is whole.
    """
    mine = whole_checkpoints(folder, say=say if world.first_here else None, own=own)
    broken = folder.is_dir() and any(_NAME.fullmatch(path.name) for path in folder.iterdir()) and not mine
    everyone = world.gather((mine, broken))
    steps = [max(found) for found, _ in everyone if found]
    if not steps:
        if any(bad for _, bad in everyone):
            raise UserError(
                f"checkpoint: none in {folder} is whole, so the run cannot go on: "
                "restore one, or take another run name (or remove the folder) to start anew"
            )
        return None
    step = max(steps)
    owner = next(rank for rank, (found, _) in enumerate(everyone) if step in found)
    digest = everyone[owner][0][step]
    path = folder / f"step-{step:08d}"
    if any(found.get(step) != digest for found, _ in everyone):
        if world.rank == owner:
            say(f"checkpoint: step {step} is passed on to the hosts that lack it")
        _pass_on(path, owner, world, lacking=mine.get(step) != digest and world.first_here)
    return path


def _pass_on(path: Path, owner: int, world: World, *, lacking: bool) -> None:
    """Broadcast the files of a checkpoint from rank `owner`; hosts that lack it write it aside and rename it.

    Raises:
        UserError: this host's disk is full or cannot be written.
    """
    try:
        _receive(path, owner, world, lacking=lacking)
    except OSError as error:
        shutil.rmtree(path.with_name(f".tmp-{path.name}"), ignore_errors=True)
        raise DiskError(
            f"checkpoint: {path.name} could not be taken over from rank {owner}: "
            f"{disk_trouble(error) or error}: make room and start the run again"
        ) from error


def _receive(path: Path, owner: int, world: World, *, lacking: bool) -> None:
    listing: list[Any] = [None]
    if world.rank == owner:
        listing[0] = sorted((file.name, file.stat().st_size) for file in path.iterdir())
    dist.broadcast_object_list(listing, group=world.group, group_src=owner)
    aside = path.with_name(f".tmp-{path.name}")
    if lacking:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
    for name, size in listing[0]:
        source = (path / name).open("rb") if world.rank == owner else None
        target = (aside / name).open("wb") if lacking else None
        for start in range(0, size, _CHUNK):
            length = min(_CHUNK, size - start)
            data = torch.empty(length, dtype=torch.uint8)
            if source:
                data = torch.frombuffer(bytearray(source.read(length)), dtype=torch.uint8)
            data = data.to(world.device)
            dist.broadcast(data, group=world.group, group_src=owner)
            if target:
                target.write(data.cpu().numpy().tobytes())
        if source:
            source.close()
        if target:
            target.close()
    if lacking:
        sync_files(aside)
        shutil.rmtree(path, ignore_errors=True)
        aside.rename(path)
        sync_folder(path.parent)
    world.barrier()
