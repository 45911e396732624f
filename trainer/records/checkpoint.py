"""Checkpoints: complete and finite, or absent. They are written aside, fsynced and renamed.

Every host keeps a full copy or its shards.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import shutil
import socket
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from trainer.common.errors import DiskError, UserError, disk_failure, first_line
from trainer.common.files import sha256_file, sync_files, sync_path, to_json
from trainer.common.finite import checkpoint_finite, require_finite_weights

if TYPE_CHECKING:
    from trainer.strategy.base import Strategy, Writing
from trainer.distributed.world import World

MANIFEST = "manifest.json"
STATE = "state.json"
Files = dict[str, dict[str, Any]]  # file name -> its `bytes` and `sha256`
_NAME = re.compile(r"step-(\d{8})")
_MANIFEST_LIMIT = 4 << 20  # bytes
_NOT_FINITE = "has weights that are not finite"
_CHUNK = 64 << 20  # bytes per broadcast when a host receives a checkpoint


def write_checkpoint(
    folder: Path, step: int, state: dict[str, Any], save: Callable[[Path], object], keep: int, *, verified: bool = False
) -> Path:
    """Write the checkpoint of `step` below `folder`, delete all but the newest `keep` complete ones, and return its folder.

    `state`: contents of state.json. `save`: writes all other files into the folder that it receives. `verified`: the
    weights are known to be finite; otherwise they are read from the files. Raises UserError: the weights are not
    finite; older checkpoints are unchanged; DiskError: the disk is full or not writable; incomplete files are deleted
    and older checkpoints are unchanged.
    """
    with _clean_up_on_error(folder, step):
        aside = _make_temporary(folder, step)
        save(aside)
        (aside / STATE).write_text(to_json({"step": step} | state), encoding="utf-8")
        files = _describe_files(aside)
        if not (verified or checkpoint_finite(aside, files)):
            raise UserError(
                f"checkpoint: the weights of step {step} are not finite: start a run with a lower lr under another run name"
            )
        final = _commit(folder, step, {"files": files})
    _delete_old(folder, step, keep)
    return final


def _temporary(folder: Path, step: int) -> Path:
    return folder / f".tmp-step-{step:08d}"


@contextlib.contextmanager
def _clean_up_on_error(folder: Path, step: int) -> Iterator[None]:
    """Delete incomplete files after an error, and raise disk errors as DiskError."""
    try:
        yield
    except Exception as error:
        shutil.rmtree(_temporary(folder, step), ignore_errors=True)
        if not isinstance(error, UserError) and (isinstance(error, OSError) or disk_failure(error)):
            raise _write_error(folder, step, error) from error
        raise


def _write_error(folder: Path, step: int, error: Exception) -> DiskError:
    free = shutil.disk_usage(folder).free if folder.exists() else 0
    reason = disk_failure(error) or first_line(error)
    kept = sorted(complete_checkpoints(folder, verify=False))
    older = f"the checkpoint of step {kept[-1]} remains" if kept else "there is no older checkpoint"
    return DiskError(
        f"checkpoint: cannot write step {step} to {folder}: {reason} ({free / 1e6:.1f} MB free); {older}: "
        "free disk space and start the run again to resume"
    )


def _make_temporary(folder: Path, step: int) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for leftover in folder.glob(".tmp-*"):
        shutil.rmtree(leftover)
    aside = _temporary(folder, step)
    aside.mkdir()
    return aside


def _describe_files(folder: Path) -> Files:
    return {file.name: {"bytes": file.stat().st_size, "sha256": sha256_file(file)} for file in sorted(folder.iterdir())}


def _commit(folder: Path, step: int, manifest: dict[str, Any]) -> Path:
    """Turn the temporary folder into the checkpoint of `step`. Its weights are known to be finite."""
    final, aside = folder / f"step-{step:08d}", _temporary(folder, step)
    (aside / MANIFEST).write_text(to_json({"step": step, "finite": True} | manifest), encoding="utf-8")
    sync_files(aside)
    if final.exists():
        shutil.rmtree(final)
    aside.rename(final)
    sync_path(folder)
    return final


def _delete_old(folder: Path, step: int, keep: int) -> None:
    # Ignore checkpoints of later steps: they are damaged, otherwise the run would have resumed from them.
    for old in sorted(old for old in complete_checkpoints(folder, verify=False) if old <= step)[:-keep]:
        shutil.rmtree(folder / f"step-{old:08d}")


class Saver:
    """Writes the checkpoints of a run as its strategy requires: at once, or as shards in the background. One per rank."""

    def __init__(self, folder: Path, keep: int, world: World, strategy: Strategy) -> None:
        self._folder, self._keep, self._world, self._strategy = folder, keep, world, strategy
        self._pending: tuple[dict[str, Any], Writing] | None = None

    def save(self, state: dict[str, Any]) -> None:
        """Write a checkpoint, or start writing it; `state` is the contents of state.json. Every rank calls it at the same step.

        Raises NonFiniteError: the weights of a rank are not finite; nothing is written, and older checkpoints remain;
        DiskError: the disk is full or not writable.
        """
        self.finish()
        step = state["step"]
        require_finite_weights(self._strategy, step)
        if self._strategy.sharded_checkpoint:
            if self._world.is_host_leader:
                with _clean_up_on_error(self._folder, step):
                    _make_temporary(self._folder, step)
            self._world.barrier()
            writing = self._strategy.save(_temporary(self._folder, step))
            assert writing
            self._pending = state, writing
        elif self._world.is_host_leader:
            write_checkpoint(self._folder, step, state, self._strategy.save, self._keep, verified=True)
        elif self._strategy.lockstep:
            self._strategy.save(self._folder)

    def written(self) -> bool:
        """Return whether this rank has written its shard of the pending checkpoint."""
        return self._pending is not None and self._pending[1].done()

    def finish(self) -> None:
        """Wait for the pending checkpoint, if any, and commit it. Every rank calls it at the same step.

        Raises DiskError: the disk of a host is full or not writable.
        """
        if not self._pending:
            return
        state, writing = self._pending
        self._pending = None
        step, world = state["step"], self._world
        aside = _temporary(self._folder, step)
        with _clean_up_on_error(self._folder, step):
            writing.finish()
            here: Files = {}
            if world.is_host_leader:
                (aside / STATE).write_text(to_json(state), encoding="utf-8")
                here = _describe_files(aside)
            all_hosts = world.gather((world.node_rank, here))
            if world.is_host_leader:
                all_files = {name: about for _, files in all_hosts for name, about in files.items()}
                elsewhere = {name: about for name, about in sorted(all_files.items()) if name not in here}
                ranks = [rank for rank, (node, _) in enumerate(all_hosts) if node == world.node_rank]
                _commit(self._folder, step, {"files": here, "elsewhere": elsewhere, "ranks": ranks})
        # No host deletes an older checkpoint while another can still fail to commit its shards of this one.
        world.barrier()
        if world.is_host_leader:
            _delete_old(self._folder, step, self._keep)


def find_defect(path: Path, *, verify: bool = True) -> str:
    """Return the defect of a checkpoint folder, or an empty string. `verify`: compare digests, not only sizes."""
    if not (path / MANIFEST).is_file():
        return f"{MANIFEST} is missing"
    try:
        with (path / MANIFEST).open("rb") as content:
            manifest = json.loads(content.read(_MANIFEST_LIMIT))
        for name, expected in manifest["files"].items():
            file = path / name
            if not file.exists():
                return f"{name} is missing"
            if (size := file.stat().st_size) != expected["bytes"]:
                return f"{name} has {size} of {expected['bytes']} bytes"
            if verify and sha256_file(file) != expected["sha256"]:
                return f"the contents of {name} are damaged"
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return f"{MANIFEST} is unreadable ({type(error).__name__})"
    return ""


def complete_checkpoints(
    folder: Path, *, verify: bool = True, log: Callable[[str], None] | None = None, per_host_files: Collection[str] = ()
) -> dict[int, str]:
    """Return {step: digest} of the checkpoints below `folder` of which this host has every file that it should have.

    Args:
        verify: compare digests, not only sizes, and ignore checkpoints with weights that are not finite.
        log: receives a line about every checkpoint that is ignored.
        per_host_files: files that differ between hosts; the digest covers all others, on whatever host they are.
    """
    found = {}
    for path in sorted(folder.glob("step-*")) if folder.is_dir() else []:
        name = _NAME.fullmatch(path.name)
        if not name:
            continue
        reason = _reason_to_ignore(path, verify=verify)
        if not reason:
            found[int(name[1])] = HostCheckpoint.read(path, per_host_files).digest
        elif log:
            log(f"checkpoint: {path} {reason}: ignored")
    return found


def _reason_to_ignore(path: Path, *, verify: bool = True) -> str:
    """Return why a checkpoint is not usable on this host, or an empty string."""
    if defect := find_defect(path, verify=verify):
        return f"is incomplete ({defect})"
    if not verify:
        return ""
    # Older versions wrote checkpoints without a check, and manifests without `finite`.
    manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
    return "" if manifest.get("finite") or checkpoint_finite(path, manifest["files"]) else _NOT_FINITE


@dataclass(frozen=True)
class HostCheckpoint:
    """The files that one host has of a checkpoint: all of them, or the shards of its ranks.

    `ranks`: those that wrote these shards; empty if the checkpoint is a full copy. `per_host_files`: files that differ
    between hosts.
    """

    here: Files
    elsewhere: Files
    ranks: tuple[int, ...] = ()
    per_host_files: frozenset[str] = frozenset()

    @classmethod
    def read(cls, path: Path, per_host_files: Collection[str] = ()) -> HostCheckpoint:
        """Read the manifest of the checkpoint folder `path`."""
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        ranks = tuple(manifest.get("ranks", ()))
        return cls(manifest["files"], manifest.get("elsewhere", {}), ranks, frozenset(per_host_files))

    def as_list(self) -> list[Any]:
        """Return the data that other ranks need, as JSON."""
        return [self.here, self.elsewhere, self.ranks]

    @classmethod
    def from_list(cls, fields: list[Any], per_host_files: Collection[str]) -> HostCheckpoint:
        """Return what `as_list` of another rank describes."""
        here, elsewhere, ranks = fields
        return cls(here, elsewhere, tuple(ranks), frozenset(per_host_files))

    @property
    def all_files(self) -> Files:
        """The files of the checkpoint on all hosts."""
        return self.here | self.elsewhere

    @property
    def digest(self) -> str:
        """The SHA-256 (hex) of the manifest entries that are the same on every host."""
        common = {name: about for name, about in self.all_files.items() if name not in self.per_host_files}
        return hashlib.sha256(json.dumps(common, sort_keys=True).encode()).hexdigest()


def find_checkpoint(
    folder: Path,
    world: World,
    log: Callable[[str], None],
    per_host_files: Collection[str] = (),
    differences: Callable[[Mapping[str, Any]], list[str]] = lambda spec: [],
) -> Path | None:
    """Return the folder of the newest finite checkpoint that the hosts together hold, after copying missing files to each host.

    A full copy on a single host suffices. Every shard of a sharded checkpoint must exist; hosts keep only their shards
    while the ranks are on the same hosts as before, otherwise every host receives all files. Every rank calls it.
    Returns the folder of the checkpoint, or None if there is none. `log`: receives a line about every checkpoint that
    is ignored or copied. `per_host_files`: files that differ between hosts; a host without them receives those of
    another. `differences`: returns those of the run's spec from that of a checkpoint. Raises UserError: a host has one
    of another spec; or there are checkpoints, but none is complete and finite; DiskError: the disk of this host is full
    or not writable.
    """
    steps = complete_checkpoints(folder, log=log if world.is_host_leader else None, per_host_files=per_host_files)
    local = {step: HostCheckpoint.read(folder / f"step-{step:08d}", per_host_files) for step in steps}
    damaged = folder.is_dir() and any(_NAME.fullmatch(path.name) for path in folder.iterdir()) and not local
    foreign = _foreign(folder, local, differences)
    gathered = world.gather(({step: copy.as_list() for step, copy in local.items()}, damaged, foreign))
    if foreign := next(filter(None, (each for *_, each in gathered)), ""):
        raise UserError(
            f"checkpoint: {foreign}: repeat the options with which that run was started, set another run name with run=, or "
            "delete its folder on that host"
        )
    all_hosts = [
        ({int(step): HostCheckpoint.from_list(copy, per_host_files) for step, copy in found.items()}, lacks)
        for found, lacks, _ in gathered
    ]
    # The newest step first, and for equal steps the lowest rank first.
    known = {(step, copy.digest): None for found, _ in all_hosts for step, copy in found.items()}
    for step, digest in sorted(known, key=lambda entry: -entry[0]):
        holders = [copy if (copy := found.get(step)) and copy.digest == digest else None for found, _ in all_hosts]
        owners = _owners(holders)
        if lost := sorted(name for name, owner in owners.items() if owner is None):
            if world.rank == 0:
                log(f"checkpoint: step {step} is incomplete (no host has {', '.join(lost)}): ignored")
            continue
        path = folder / f"step-{step:08d}"
        if not _in_place(holders):
            if world.rank == min(owner for owner in owners.values() if owner is not None):
                log(f"checkpoint: copying step {step} to the hosts that lack it")
            _distribute(path, holders, world)
        return path
    if any(found or damaged for found, damaged in all_hosts):
        diverged = any(_reason_to_ignore(path) == _NOT_FINITE for path in folder.glob("step-*"))
        raise UserError(
            f"checkpoint: none in {folder} is complete{' with finite weights' * diverged}, so the run cannot resume: "
            "restore one, or set another run name (or delete the folder) to start from step 0"
        )
    return None


def _foreign(folder: Path, steps: Iterable[int], differences: Callable[[Mapping[str, Any]], list[str]]) -> str:
    """Return which checkpoint of this host belongs to another spec, and the differences; an empty string if none does.

    Those of earlier versions have no spec; `check_owner` and the controller compare the spec.yml beside them.
    """
    for path in (folder / f"step-{step:08d}" for step in steps):
        spec = json.loads((path / STATE).read_text(encoding="utf-8")).get("spec")
        if spec and (changes := differences(spec)):
            return f"{path} on {socket.gethostname()} is of another spec ({'; '.join(changes)})"
    return ""


def _owners(holders: Sequence[HostCheckpoint | None]) -> dict[str, int | None]:
    """Return for every file of a checkpoint the lowest rank that has it, or None if no rank has it."""
    owners: dict[str, int | None] = {}
    for rank, copy in enumerate(holders):
        for name in copy.all_files if copy else ():
            if owners.get(name) is None:
                owners[name] = rank if copy and name in copy.here else None
    return owners


def _in_place(holders: Sequence[HostCheckpoint | None]) -> bool:
    """Return whether the host of every rank has the files that the rank needs: a full copy, or the shard it wrote."""
    if all(copy and not copy.elsewhere for copy in holders):
        return True
    writers = {rank for copy in holders if copy for rank in copy.ranks}
    return writers == set(range(len(holders))) and all(copy and rank in copy.ranks for rank, copy in enumerate(holders))


def _distribute(path: Path, holders: Sequence[HostCheckpoint | None], world: World) -> None:
    """Broadcast the files of a checkpoint from their owners; hosts that lack any of them write a full copy.

    Raises DiskError: the disk of this host is full or not writable.
    """
    try:
        _receive(path, holders, world)
    except OSError as error:
        shutil.rmtree(path.with_name(f".tmp-{path.name}"), ignore_errors=True)
        raise DiskError(
            f"checkpoint: cannot copy {path.name} from other hosts to {path.parent}: {disk_failure(error) or error}: "
            "free disk space and start the run again"
        ) from error


def _receive(path: Path, holders: Sequence[HostCheckpoint | None], world: World) -> None:
    all_files = next(copy for copy in holders if copy).all_files
    owners, local = _owners(holders), holders[world.rank]
    incomplete = world.is_host_leader and (local is None or bool(local.elsewhere))
    aside = path.with_name(f".tmp-{path.name}")
    if incomplete:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
    for name, about in sorted(all_files.items()):
        owner = owners[name]
        with contextlib.ExitStack() as files:
            source = files.enter_context((path / name).open("rb")) if world.rank == owner else None
            target = files.enter_context((aside / name).open("wb")) if incomplete else None
            for start in range(0, about["bytes"], _CHUNK):
                length = min(_CHUNK, about["bytes"] - start)
                data = torch.empty(length, dtype=torch.uint8)
                if source:
                    data = torch.frombuffer(bytearray(source.read(length)), dtype=torch.uint8)
                data = data.to(world.device)
                dist.broadcast(data, group=world.group, group_src=owner)
                if target:
                    target.write(data.cpu().numpy().tobytes())
    # No host replaces its shards before every host has received them.
    world.barrier()
    if incomplete:
        step = int(path.name.rpartition("-")[2])
        (aside / MANIFEST).write_text(to_json({"step": step, "finite": True, "files": all_files}), encoding="utf-8")
        sync_files(aside)
        shutil.rmtree(path, ignore_errors=True)
        aside.rename(path)
        sync_path(path.parent)
    world.barrier()
