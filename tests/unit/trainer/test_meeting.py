"""How the workers of a galaxy meet in a store: stale cards, taken numbers, other sizes and specs, addresses that others cannot reach."""

import datetime
import itertools
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from tables import table

from trainer.__main__ import main
from trainer.common.errors import UserError
from trainer.distributed import meeting
from trainer.distributed.galaxy import Galaxy, parse_address
from trainer.distributed.meeting import Meeting, Worker, _follow, _lead, _Waiting, serve

NUMBERS = itertools.count()


@pytest.mark.parametrize(("peers", "address"), table("meeting")["flags"])
def test_flags(peers: str, address: tuple[str, int]) -> None:
    assert Galaxy.parse("3", "1", peers) == Galaxy(3, 1, *address)
    assert Galaxy.parse(None, None, None) == Galaxy.parse("1", "0", peers) == Galaxy.parse("1", None, None) == Galaxy()
    for flags, name in (
        ((None, "1", peers), "galaxy-size"),
        (("2", "2", peers), "world-rank"),
        (("2", "0", None), "initial-peers"),
        (("2", "0", "/ip4/0.0.0.0/tcp/1"), "initial-peers"),
        (("2", "0", "/ip6/::1/tcp/1"), "initial-peers"),
        (("2", "0", "h:99999"), "initial-peers"),
    ):
        with pytest.raises(UserError, match=rf"--hv\.{name}: got "):
            Galaxy.parse(*flags)
    assert parse_address("--host_maddrs", "/ip4/0.0.0.0/tcp/30001", any_host=True) == ("0.0.0.0", 30001)


def card(rank: int, galaxy: int = 2, **more: Any) -> Worker:
    fields: dict[str, Any] = {"ranks": 1, "host": f"host{rank}", "machine": f"m{rank}", "network": f"n{rank}", "pid": 1}
    fields |= {"address": f"10.0.0.{rank + 1}", "folder": "/r", "gpus": (), "nccl": False, "serves": False}
    return Worker(rank=rank, galaxy=galaxy, token=str(next(NUMBERS)), **(fields | more))


@pytest.fixture(scope="module")
def server() -> dist.TCPStore:
    store = serve("127.0.0.1", 0)
    assert store
    return store


@pytest.fixture
def keys(server: dist.TCPStore, request: pytest.FixtureRequest) -> Callable[[], Any]:
    """Return a connection of its own to the keys of this test."""
    limit = datetime.timedelta(seconds=10)

    def connect() -> Any:
        store = dist.TCPStore("127.0.0.1", server.port, None, False, timeout=limit, wait_for_workers=False)
        return dist.PrefixStore(request.node.name, store)

    return connect


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(meeting, "SILENCE", 1.0)
    monkeypatch.setattr(meeting, "_POLL", 0.02)
    monkeypatch.setattr(meeting, "_FIRST", 0.1)
    yield


class Part(threading.Thread):
    """A worker that meets the others in a thread; `found` is the generation and the workers, or the error."""

    def __init__(self, keys: Callable[[], Any], me: Worker, limit: float = 20.0) -> None:
        super().__init__(daemon=True)
        self.keys, self.me, self.limit, self.found = keys(), me, limit, Any
        self.hints, self.notes = dist.PrefixStore("hints", self.keys), set[str]()
        self.start()

    def run(self) -> None:
        meet, waiting = _follow if self.me.rank else _lead, _Waiting(self.limit, self.notes.add)
        try:
            self.found = meet(self.keys, self.hints, "spec", self.me, waiting)
        except UserError as error:
            self.found = error

    def result(self) -> Any:
        self.join(30)
        assert not self.is_alive()
        return self.found


