"""Checkpoints of a queued run on their way to other hosts. The hosts are folders of this machine."""

import hashlib
import json
import shutil
import sys
import threading
from collections.abc import Collection
from pathlib import Path

import pytest

from trainer.spec import make_spec
from trainer.supervise.link_free import link_free
from trainyard.queue import carry
from trainyard.queue.carry import CheckpointCopy, CopyThread, newest_whole, on_hosts
from trainyard.remote.checkpoints import complete
from trainyard.wire.connection import Host, HostConnection, RemoteError
from trainyard.wire.openssh import LocalTransport

RUN = "r"
SHARDS = {"__0_0.distcp": b"first", "__1_0.distcp": b"second"}
COMMON = {".metadata": b"index", "state.json": b'{"step": 5}'}


class Hosts:
    """Three hosts, of which some do not answer."""

    def __init__(self, folder: Path) -> None:
        self.queue, self.lines = folder / "queue", list[str]()
        self.queue.mkdir()
        self.hosts = [Host(f"node{n}", "127.0.0.1", str(folder / f"node{n}"), sys.executable) for n in (1, 2, 3)]
        self.lost = set[str]()
        self.copy = CheckpointCopy(self.queue, RUN, self.connect, self.lines.append)

    def connect(self, name: str) -> HostConnection:
        host = next(host for host in self.hosts if host.name == name)
        transport = LocalTransport()
        if name in self.lost:
            transport.execute = lambda *_: (255, b"", b"unreachable")  # type: ignore[method-assign]
        return HostConnection(host, transport)

    def checkpoints(self, number: int) -> Path:
        return Path(self.hosts[number - 1].data_dir) / "runs" / RUN / "checkpoints"

    def write(self, number: int, step: int, names: Collection[str] = tuple(SHARDS), salt: bytes = b"") -> None:
        """Write what the trainer writes on a host: these shards of a checkpoint, all of them for a full copy."""
        contents = {name: text + salt for name, text in SHARDS.items()} | COMMON
        here = [*names, *COMMON]
        entries = {n: {"bytes": len(t), "sha256": hashlib.sha256(t).hexdigest()} for n, t in contents.items()}
        folder = self.checkpoints(number) / f"step-{step:08d}"
        folder.mkdir(parents=True)
        for name in here:
            (folder / name).write_bytes(contents[name])
        manifest = {"step": step, "finite": True, "files": {name: entries[name] for name in sorted(here)}}
        manifest |= {"elsewhere": {n: entry for n, entry in entries.items() if n not in here}, "ranks": [number - 1]}
        (folder / "manifest.json").write_text(json.dumps(manifest))

    def divide(self, step: int, salt: bytes = b"") -> None:
        """Write a checkpoint that is divided among the first two hosts."""
        for number, name in enumerate(SHARDS, 1):
            self.write(number, step, [name], salt)

    def carry(self, *numbers: int) -> str:
        """Carry to an allocation of these hosts."""
        return self.copy.carry([self.hosts[number - 1] for number in numbers], self.hosts)

    def full(self, number: int) -> list[str]:
        """Return the names of the full copies of a host; every content is what its manifest says."""
        found = []
        for step in complete(link_free(self.checkpoints(number))):
            folder = self.checkpoints(number) / step
            manifest = json.loads((folder / "manifest.json").read_text())
            for name, entry in manifest["files"].items():
                assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == entry["sha256"]
            if not manifest.get("elsewhere"):
                found.append(step)
        return found


@pytest.fixture
def hosts(tmp_path: Path) -> Hosts:
    return Hosts(tmp_path)


@pytest.mark.parametrize("allocation", [(3,), (2, 3)])
def test_shards_make_a_full_copy_on_other_hosts(allocation: tuple[int, ...], hosts: Hosts) -> None:
    hosts.divide(5)
    assert hosts.carry(*allocation) == "step-00000005"
    assert hosts.full(allocation[0]) == ["step-00000005"]


def test_the_decisions_of_the_ranks_go_along_with_the_checkpoint(hosts: Hosts) -> None:
    """Other hosts would decide differently, for example bfloat16 after float32."""
    hosts.divide(5)
    begun = make_spec({"run": RUN, "precision": "bf16-mixed", "batch_size": 2}, "the test").model_copy(
        update={"automatic": ()}
    )
    for number in (1, 2):
        (hosts.checkpoints(number).parent / "spec.yml").write_text(begun.to_yaml())
    assert hosts.copy.spec() is None
    assert hosts.carry(3) == "step-00000005" and hosts.copy.spec() == begun
    hosts.lost = {"node1", "node2"}
    assert hosts.carry(3) == "" and hosts.copy.spec() == begun  # a start on node3 failed before it had the spec
    (hosts.queue / "checkpoint/spec.yml").write_text("precision: [")
    assert hosts.copy.spec() is None and "decides its automatic fields anew" in hosts.lines[-1]


