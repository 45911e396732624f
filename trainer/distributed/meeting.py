"""How the workers of a galaxy find each other: in torch's TCPStore, below the digest of their spec.

Worker 0 begins a generation, which is one start of the run. The others enter it, each with a card. A worker that waits raises a counter, so
that cards of workers which were killed delay nobody. The store has text and JSON only, and nothing of it is unpickled.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import itertools
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from trainer.common.errors import UserError, first_line
from trainer.common.formats import clock, quoted
from trainer.distributed import SHARED_GPUS
from trainer.distributed.galaxy import Galaxy
from trainer.distributed.store import launcher_store
from trainer.supervise.interface import interface_of, source_address

SILENCE = 10.0  # s without a sign of life after which a worker is dead
CONNECT_LIMIT = 5.0  # s for the store to accept a connection
ANSWER_LIMIT = datetime.timedelta(seconds=SILENCE)
ENDED = "ended"  # what replaces the counter of a worker that has ended
_FIRST, _AGAIN = 3.0, 30.0  # s until a worker says for what it waits, and until it says so again
_POLL = 0.25
_TEXT = Annotated[str, Field(max_length=4096)]


class Worker(BaseModel):
    """The card of a worker: what the others know of it.

    `ranks`: their number. `machine`, `network`: equal for workers with the same processes and with the same loopback. `address`: from
    which it reaches the store. `gpus`: UUIDs of the GPUs of its ranks. `nccl`: whether each rank has one of its own.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    rank: Annotated[int, Field(ge=0, lt=1_000_000)]
    galaxy: Annotated[int, Field(ge=2, lt=1_000_000)]
    ranks: Annotated[int, Field(ge=1, lt=100_000)]
    host: _TEXT
    machine: _TEXT
    network: _TEXT
    pid: Annotated[int, Field(ge=1)]
    address: _TEXT
    folder: _TEXT
    gpus: Annotated[tuple[_TEXT, ...], Field(max_length=1000)]
    nccl: bool
    serves: bool
    token: _TEXT

    @classmethod
    def here(cls, galaxy: Galaxy, address: str, run_dir: Path, *, serves: bool) -> Worker:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        ranks, count = int(os.environ.get("WORLD_SIZE", "1")), torch.cuda.device_count()
        return cls(
            rank=galaxy.rank,
            galaxy=galaxy.size,
            ranks=ranks,
            host=socket.gethostname(),
            machine=f"{boot} {Path('/proc/self/ns/pid').readlink()}",
            network=f"{boot} {Path('/proc/self/ns/net').readlink()}",
            pid=os.getpid(),
            address=source_address(address),
            folder=str(run_dir.resolve()),
            gpus=tuple(str(torch.cuda.get_device_properties(place).uuid) for place in range(min(ranks, count))),
            nccl=0 < ranks <= count and os.environ.get(SHARED_GPUS) != "1",
            serves=serves,
            token=secrets.token_hex(8),
        )

    @classmethod
    def read(cls, text: str) -> Worker:
        """Return the worker of a card. Raises UserError."""
        try:
            return cls.model_validate_json(text)
        except ValidationError:
            raise UserError(
                f"--hv.initial-peers: the store has no card of a worker, but {quoted(text)}: name another port"
            ) from None

    def __str__(self) -> str:
        return f"worker {self.rank} (--hv.world-rank {self.rank}) on {quoted(self.host)}"


