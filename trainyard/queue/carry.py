"""Carry the newest checkpoint of a run to the hosts of its next allocation, and keep a copy of it on the queue host during the run.

A full copy on one host suffices: the ranks send it to other hosts. The shards of all hosts form one full copy.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from trainer.common.errors import UserError
from trainer.common.files import write_atomic
from trainer.config import RunSpec, parse_mapping
from trainer.spec import make_spec
from trainer.supervise.link_free import LinkFreePath
from trainer.supervise.run_files import read_json, write_json
from trainyard.remote.checkpoints import FILE, MANIFEST, STEP, complete
from trainyard.run.plan.gather_facts import Connect
from trainyard.wire.connection import Host, HostConnection, RemoteError, call_hosts
from trainyard.wire.copy_files import Exchange, fetch_file, lent_files

ANSWER_LIMIT = 10.0  # s for a host to list its checkpoints
LOOKS = 3  # at the hosts, before the shards of a checkpoint are given up
INTERVAL = 5.0  # s between two checks for a newer checkpoint
ABORT_INTERVAL = 0.5  # s
SPARE = 1 << 30  # bytes that stay free on the queue host
SPEC = "spec.yml"


class CheckpointFiles(NamedTuple):
    """What one host has of a checkpoint: the sizes of its files, and for shards the files of other hosts and a common digest."""

    files: dict[str, int]
    elsewhere: frozenset[str] = frozenset()
    digest: str = ""


class FullCheckpoint(NamedTuple):
    """A checkpoint whose files hosts have together: its name, empty for none, and the sizes of its files by host."""

    step: str
    parts: dict[str, dict[str, int]]


def on_hosts(hosts: Iterable[Host], run: str, connect: Connect) -> dict[str, dict[str, CheckpointFiles]]:
    """Return the checkpoints of every host that answers, by host and name, in the order of the hosts."""
    requests = {host.name: {"run_dir": f"{host.data_dir}/runs/{run}"} for host in hosts}
    answers, found = call_hosts(connect, "checkpoints", requests).wait(ANSWER_LIMIT).answers, {}
    for name in (name for name in requests if name in answers):
        answer = answers[name]
        shards = {step: (frozenset(part["elsewhere"]), part["digest"]) for step, part in answer["shards"].items()}
        found[name] = {step: CheckpointFiles(files, *shards.get(step, ())) for step, files in answer["steps"].items()}
    return found


def newest_whole(found: Mapping[str, Mapping[str, CheckpointFiles]]) -> FullCheckpoint:
    """Return the newest checkpoint that hosts have together."""
    for step in sorted({step for steps in found.values() for step in steps}, reverse=True):
        copies = {host: steps[step] for host, steps in found.items() if step in steps}
        for host, copy in copies.items():
            if not copy.elsewhere:
                return FullCheckpoint(step, {host: copy.files})
        for digest in dict.fromkeys(copy.digest for copy in copies.values()):
            shards = {host: copy for host, copy in copies.items() if copy.digest == digest}
            here = {name for copy in shards.values() for name in copy.files}
            if all(copy.elsewhere <= here for copy in shards.values()):
                return FullCheckpoint(step, {host: copy.files for host, copy in shards.items()})
    return FullCheckpoint("", {})


class CheckpointCopy:
    """The copy of a run's newest checkpoint on the queue host, a full one."""

    def __init__(self, folder: Path, run: str, connect: Connect, report: Callable[[str], None]) -> None:
        """Take the run's folder; its copy is in `checkpoint`."""
        self.folder, self.run, self.connect, self.report = folder / "checkpoint", run, connect, report
        self._fetching: HostConnection | None = None

    def newest(self) -> str:
        """Return the name of the copied checkpoint; empty if there is none."""
        return max(complete(LinkFreePath(self.folder)), default="")

    def spec(self) -> RunSpec | None:
        """Return the spec with which the copied checkpoint was trained, its automatic fields decided; None if it is unknown."""
        try:
            return make_spec(parse_mapping((self.folder / SPEC).read_text(encoding="utf-8"), SPEC), SPEC)
        except (OSError, UnicodeError):
            return None
        except UserError as error:  # a host has sent it
            self.report(f"warning: the run decides its automatic fields anew: {error}")
            return None

    def discard(self) -> None:
        """Delete the copy."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def carry(self, hosts: list[Host], every: list[Host]) -> str:
        """Give the newest checkpoint to the hosts of an allocation, unless they have it.

        `hosts`: the hosts of the allocation. `every`: the hosts on which the run may have been. Returns the name of the
        checkpoint that was carried, or an empty string. Raises RemoteError: a copy failed.
        """
        for _ in range(LOOKS):
            found = on_hosts(every, self.run, self.connect)
            here = {host.name: found.get(host.name, {}) for host in hosts}
            whole = newest_whole(found)
            if whole.step or self.newest() or not any(here.values()):
                break
        if whole.step > max(newest_whole(here).step, self.newest()):
            self.fetch(whole)
        if (step := self.newest()) > newest_whole(here).step:
            self.give(hosts[0], step)
            return step
        if not whole.step:
            silent = sorted({host.name for host in every} - {*found})
            self.set_aside([host for host in hosts if here[host.name]], silent)
        return ""

    def fetch(self, whole: FullCheckpoint, ended: threading.Event | None = None) -> None:
        """Copy a checkpoint from the hosts to this host, and delete the older copy. Raises RemoteError, also once
        `ended` is set."""
        step, first = whole.step, next(iter(whole.parts))
        # Each file from the first host that has it.
        files = {name: (host, size) for host, part in reversed(whole.parts.items()) for name, size in part.items()}
        if not STEP.fullmatch(step) or not all(map(FILE.fullmatch, files)):
            raise RemoteError(f"{first}: {step} is not a checkpoint")
        self.folder.mkdir(mode=0o700, exist_ok=True)
        for left in self.folder.glob(".tmp-*"):
            shutil.rmtree(left)
        if shutil.disk_usage(self.folder).free < sum(size for _, size in files.values()) + SPARE:
            raise RemoteError(f"the disk of the queue host has no space for {step}: make room below {self.folder}")
        temporary = self.folder / f".tmp-{step}"
        temporary.mkdir()
        for host in whole.parts:
            wanted = {name: size for name, (first, size) in files.items() if first == host}
            self._fetching = connection = self.connect(host)
            below = f"{self.run}/checkpoints/{step}"
            with lent_files(connection, f"{connection.host.data_dir}/runs", [f"{below}/{n}" for n in wanted]) as lent:
                for name, size in wanted.items():
                    if ended and ended.is_set():
                        raise RemoteError(f"{step}: the run has ended in the meantime")
                    fetch_file(connection, lent[f"{below}/{name}"], temporary / name, size)
        if len(whole.parts) > 1:
            manifest = read_json(temporary / MANIFEST) or {}
            own, elsewhere = manifest.get("files"), manifest.get("elsewhere")
            if isinstance(own, dict) and isinstance(elsewhere, dict):  # mark all files as present
                joined = {"step": manifest.get("step"), "finite": True, "files": {**own, **elsewhere}}
                write_json(temporary / MANIFEST, joined)
        request = {"run_dir": f"{connection.host.data_dir}/runs/{self.run}", "text": [SPEC]}
        if text := connection.call("read_files", request)["text"].get(SPEC):
            write_atomic(self.folder / SPEC, text)
        shutil.rmtree(self.folder / step, ignore_errors=True)
        temporary.replace(self.folder / step)
        copies = complete(LinkFreePath(self.folder))
        if {*copies.get(step, {})} != {*files}:  # what a host sent differs from what it said
            shutil.rmtree(self.folder / step)
            raise RemoteError(f"{', '.join(whole.parts)}: the copy of its checkpoint {step} is not complete")
        for older in copies:
            if older < step:
                shutil.rmtree(self.folder / older)

    def abort(self) -> None:
        """End the copy of a file that another thread makes here; `fetch` then raises RemoteError."""
        if connection := self._fetching:
            connection.transport.abort()

    def give(self, host: Host, step: str) -> None:
        """Copy the checkpoint to a host. Raises RemoteError."""
        exchange, target = Exchange(self.connect(host.name), f"{host.data_dir}/runs"), f"{self.run}/checkpoints/{step}"
        exchange.call()
        # Without its manifest, which comes last, a checkpoint is not complete.
        files = sorted((self.folder / step).iterdir(), key=lambda file: (file.name == MANIFEST, file.name))
        for file in files:
            exchange.put(file, file.name)
        exchange.call(remove=[target], take={f"{target}/{file.name}": file.name for file in files}, end=True)

    def set_aside(self, hosts: list[Host], silent: list[str]) -> None:
        """Restart a run from step 0 of whose checkpoints the hosts have only shards; `silent`: hosts that do not answer."""
        for host in hosts:
            exchange, folder = Exchange(self.connect(host.name), f"{host.data_dir}/runs"), f"{self.run}/checkpoints"
            incomplete = f"{folder}/incomplete"
            exchange.call(remove=[incomplete], aside=[f"{folder}/step-*", incomplete], end=True)
            lost = f"{', '.join(silent)} does not answer, and " if silent else ""
            self.report(
                f"starts from step 0: {lost}no other host has the rest of the checkpoints of {host.name}, which are moved "
                "to checkpoints/incomplete"
            )


class CopyThread(threading.Thread):
    """Copies every new checkpoint of a run that is on a single host, or divided among hosts, to the queue host."""

    def __init__(self, copy: CheckpointCopy, hosts: list[Host]) -> None:
        """Prepare; `start` begins."""
        super().__init__(daemon=True)
        self.copy, self.hosts, self.first, self.ended = copy, hosts, "", threading.Event()

    def run(self) -> None:
        """Look for a newer checkpoint until `stop`, or until the run is known to keep full copies on several hosts."""
        said, needed = "", True
        while needed and not self.ended.wait(INTERVAL):
            try:
                needed = self.look()
            except (RemoteError, OSError) as error:
                if str(error) != said and not self.ended.is_set():
                    self.copy.report(f"cannot copy a checkpoint to the queue host: {error}")
                said = str(error)

    def look(self) -> bool:
        """Copy a newer checkpoint; return whether later ones need a copy, too. Raises RemoteError and OSError."""
        whole = newest_whole(on_hosts(self.hosts, self.copy.run, self.copy.connect))
        if not whole.step:
            return True
        if len(self.hosts) > 1 and len(whole.parts) == 1:
            # The checkpoint from which the run resumed may be a full copy, although it writes shards.
            self.first = self.first or whole.step
            return whole.step == self.first
        if whole.step > self.copy.newest():
            self.copy.fetch(whole, self.ended)
        return True

    def stop(self) -> None:
        """End; a copy that is in progress is given up, because it would keep the hosts of the run."""
        self.ended.set()
        while self.is_alive():
            self.copy.abort()
            self.join(ABORT_INTERVAL)
