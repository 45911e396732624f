"""Checkpoints that are whole or not there: written aside, fsynced, renamed; every host keeps its own copy, or its own part."""

import contextlib
import hashlib
import json
import re
import shutil
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from trainer.distributed.world import World
from trainer.errors import DiskError, UserError, disk_trouble
from trainer.files import sha256_file, sync_files, sync_folder
from trainer.strategy.base import Strategy, Writing

MANIFEST = "manifest.json"
STATE = "state.json"
Files = dict[str, dict[str, Any]]  # name -> its bytes and sha256
_NAME = re.compile(r"step-(\d{8})")
_CHUNK = 64 << 20  # bytes of one broadcast when a host is given a checkpoint


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.1f} MB"


def write_checkpoint(folder: Path, step: int, state: dict[str, Any], save: Callable[[Path], object], keep: int) -> Path:
    """Write the checkpoint of `step` below `folder` and drop all but the newest `keep` whole ones.

    Raises:
        UserError: the disk is full or cannot be written; what was half written is gone, older checkpoints are as they were.
    """
    with _writing(folder, step):
        aside = _open(folder, step)
        save(aside)
        (aside / STATE).write_text(json.dumps({"step": step} | state))
        final = _seal(folder, step, {"files": _contents(aside)})
    _drop_old(folder, step, keep)
    return final


@contextlib.contextmanager
def _writing(folder: Path, step: int) -> Iterator[None]:
    """Take away what was half written, and say plainly what a disk refused."""
    try:
        yield
    except Exception as error:
        shutil.rmtree(folder / f".tmp-step-{step:08d}", ignore_errors=True)
        if not isinstance(error, UserError) and (isinstance(error, OSError) or disk_trouble(error)):
            raise _unwritten(folder, step, error) from error
        raise


def _open(folder: Path, step: int) -> Path:
    """Make the folder that a checkpoint is written into, aside of the whole ones."""
    folder.mkdir(parents=True, exist_ok=True)
    for left in folder.glob(".tmp-*"):
        shutil.rmtree(left)
    aside = folder / f".tmp-step-{step:08d}"
    aside.mkdir()
    return aside


def _contents(aside: Path) -> Files:
    return {file.name: {"bytes": file.stat().st_size, "sha256": sha256_file(file)} for file in sorted(aside.iterdir())}


def _seal(folder: Path, step: int, manifest: dict[str, Any]) -> Path:
    """Make what was written aside a checkpoint."""
    final, aside = folder / f"step-{step:08d}", folder / f".tmp-step-{step:08d}"
    (aside / MANIFEST).write_text(json.dumps({"step": step} | manifest))
    sync_files(aside)
    if final.exists():
        shutil.rmtree(final)
    aside.rename(final)
    sync_folder(folder)
    return final


def _drop_old(folder: Path, step: int, keep: int) -> None:
    # A later one is damaged, or this run would have gone on from it: it must not push a whole one out.
    for old in sorted(old for old in whole_checkpoints(folder, check=False) if old <= step)[:-keep]:
        shutil.rmtree(folder / f"step-{old:08d}")