@dataclass(frozen=True)
class Meeting:
    """The workers of a galaxy that have met, by rank, and the store in which they did. `keys` begin with the generation."""

    galaxy: Galaxy
    workers: Sequence[Worker]
    keys: Any
    prefix: str

    @classmethod
    def find(cls, galaxy: Galaxy, digest: str, run_dir: Path, limit: float, note: Callable[[str], None]) -> Meeting:
        """Wait until all workers are there. Every rank calls it; the first one of a torchrun meets the other workers.

        `digest`: that of the spec. `limit`: seconds to wait. `note`: called with what this rank waits for. Raises
        UserError: a worker does not come, its number is taken, or the workers cannot reach each other.
        """
        rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        attempt = f"galaxy/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        local = launcher_store(rank, size, datetime.timedelta(seconds=limit)) if size > 1 else None
        if rank == 0:
            store, prefix, workers = _meet(galaxy, digest, run_dir, _Waiting(limit, note))
            if local:
                local.set(attempt, json.dumps([prefix, *(worker.model_dump_json() for worker in workers)]))
        else:
            assert local
            note("waiting for the other workers")
            prefix, *cards = json.loads(local.get(attempt))
            store, workers = connect(galaxy), [Worker.read(card) for card in cards]
        met = cls(galaxy, workers, dist.PrefixStore(prefix, store), prefix)
        met._check()
        return met

    @property
    def me(self) -> Worker:
        return self.workers[self.galaxy.rank]

    @property
    def first_rank(self) -> int:
        return sum(worker.ranks for worker in self.workers[: self.galaxy.rank])

    @property
    def size(self) -> int:
        return sum(worker.ranks for worker in self.workers)

    @cached_property
    def nccl(self) -> bool:
        gpus = [uuid for worker in self.workers for uuid in worker.gpus]
        return all(worker.nccl for worker in self.workers) and len(set(gpus)) == len(gpus)

    @property
    def run_dir(self) -> Path:
        """The folder of this worker's records. Workers that name the same one on a machine have a folder each."""
        me, path = self.me, Path(self.me.folder)
        same = any((one.machine, one.folder) == (me.machine, me.folder) for one in self.workers[: me.rank])
        return path.with_name(f"{path.name}-worker{me.rank}") if same else path

    def set_environment(self) -> None:
        """Number this rank over all workers, and name the interface of NCCL and gloo: the one on the route to the store."""
        numbers = {"RANK": self.first_rank + int(os.environ.get("RANK", "0"))}
        numbers |= {"WORLD_SIZE": self.size, "GROUP_RANK": self.me.rank}
        os.environ.update({name: str(number) for name, number in numbers.items()})
        if found := interface_of(self.me.address):
            for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
                os.environ.setdefault(name, found)

    def _check(self) -> None:
        """Check that every worker has an address that the others reach. Raises UserError."""
        for one in self.workers:
            apart = next((other for other in self.workers if other.network != one.network), None)
            if apart and one.address.startswith("127."):
                raise UserError(
                    f"--hv.initial-peers: {one} names {one.address}, where {apart} cannot reach it: give every worker the "
                    "address that the machine of the store has in the network of all"
                )


class _Waiting:
    """Says for what this worker waits: soon, at every change, and every 30 s."""

    def __init__(self, limit: float, note: Callable[[str], None]) -> None:
        self._limit, self._note, self._began = limit, note, time.monotonic()
        self._said, self._next = "", 0.0

    def __call__(self, what: str) -> None:
        """Wait a moment for `what`. Raises UserError at the limit."""
        now = time.monotonic()
        left = self._began + self._limit - now
        if left < 0:
            raise UserError(
                f"waited {self._limit:g} s (collective_timeout) for {what}: start it, and this worker again"
            )
        if now - self._began >= _FIRST and (what != self._said or now >= self._next):
            print(f"waiting for {what}, for {clock(left)} at most", flush=True)
            self._said, self._next = what, now + _AGAIN
        self._note(f"waiting for {what}")
        time.sleep(_POLL)


class _Signs:
    def __init__(self, keys: Any, me: Worker) -> None:
        self._keys, self._me, self._seen = keys, me, dict[str, tuple[str, float, bool]]()

    def lives(self, generation: str, worker: Worker) -> bool | None:
        """Return whether a worker lives; None as long as that is unknown."""
        if worker.machine == self._me.machine and not Path(f"/proc/{worker.pid}").exists():
            return False
        value, now = text_of(self._keys, f"{generation}/beat/{worker.rank}"), time.monotonic()
        if value == ENDED:
            return False
        before = self._seen.get(worker.token)
        if before is None or before[0] != value:
            self._seen[worker.token] = value, now, before is not None
        _, since, changed = self._seen[worker.token]
        return False if now - since > SILENCE else changed or None


# The store ------------------------------------------------------------------------------------------------------------


def text_of(keys: Any, key: str) -> str:
    """Return the text of a key; empty if there is none."""
    return keys.get(key).decode(errors="replace") if keys.check([key]) else ""


def _swap(keys: Any, key: str, before: str, value: str) -> str:
    """Set a key that is `before`; return the text that it then has."""
    return keys.compare_set(key, before, value).decode(errors="replace")  # type: ignore[no-any-return]


