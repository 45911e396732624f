"""Carry the newest checkpoint of a run to the hosts of its next allocation, and keep a copy of it on the queue host meanwhile.

A full copy on one host suffices: the ranks pass it on. A checkpoint that is divided among hosts is not carried.
"""

from __future__ import annotations

import functools
import shlex
import shutil
import threading
from collections.abc import Callable, Iterable
from pathlib import Path

from trainyard.connection import FanOut, Host, RemoteError
from trainyard.remote.checkpoints import FILE, STEP, complete
from trainyard.run.copy_files import fetch_file, put_file
from trainyard.run.gather import Connect

ANSWER_LIMIT = 10.0  # s for a host to list its checkpoints
INTERVAL = 5.0  # s between two looks for a newer checkpoint
SPARE = 1 << 30  # bytes that stay free on the queue host
Checkpoints = dict[str, dict[str, int]]


def on_hosts(hosts: Iterable[Host], run: str, connect: Connect) -> dict[str, Checkpoints]:
    """Return the complete checkpoints of every host that answers."""
    requests = {
        host.name: functools.partial(connect(host.name).call, "checkpoints", {"run_dir": f"{host.data_dir}/runs/{run}"})
        for host in hosts
    }
    return {name: answer["steps"] for name, answer in FanOut(requests).wait(ANSWER_LIMIT).answers.items()}


class Copy:
    """The copy of a run's newest checkpoint on the queue host."""

    def __init__(self, folder: Path, run: str, connect: Connect, report: Callable[[str], None]) -> None:
        """Take the run's folder; its copy is in `checkpoint`."""
        self.folder, self.run, self.connect, self.report = folder / "checkpoint", run, connect, report

    def newest(self) -> str:
        """Return the name of the copied checkpoint; empty if there is none."""
        return max(complete(self.folder), default="")

    def carry(self, hosts: list[Host], every: list[Host]) -> str:
        """Give the newest checkpoint to the hosts of an allocation, unless one of them has it.

        Args:
            hosts: the hosts of the allocation.
            every: the hosts on which the run may have been.

        Returns:
            The name of the checkpoint that was carried, or an empty string.

        Raises:
            RemoteError: a copy failed.
        """
        found = on_hosts(every, self.run, self.connect)
        here = max((step for host in hosts for step in found.get(host.name, {})), default="")
        source = max(every, key=lambda host: max(found.get(host.name, {}), default=""))
        there = max(found.get(source.name, {}), default="")
        if there > max(here, self.newest()):
            self.fetch(source, there, found[source.name][there])
        if (step := self.newest()) <= here:
            return ""
        self.give(hosts[0], step)
        return step

    def fetch(self, host: Host, step: str, files: dict[str, int]) -> None:
        """Copy a checkpoint of a host here, and delete the older copy. Raises RemoteError."""
        if not STEP.fullmatch(step) or not all(map(FILE.fullmatch, files)):
            raise RemoteError(f"{host.name}: {step} is not a checkpoint")
        self.folder.mkdir(mode=0o700, exist_ok=True)
        if shutil.disk_usage(self.folder).free < sum(files.values()) + SPARE:
            raise RemoteError(f"the disk of the queue host has no space for {step}: make room below {self.folder}")
        temporary = self.folder / f".tmp-{step}"
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        connection = self.connect(host.name)
        for name in files:
            source = f"{host.data_dir}/runs/{self.run}/checkpoints/{step}/{name}"
            fetch_file(connection, source, temporary / name, files[name])
        shutil.rmtree(self.folder / step, ignore_errors=True)
        temporary.replace(self.folder / step)
        if step not in complete(self.folder):  # what the host sent differs from what it said
            shutil.rmtree(self.folder / step)
            raise RemoteError(f"{host.name}: the copy of its checkpoint {step} is not complete")
        for older in complete(self.folder):
            if older < step:
                shutil.rmtree(self.folder / older)

    def give(self, host: Host, step: str) -> None:
        """Copy the checkpoint to a host. Raises RemoteError."""
        connection = self.connect(host.name)
        folder = f"{host.data_dir}/runs/{self.run}/checkpoints"
        temporary, target = shlex.quote(f"{folder}/.queue-{step}"), shlex.quote(f"{folder}/{step}")
        connection.run(f"rm -rf {temporary} && mkdir -p {temporary} && echo '{{}}'")
        for file in sorted((self.folder / step).iterdir()):
            put_file(connection, file, f"{folder}/.queue-{step}/{file.name}")
        connection.run(f"rm -rf {target} && mv {temporary} {target} && echo '{{}}'")


class Keeper(threading.Thread):
    """Copies every new checkpoint of a run on a single host to the queue host: with the host, all others would be lost."""

    def __init__(self, copy: Copy, host: Host) -> None:
        """Prepare; `start` begins."""
        super().__init__(daemon=True)
        self.copy, self.host, self.ended = copy, host, threading.Event()

    def run(self) -> None:
        """Look for a newer checkpoint until `stop`."""
        said = ""
        while not self.ended.wait(INTERVAL):
            try:
                steps = on_hosts([self.host], self.copy.run, self.copy.connect).get(self.host.name, {})
                if (step := max(steps, default="")) > self.copy.newest():
                    self.copy.fetch(self.host, step, steps[step])
            except (RemoteError, OSError) as error:
                if str(error) != said:
                    self.copy.report(f"cannot copy a checkpoint to the queue host: {error}")
                said = str(error)

    def stop(self) -> None:
        """End, after a copy that is in progress."""
        self.ended.set()
        self.join()