class Saver:
    """Writes a run's checkpoints as its strategy does: at once, or in parts beside the training. Every rank has one."""

    def __init__(self, folder: Path, keep: int, world: World, strategy: Strategy) -> None:
        self._folder, self._keep, self._world, self._strategy = folder, keep, world, strategy
        self._parts: tuple[int, dict[str, Any], Writing] | None = None

    def save(self, step: int, state: dict[str, Any]) -> None:
        """Write the checkpoint of `step`, or begin to. Raises UserError as write_checkpoint does."""
        self.finish()
        if self._strategy.sharded_checkpoint:
            if self._world.first_here:
                with _writing(self._folder, step):
                    _open(self._folder, step)
            self._world.barrier()
            writing = self._strategy.save(self._folder / f".tmp-step-{step:08d}")
            assert writing
            self._parts = step, state, writing
        elif self._world.first_here:
            write_checkpoint(self._folder, step, state, self._strategy.save, self._keep)
        elif self._strategy.lockstep:
            self._strategy.save(self._folder)

    def written(self) -> bool:
        """Tell whether this rank's part of the checkpoint that was begun is on its disk."""
        return self._parts is not None and self._parts[2].done()

    def finish(self) -> None:
        """Wait for the checkpoint that was begun, if any, and make it count. Every rank calls it, at the same step."""
        if not self._parts:
            return
        step, state, writing = self._parts
        self._parts = None
        aside = self._folder / f".tmp-step-{step:08d}"
        with _writing(self._folder, step):
            writing.finish()
            here: Files = {}
            if self._world.first_here:
                (aside / STATE).write_text(json.dumps({"step": step} | state))
                here = _contents(aside)
            everyone = self._world.gather((self._world.node_rank, here))
            if self._world.first_here:
                all_files = {name: about for _, files in everyone for name, about in files.items()}
                elsewhere = {name: about for name, about in sorted(all_files.items()) if name not in here}
                ranks = [rank for rank, (node, _) in enumerate(everyone) if node == self._world.node_rank]
                _seal(self._folder, step, {"files": here, "elsewhere": elsewhere, "ranks": ranks})
        # No host may drop an older one while another could still lose its part of this one.
        self._world.barrier()
        if self._world.first_here:
            _drop_old(self._folder, step, self._keep)


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


def whole_checkpoints(
    folder: Path, *, check: bool = True, say: Callable[[str], None] | None = None, own: Collection[str] = ()
) -> dict[int, str]:
    """Return {step: digest} of the checkpoints below `folder` of which all is there that this host keeps.

    The digest is that of all its files, on whatever host, but those in `own`. A word through `say` for others.
    """
    found = {}
    for path in sorted(folder.glob("step-*")) if folder.is_dir() else []:
        name = _NAME.fullmatch(path.name)
        if not name:
            continue
        problem = why_not_whole(path, check=check)
        if not problem:
            found[int(name[1])] = Kept.read(path, own).digest
        elif say:
            say(f"checkpoint: {path} is not whole ({problem}): left aside")
    return found


@dataclass(frozen=True)
class Kept:
    """What one host keeps of a checkpoint: all of it, or the part that its ranks own."""

    here: Files
    elsewhere: Files
    ranks: tuple[int, ...] = ()  # those that wrote this part; none, if it is the whole for any rank
    own: frozenset[str] = frozenset()  # files that are not the same on every host

    @classmethod
    def read(cls, path: Path, own: Collection[str] = ()) -> "Kept":
        manifest = json.loads((path / MANIFEST).read_text())
        ranks = tuple(manifest.get("ranks", ()))
        return cls(manifest["files"], manifest.get("elsewhere", {}), ranks, frozenset(own))

    @property
    def all_files(self) -> Files:
        return self.here | self.elsewhere

    @property
    def digest(self) -> str:
        """The same on every host."""
        same = {name: about for name, about in self.all_files.items() if name not in self.own}
        return hashlib.sha256(json.dumps(same, sort_keys=True).encode()).hexdigest()