def connect(galaxy: Galaxy) -> dist.TCPStore:
    try:
        return dist.TCPStore(_resolve(galaxy), galaxy.port, None, False, timeout=ANSWER_LIMIT, wait_for_workers=False)
    except RuntimeError as error:
        raise UserError(f"--hv.initial-peers: no store answers at {galaxy.peer}: {first_line(error)}") from None


def serve(host: str, port: int) -> dist.TCPStore | None:
    """Serve a store at an address of this machine, and nowhere else; return None if it is not, or another program has the port.

    Raises OSError.
    """
    try:
        server = socket.create_server((host, port), backlog=socket.SOMAXCONN)
    except OSError as error:
        if error.errno in (errno.EADDRNOTAVAIL, errno.EADDRINUSE):
            return None
        raise
    return dist.TCPStore(
        host, port, None, True, timeout=ANSWER_LIMIT, wait_for_workers=False, master_listen_fd=server.detach()
    )


def _resolve(galaxy: Galaxy) -> str:
    """Return the IPv4 address of the store. Raises UserError."""
    try:
        return str(socket.getaddrinfo(galaxy.host, None, socket.AF_INET)[0][4][0])
    except OSError as error:
        raise UserError(f"--hv.initial-peers: {galaxy.host} has no address: {error.strerror or error}") from None


def _open(galaxy: Galaxy, waiting: _Waiting) -> tuple[dist.TCPStore, bool]:
    """Connect to the store, or serve it if nothing listens there and the address is this machine's; return it, and whether it is served.

    Raises UserError.
    """
    address = _resolve(galaxy)
    while True:
        with contextlib.suppress(OSError):
            socket.create_connection((address, galaxy.port), timeout=CONNECT_LIMIT).close()
            return _connected(galaxy, waiting), False
        try:
            if store := serve(address, galaxy.port):
                return store, True
        except OSError as error:
            raise UserError(f"--hv.initial-peers: cannot listen on {galaxy.peer}: {error.strerror or error}") from None
        only = ", which only this machine reaches" if address.startswith("127.") else ""
        waiting(f"the store at {galaxy.peer}{only}, which a worker there serves, or `python -m trainer store`")


def _connected(galaxy: Galaxy, waiting: _Waiting) -> dist.TCPStore:
    """Return a connection to the store; a program that is no store may never answer."""
    found: list[dist.TCPStore | UserError] = []

    def begin() -> None:
        try:
            found.append(connect(galaxy))
        except UserError as error:
            found.append(error)

    threading.Thread(target=begin, daemon=True).start()
    while not found:
        waiting(f"an answer at {galaxy.peer}")
    if isinstance(found[0], UserError):
        raise found[0]
    return found[0]


# The protocol -----------------------------------------------------------------------------------------------------------


def _meet(galaxy: Galaxy, digest: str, run_dir: Path, waiting: _Waiting) -> tuple[dist.TCPStore, str, Sequence[Worker]]:
    """Meet the other workers; return the store, the prefix of the generation, and all workers. Raises UserError."""
    store, serves = _open(galaxy, waiting)
    prefix = f"trainyard/{digest}"
    keys, hints = dist.PrefixStore(prefix, store), dist.PrefixStore("trainyard/newest", store)
    me = Worker.here(galaxy, _resolve(galaxy), run_dir, serves=serves)
    try:
        hints.set(str(galaxy.rank), f"{digest} {me.host}")
        generation, workers = (_follow if galaxy.rank else _lead)(keys, hints, digest, me, waiting)
    except RuntimeError as error:
        raise UserError(
            f"the store at {galaxy.peer} ended while this worker waited ({first_line(error)}): start this worker again"
        ) from None
    if any(worker.rank != rank for rank, worker in enumerate(workers)) or len(workers) != galaxy.size:
        raise UserError(f"--hv.initial-peers: the store at {galaxy.peer} has other workers than those of this galaxy")
    others = ", ".join(str(worker) for worker in workers if worker.rank != galaxy.rank)
    print(f"worker {galaxy.rank} of {galaxy.size} has met {others}", flush=True)
    return store, f"{prefix}/{generation}", workers