@pytest.mark.slow
def test_workers_meet_in_any_order_and_again_after_all_were_killed(keys: Any) -> None:
    """A card of a killed worker, of the last start or of this one, is replaced."""
    generations = set()
    for turn in range(3):
        parts = [Part(keys, card(rank, 3)) for rank in ((2, 0, 1), (1, 2, 0), (0, 1, 2))[turn]]
        found = [part.result() for part in parts]
        assert len({generation for generation, _ in found}) == 1, found
        generations.add(found[0][0])
        for _, workers in found:
            assert list(workers) == sorted((part.me for part in parts), key=lambda worker: worker.rank)
    assert len(generations) == 3
    dead = card(1)
    lead = Part(keys, card(0))
    generation = until(lambda: meeting.text_of(lead.keys, "generation") not in generations and lead.notes)
    del generation
    current = meeting.text_of(lead.keys, "generation")
    lead.keys.set(f"{current}/card/1", dead.model_dump_json())
    worker = Part(keys, card(1))
    assert worker.result()[1] == lead.result()[1] == [lead.me, worker.me]


def until(true: Callable[[], Any]) -> Any:
    for _ in range(1000):
        if value := true():
            return value
        threading.Event().wait(0.01)
    raise AssertionError("in vain")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_number_that_is_taken_is_refused_by_name(keys: Any, rank: int) -> None:
    first = [Part(keys, card(place, 3)) for place in (0, 1)]
    until(lambda: any("worker 2 of 3" in note for note in first[0].notes))
    second = Part(keys, card(rank, 3, host="other", pid=77))
    taken = rf"--hv\.world-rank: {rank} is taken by worker {rank} .* on 'host{rank}', process 1: give"
    assert isinstance(error := second.result(), UserError)
    assert re.search(taken, str(error)), error
    third = Part(keys, card(2, 3))
    assert [part.result()[1] for part in first] == [third.result()[1]] * 2


def test_another_size_another_spec_and_the_limit_are_said(keys: Any, capsys: pytest.CaptureFixture[str]) -> None:
    lead, other = Part(keys, card(0, 3), 2.0), Part(keys, card(1, 2), 2.0)
    assert "-size: this worker has 2, but worker 0 (--hv.world-rank 0) on 'host0' has 3" in str(other.result())
    lead.hints.set("2", "else host9")
    waited = str(lead.result())
    assert "waited 2 s (collective_timeout) for workers 1, 2 of 3 (--hv.world-rank 1, 2)" in waited
    assert "worker 2 on 'host9' has another spec: give both the same options" in waited
    assert "waiting for worker 2 of 3 (--hv.world-rank 2)" in capsys.readouterr().out


def met(*workers: Worker, rank: int = 0) -> Meeting:
    return Meeting(Galaxy(len(workers), rank, "h", 1), workers, None, "")


def test_numbers_backend_folder_and_addresses_follow_from_the_cards() -> None:
    one = card(0, ranks=2, nccl=True, gpus=("a", "b"))
    two = card(1, ranks=1, nccl=True, gpus=("c",))
    both = met(one, two, rank=1)
    assert (both.first_rank, both.size, both.nccl, both.run_dir) == (2, 3, True, Path("/r"))
    assert not met(one, card(1, nccl=True, gpus=("b",))).nccl, "they share a GPU"
    assert not met(one, card(1)).nccl
    assert met(one, card(1, machine="m0"), rank=1).run_dir == Path("/r-worker1")
    met(one, two)._check()
    met(*(card(rank, network="n", address="127.0.0.1") for rank in (0, 1)))._check()
    with pytest.raises(UserError, match=r"--hv.initial-peers: worker 0 .* names 127.0.0.1, where worker 1 .* cannot"):
        met(card(0, address="127.0.0.1"), two)._check()
    with pytest.raises(UserError, match="the store has no card of a worker, but 'x'"):
        Worker.read("x")


def test_a_store_refuses_an_address_it_cannot_have(server: dist.TCPStore, capsys: pytest.CaptureFixture[str]) -> None:
    for address in ("/ip4/203.0.113.9/tcp/30001", f"/ip4/127.0.0.1/tcp/{server.port}"):
        assert main(["store", "--identity_path", "key.pem", "--host_maddrs", address]) == 2
        assert "--host_maddrs: " in capsys.readouterr().err
    assert main(["store"]) == 2 and "--host_maddrs: got " in capsys.readouterr().err
