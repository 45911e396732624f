"""Datasets and models that the hosts have already: every host describes them, and all descriptions must be equal.

A host may be compromised: its names and texts are data. No name decides where the controller or another host writes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer.common.errors import UserError
from trainer.common.formats import quoted
from trainer.data.dataset_files import data_suffix
from trainyard.remote.local_files import tree_digest
from trainyard.run.types import StagedFile
from trainyard.wire.connection import Host, HostConnection, call_hosts
from trainyard.wire.run_errors import HostUnreachableError

DESCRIBE_LIMIT = 3600.0  # s: a host reads every file once
CONFIG = "config.json"
_SHOWN = 12  # digits of a digest in a message


@dataclass(frozen=True)
class HostFiles:
    """A file or folder that has the same contents on every host."""

    path: str  # on the hosts
    kind: str  # `file` or `folder`
    names: dict[str, tuple[int, str]]  # {relative name: (bytes, SHA-256)}; the name of a file is empty
    texts: dict[str, str] = field(default_factory=dict)  # {name: content} of small files of the folder

    @property
    def digest(self) -> str:
        """One SHA-256 for names and contents, as of a file or folder that the controller stages."""
        return tree_digest({name: digest for name, (_, digest) in self.names.items()})

    @property
    def bytes(self) -> int:
        """Size of all files."""
        return sum(size for size, _ in self.names.values())

    def entry(self, kind: str) -> StagedFile:
        """Return the file of a run: nothing is copied, and the store has a link to the path."""
        if kind == "model":
            target = f"store/models/{Path(self.path).name or 'model'}-{self.digest[:12]}"
        else:
            target = f"store/datasets/{self.digest[:16]}{data_suffix(Path(self.path)) if self.kind == 'file' else ''}"
        return StagedFile(kind, "", target, {}, self.digest, 0, on_hosts=self.path, config=self.texts.get(CONFIG, ""))


@dataclass(frozen=True)
class HostAccess:
    """The hosts of a run, for the queries of `prepare`."""

    hosts: Sequence[Host]
    connect: Callable[[str], HostConnection]  # makes the connection to a host by its name; called in the main thread
    run_env: Mapping[str, str] = field(default_factory=dict)  # environment variables for the ranks
    check: bool = False  # change nothing on the hosts, also not their cache of digests


def describe_files(access: HostAccess, paths: Mapping[str, str]) -> dict[str, HostFiles]:
    """Return the files of the hosts at these paths. Every host computes digests at the same time.

    A host that does not answer is left for the plan to report. `paths`: {setting: absolute path on the hosts}. Raises
    UserError: a host lacks a path or cannot read it, or two hosts differ; HostUnreachableError: no host answers.
    """
    hosts = access.hosts
    request = {"paths": sorted(set(paths.values())), "texts": [CONFIG], "check": access.check}
    requests = {host.name: {**request, "cache": f"{host.data_dir}/store/digests.json"} for host in hosts}
    done = call_hosts(access.connect, "local_files", requests).wait(DESCRIBE_LIMIT)
    answers = {host.name: done.answers[host.name]["files"] for host in hosts if host.name in done.answers}
    if not answers:
        host_name, why = next(iter(done.errors.items()))
        raise HostUnreachableError(f"{host_name} does not answer: {why}")
    return {
        setting: compare(setting, path, {host: answer.get(path) for host, answer in answers.items()})
        for setting, path in paths.items()
    }


def compare(setting: str, path: str, found: Mapping[str, Any]) -> HostFiles:
    """Return the description that all hosts agree on.

    `found`: {host: its description of the path}, see trainyard/remote/local_files.py. Raises UserError: a host has no
    such path or cannot read it, or two hosts differ; it names the hosts and the difference.
    """
    for host, answer in found.items():
        if answer and answer["error"]:
            raise UserError(
                f"{setting}: {host} cannot read {path}: {answer['error']}: let the login user read it, or correct {setting}"
            )
    if missing := [host for host, answer in found.items() if not answer or not answer["names"]]:
        few = f"{', '.join(missing)} {'has' if len(missing) == 1 else 'have'} no {path}"
        if any(answer and answer["kind"] == "folder" for answer in found.values()):
            few += " with files"
        raise UserError(
            f"{setting}: {few}: mount or copy it there, or give a path on the controller (without host:) to have it copied"
        )
    first, answer = next(iter(found.items()))
    for other, theirs in found.items():
        if difference := _difference(first, answer, other, theirs):
            raise UserError(
                f"{setting}: {path} is not the same on all hosts: {difference}: copy it from one host to the others, "
                "or give a path on the controller (without host:) to have it copied"
            )
    names = {name: (size, digest) for name, (size, digest) in answer["names"].items()}
    return HostFiles(path, answer["kind"], names, answer["texts"])


def _difference(first: str, mine: Mapping[str, Any], other: str, theirs: Mapping[str, Any]) -> str:
    """Return the first difference of two hosts, or an empty string."""
    for name in sorted({*mine["names"], *theirs["names"]}):
        here, there = mine["names"].get(name), theirs["names"].get(name)
        if here == there:
            continue
        what = f"{quoted(name)} " if name else ""
        if here is None or there is None:
            return f"{first if there is None else other} has {what or 'a file '}and {other if there is None else first} has not"
        return ", ".join(f"{host} has {_shown(what, side)}" for host, side in ((first, here), (other, there)))
    return ""


def _shown(what: str, file: Sequence[Any]) -> str:
    return f"{what}{'of ' if what else ''}{file[0]} bytes (SHA-256 {file[1][:_SHOWN]})"