def _lead(keys: Any, hints: Any, digest: str, me: Worker, waiting: _Waiting) -> tuple[str, Sequence[Worker]]:
    generation, signs, beats = secrets.token_hex(4), _Signs(keys, me), itertools.count()
    keys.set(f"{generation}/card/0", me.model_dump_json())
    keys.set(f"{generation}/failed/0", "")
    keys.set(f"{generation}/beat/0", f"{me.token} {next(beats)}")
    before = ""
    while (found := _swap(keys, "generation", before, generation)) != generation:
        before = found
        earlier = Worker.read(text_of(keys, f"{before}/card/0"))
        while (lives := signs.lives(before, earlier)) is None:
            waiting(f"a sign of {earlier}, which began here before")
        if lives:
            raise _taken(earlier)
    while True:
        keys.set(f"{generation}/beat/0", f"{me.token} {next(beats)}")
        if (newer := text_of(keys, "generation")) != generation:
            raise _taken(Worker.read(text_of(keys, f"{newer}/card/0")))
        workers, missing = [me], []
        for rank in range(1, me.galaxy):
            card = text_of(keys, f"{generation}/card/{rank}")
            worker = Worker.read(card) if card else None
            if worker and signs.lives(generation, worker) is False:
                _swap(keys, f"{generation}/card/{rank}", card, "")
                worker = None
            if worker and text_of(keys, f"{generation}/beat/{rank}").startswith(worker.token):
                workers.append(worker)
            else:
                missing.append(rank)
        if not missing:
            keys.set(f"{generation}/workers", json.dumps([worker.model_dump_json() for worker in workers]))
            return generation, workers
        waiting(_missing(missing, hints, digest, me))


def _follow(keys: Any, hints: Any, digest: str, me: Worker, waiting: _Waiting) -> tuple[str, Sequence[Worker]]:
    """Enter the generation of worker 0, and wait until it has all workers. A dead worker's generation is left for the next one."""
    signs, beats, card = _Signs(keys, me), itertools.count(), me.model_dump_json()
    entered = before = ""
    while True:
        generation = text_of(keys, "generation")
        if generation != entered:
            before, entered = (before if generation == entered else ""), ""
        if generation and not entered and not keys.check([f"{generation}/workers"]):
            found = _swap(keys, f"{generation}/card/{me.rank}", before, card)
            if found == card:
                entered = generation
                keys.set(f"{entered}/failed/{me.rank}", "")
            elif found:
                lives = signs.lives(generation, holder := Worker.read(found))
                if lives:
                    raise _taken(holder)
                before = found if lives is False else ""
        elif generation and not entered:
            holder = Worker.read(text_of(keys, f"{generation}/card/{me.rank}") or card)
            if holder.token != me.token and signs.lives(generation, holder):
                raise _taken(holder)
        if entered:
            keys.set(f"{entered}/beat/{me.rank}", f"{me.token} {next(beats)}")
            leader = Worker.read(text_of(keys, f"{entered}/card/0"))
            cards, lives = text_of(keys, f"{entered}/workers"), signs.lives(entered, leader)
            if leader.galaxy != me.galaxy and (cards or lives):
                raise UserError(f"--hv.galaxy-size: this worker has {me.galaxy}, but {leader} has {leader.galaxy}")
            if cards:
                workers = [Worker.read(each) for each in json.loads(cards)]
                if me in workers:
                    return entered, workers
                entered = ""
            elif lives:
                waiting(f"the rest of the {me.galaxy} workers, of which {leader} is here")
                continue
        waiting(_missing([0], hints, digest, me))


def _missing(ranks: Sequence[int], hints: Any, digest: str, me: Worker) -> str:
    """Return which workers do not come, and whether one of them is at this store with another spec."""
    several = ", ".join(map(str, ranks))
    text = f"worker{'s' if len(ranks) > 1 else ''} {several} of {me.galaxy} (--hv.world-rank {several})"
    for rank in ranks:
        other, _, host = text_of(hints, str(rank)).partition(" ")
        if other and other != digest:
            text += f"; worker {rank} on {quoted(host)} has another spec: give both the same options"
    return text


def _taken(worker: Worker) -> UserError:
    return UserError(
        f"--hv.world-rank: {worker.rank} is taken by {worker}, process {worker.pid}: give every worker another number from 0 to "
        f"{worker.galaxy - 1}"
    )