def agree(folder: Path, world: World, say: Callable[[str], None], own: Collection[str] = ()) -> Path | None:
    """Find the newest checkpoint that the hosts have whole between them, give each what it lacks, and return its folder.

    In DDP one copy is enough, so a run outlives every host but one. Of one in parts every part must be there; the hosts
    keep to their own while the ranks are where they were, else each is given all. Every rank must call this. `own`: files
    of which every host keeps its own; a host that has none gets another's.

    Raises:
        UserError: there are checkpoints, but none is whole.
    """
    mine = whole_checkpoints(folder, say=say if world.first_here else None, own=own)
    broken = folder.is_dir() and any(_NAME.fullmatch(path.name) for path in folder.iterdir()) and not mine
    everyone = world.gather(({step: Kept.read(folder / f"step-{step:08d}", own) for step in mine}, broken))
    for step, digest in _newest_first([found for found, _ in everyone]):
        holders = [kept if (kept := found.get(step)) and kept.digest == digest else None for found, _ in everyone]
        owners = _owners(holders)
        if lost := sorted(name for name, owner in owners.items() if owner is None):
            if world.rank == 0:
                say(f"checkpoint: no host here has {', '.join(lost)} of step {step}: left aside")
            continue
        path = folder / f"step-{step:08d}"
        if not _in_place(holders):
            if world.rank == min(owner for owner in owners.values() if owner is not None):
                say(f"checkpoint: step {step} is passed on to the hosts that lack it")
            _pass_on(path, holders, world)
        return path
    if any(found or bad for found, bad in everyone):
        raise UserError(
            f"checkpoint: none in {folder} is whole, so the run cannot go on: "
            "restore one, or take another run name (or remove the folder) to start anew"
        )
    return None


def _newest_first(everyone: list[dict[int, Kept]]) -> list[tuple[int, str]]:
    """Return every (step, digest) that a rank has, the newest step first, and of one step that of the lowest rank."""
    found = {(step, kept.digest): None for kepts in everyone for step, kept in kepts.items()}
    return sorted(found, key=lambda entry: -entry[0])


def _owners(holders: Sequence[Kept | None]) -> dict[str, int | None]:
    """Return for every file of a checkpoint the lowest rank that has it, None if none has."""
    owners: dict[str, int | None] = {}
    for rank, kept in enumerate(holders):
        for name in kept.all_files if kept else ():
            if owners.get(name) is None:
                owners[name] = rank if kept and name in kept.here else None
    return owners


def _in_place(holders: Sequence[Kept | None]) -> bool:
    """Tell whether every rank finds on its host what it needs: all there is, or the part that the same rank wrote."""
    if all(kept and not kept.elsewhere for kept in holders):
        return True
    wrote = {rank for kept in holders if kept for rank in kept.ranks}
    return wrote == set(range(len(holders))) and all(kept and rank in kept.ranks for rank, kept in enumerate(holders))


def _pass_on(path: Path, holders: Sequence[Kept | None], world: World) -> None:
    """Broadcast the files of a checkpoint from those who have them; hosts that lack any write all aside and rename it.

    Raises:
        UserError: this host's disk is full or cannot be written.
    """
    try:
        _receive(path, holders, world)
    except OSError as error:
        shutil.rmtree(path.with_name(f".tmp-{path.name}"), ignore_errors=True)
        raise DiskError(
            f"checkpoint: {path.name} could not be taken over from its peers: "
            f"{disk_trouble(error) or error}: make room and start the run again"
        ) from error


def _receive(path: Path, holders: Sequence[Kept | None], world: World) -> None:
    all_files = next(kept for kept in holders if kept).all_files
    owners, kept = _owners(holders), holders[world.rank]
    lacking = world.first_here and (kept is None or bool(kept.elsewhere))
    aside = path.with_name(f".tmp-{path.name}")
    if lacking:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
    for name, about in sorted(all_files.items()):
        owner = owners[name]
        source = (path / name).open("rb") if world.rank == owner else None
        target = (aside / name).open("wb") if lacking else None
        for start in range(0, about["bytes"], _CHUNK):
            length = min(_CHUNK, about["bytes"] - start)
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
    # Nobody's part may go before everybody has it.
    world.barrier()
    if lacking:
        step = int(path.name.rpartition("-")[2])
        (aside / MANIFEST).write_text(json.dumps({"step": step, "files": all_files}))
        sync_files(aside)
        shutil.rmtree(path, ignore_errors=True)
        aside.rename(path)
        sync_folder(path.parent)
    world.barrier()
