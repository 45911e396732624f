"""Copies of a pipeline's checkpoint: every rank sends the file of its stage to the next host, in the background.

So the hosts together hold a complete checkpoint after the loss of one of them. If the network is too slow for that, it is given up.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from trainer.distributed import COPY_STAGES

if TYPE_CHECKING:
    from trainer.distributed.world import World

_CHUNK = 16 << 20  # bytes of one message
_PATIENCE = 10.0  # s that the next checkpoint, or the end of the run, waits for copies


def stage_file(number: int) -> str:
    return f"stage-{number:05d}.safetensors"


def transfers(
    nodes: Sequence[int], leaders: Sequence[bool], sizes: Sequence[int], free: Sequence[int]
) -> list[tuple[int, int]]:
    """Return (rank that sends its file, rank that writes it) for every copy, in an order that all ranks keep.

    Args:
        nodes: the host of every rank.
        leaders: whether the rank is the first of its host, which writes copies.
        sizes: bytes of the rank's file; 0 if it has none.
        free: free bytes of the rank's disk. A host receives nothing that would fill half of them.
    """
    order = sorted(set(nodes))
    first = {node: rank for rank, (node, leads) in enumerate(zip(nodes, leaders, strict=True)) if leads}
    found: list[tuple[int, int, int]] = []
    for place, node in enumerate(order):
        target = first[order[(place + 1) % len(order)]]
        sources = [rank for rank, where in enumerate(nodes) if where == node and sizes[rank]]
        if len(order) > 1 and 2 * sum(sizes[rank] for rank in sources) <= free[target]:
            found += [(place % 2, rank, target) for rank in sources]
    # Every second host sends first: these copies travel at the same time.
    return [(source, target) for _, source, target in sorted(found)]


class StageCopies:
    """Sends and receives the copies of one checkpoint after the other in a thread. One per rank."""

    def __init__(self, world: World) -> None:
        """Every rank calls it. Ranks copy where the run may continue with fewer hosts."""
        self._active = all(world.gather(os.environ.get(COPY_STAGES) == "1")) and world.size > 1
        self._world = world.with_untimed_group() if self._active else world
        self._given_up = False
        self._thread: threading.Thread | None = None

    def start(self, folder: Path, size: int) -> None:
        """Copy the files of all ranks. Every rank calls it; `size`: bytes of its file in `folder`, 0 if it could not be written."""
        if not self._active:
            return
        world = self._world
        everyone = world.gather([world.node_rank, world.is_host_leader, size, shutil.disk_usage(folder).free])
        nodes, leaders, self._sizes, free = zip(*everyone, strict=True)
        self._folder, self._transfers = folder, transfers(nodes, leaders, self._sizes, free)
        self._thread = threading.Thread(target=self._run, name="copies of a checkpoint", daemon=True)
        self._thread.start()

    def done(self) -> bool:
        return not self._thread or not self._thread.is_alive()

    def finish(self) -> None:
        """Wait for the copies, or give up those of this and all later checkpoints. Every rank calls it at the same step."""
        if not self._thread:
            return
        self._thread.join(_PATIENCE)
        if any(self._world.gather(self._thread.is_alive())):
            self._given_up, self._active = True, False
            if self._world.rank == 0:
                print(
                    "checkpoint: the network is too slow to copy the layers of every host to the next one, so these copies are given "
                    "up: later checkpoints are incomplete after the loss of a host"
                )
        self._thread.join()
        self._thread = None

    def _run(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loss of a peer, which the training reports
            for source, target in self._transfers:
                if self._world.rank == source:
                    self._send(target)
                elif self._world.rank == target:
                    self._receive(source)

    def _send(self, target: int) -> None:
        """Send the file in parts. A number before each tells whether it follows."""
        with contextlib.ExitStack() as files:
            file = None
            for start in range(0, self._sizes[self._world.rank], _CHUNK):
                part = b""
                with contextlib.suppress(OSError):
                    file = file or files.enter_context((self._folder / stage_file(self._world.rank)).open("rb"))
                    part = b"" if self._given_up else file.read(_CHUNK)
                length = min(_CHUNK, self._sizes[self._world.rank] - start)
                follows = len(part) == length
                dist.send(torch.tensor([int(follows)]), target, group=self._world.untimed_group)
                if not follows:
                    return
                dist.send(torch.frombuffer(bytearray(part), dtype=torch.uint8), target, group=self._world.untimed_group)

    def _receive(self, source: int) -> None:
        path, size = self._folder / stage_file(source), self._sizes[source]
        aside = path.with_suffix(".part")
        complete = False
        try:
            with contextlib.ExitStack() as files:
                file = None
                writable = True
                for start in range(0, size, _CHUNK):
                    follows = torch.zeros(1, dtype=torch.int64)
                    dist.recv(follows, source, group=self._world.untimed_group)
                    if not follows.item():
                        return
                    part = torch.empty(min(_CHUNK, size - start), dtype=torch.uint8)
                    dist.recv(part, source, group=self._world.untimed_group)
                    if not writable:
                        continue  # the sender does not know
                    try:
                        file = file or files.enter_context(aside.open("wb"))
                        file.write(part.numpy().data)
                    except OSError:
                        writable = False
            complete = writable
        except OSError:  # of the last bytes, when the file is closed
            complete = False
        finally:
            with contextlib.suppress(OSError):
                if complete:
                    aside.rename(path)
                else:
                    aside.unlink(missing_ok=True)