def test_hosts_that_have_all_shards_receive_nothing(hosts: Hosts) -> None:
    hosts.divide(5)
    assert hosts.carry(1, 2) == "" and not hosts.copy.newest() and not hosts.full(1)


@pytest.mark.parametrize("salt", [b"", b"of another life of the run"], ids=["incomplete", "unlike"])
def test_a_newer_checkpoint_that_is_not_whole_does_not_count(salt: bytes, hosts: Hosts) -> None:
    hosts.divide(5)
    hosts.write(1, 10, ["__0_0.distcp"])
    if salt:
        hosts.write(2, 10, ["__1_0.distcp"], salt)
    assert hosts.carry(3) == "step-00000005" == newest_whole(on_hosts(hosts.hosts, RUN, hosts.connect)).step


def look(hosts: Hosts, *numbers: int) -> CopyThread:
    """Return a copying thread that has looked once."""
    thread = CopyThread(hosts.copy, [hosts.hosts[number - 1] for number in numbers])
    assert thread.look()
    return thread


def test_a_lost_host_with_shards_costs_no_more_than_the_last_copy(hosts: Hosts) -> None:
    hosts.divide(5)
    look(hosts, 1, 2)
    hosts.divide(10)
    hosts.lost = {"node2"}
    assert hosts.carry(1, 3) == "step-00000005" and hosts.full(1) == ["step-00000005"]


def test_shards_whose_others_are_lost_are_set_aside(hosts: Hosts) -> None:
    """The ranks would refuse to start where no checkpoint is whole."""
    hosts.divide(5)
    hosts.lost = {"node2"}
    assert hosts.carry(1, 3) == ""
    assert [path.name for path in hosts.checkpoints(1).iterdir()] == ["incomplete"]
    assert (hosts.checkpoints(1) / "incomplete/step-00000005/__0_0.distcp").read_bytes() == b"first"
    assert hosts.lines == [
        "starts from step 0: node2 does not answer, and no other host has the rest of the checkpoints of node1, which are "
        "moved to checkpoints/incomplete"
    ]
    hosts.lost = set()
    assert hosts.carry(1, 3) == "" and len(hosts.lines) == 1


def test_full_copies_on_several_hosts_are_not_kept(hosts: Hosts) -> None:
    """A run that resumed from a full copy may write shards: the first checkpoint says nothing, a later one does."""
    hosts.write(1, 5)
    hosts.write(2, 5)
    thread = look(hosts, 1, 2)
    hosts.divide(10)
    assert thread.look() and hosts.copy.newest() == "step-00000010"
    hosts.write(1, 15)
    hosts.write(2, 15)
    assert not thread.look() and hosts.copy.newest() == "step-00000010"
    look(hosts, 1)
    assert hosts.copy.newest() == "step-00000015"


def test_the_end_of_a_run_does_not_wait_for_a_copy(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy of one file never ends; the older copy stays."""
    hosts.write(1, 5)
    look(hosts, 1)
    shutil.rmtree(hosts.checkpoints(1) / "step-00000005")
    hosts.write(1, 10)
    began = threading.Event()

    def connect(name: str) -> HostConnection:
        transport = LocalTransport()

        def fetch(source: str, target: str) -> None:
            began.set()
            transport.execute("sleep 600")
            raise RemoteError("the copy was ended")

        transport.fetch = fetch  # type: ignore[method-assign]
        return HostConnection(hosts.hosts[0], transport)

    monkeypatch.setattr(carry, "INTERVAL", 0.0)
    hosts.copy.connect = connect
    thread = CopyThread(hosts.copy, hosts.hosts[:1])
    thread.start()
    assert began.wait(30)
    thread.stop()
    assert not thread.is_alive() and not hosts.lines and hosts.copy.newest() == "step-00000005"


@pytest.mark.parametrize("change", [{"elsewhere": {}}, {"files": [], "elsewhere": 7}, {"files": {"a/b": {"bytes": 5}}}])
def test_a_manifest_of_shards_that_lies_gives_no_copy(change: dict[str, object], hosts: Hosts) -> None:
    hosts.divide(5)
    file = hosts.checkpoints(1) / "step-00000005/manifest.json"
    whole = newest_whole(on_hosts(hosts.hosts, RUN, hosts.connect))
    text = json.dumps(json.loads(file.read_text()) | change)
    file.write_text(text)
    whole.parts["node1"]["manifest.json"] = len(text)
    with pytest.raises(RemoteError, match="the copy of its checkpoint step-00000005 is not complete"):
        hosts.copy.fetch(whole)
    assert [path.name for path in (hosts.queue / "checkpoint").iterdir()] == []
