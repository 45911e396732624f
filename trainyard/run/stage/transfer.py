"""Copy the files of a run to the stores of all hosts: from host to host where that is faster, else from the controller."""

from __future__ import annotations

import dataclasses
import functools
import tempfile
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer.common.files import sha256_file
from trainyard.run.plan.gather_facts import Connect
from trainyard.run.types import HUB_MODE, PlanEntry, Report, StagedFile
from trainyard.wire.connection import FanOut, HostConnection, RemoteError, call_hosts
from trainyard.wire.copy_files import fetch_file, lent_files
from trainyard.wire.host_relay import Copy, Member, plan_relay, run_relay
from trainyard.wire.run_errors import LostSourceError, StageError

STAGE_LIMIT = 3600.0  # s: a large model over a slow link takes long


def copy_to_hosts(
    entries: Sequence[PlanEntry],
    files: Sequence[StagedFile],
    connect: Connect,
    token: str,
    *,
    transfer: str,
    check: bool = False,
    report: Report = print,
    sources: Sequence[PlanEntry] = (),
) -> dict[str, list[str]]:
    """Copy what differs to the store of every host; return the paths that changed (or would change) on each host.

    Args:
        entries: those of the plan whose hosts receive the files.
        files: those of PreparedRun.
        token: token of this controller's transfers.
        check: compare only.
        sources: all entries of the plan, if hosts of others may have the files.
        transfer: see the launch option.
        report: receives a warning if a relay fails.

    Raises:
        StageError: a host lacks a file afterwards.
        LostSourceError: the only host that has a file does not take part.
    """
    copies = staged_copies(files, check)
    requests = {entry.host: receive_request(entry, files, copies, check) for entry in entries}
    names = [entry.host for entry in entries]
    answers = answers_of(call_hosts(connect, "receive", requests).wait(STAGE_LIMIT))
    members = {entry.host: _member(entry, answers[entry.host], requests[entry.host]) for entry in entries}
    changed = {name: answer["changed"] for name, answer in answers.items() if "changed" in answer}
    if check:
        return changed
    lacking = [entry for entry in entries if entry.host not in changed]
    failed = set(names)
    if lacking and transfer == "auto" and (chain := plan_relay(list(members.values()), copies)):
        failed = _relay(chain, copies, connect, token, report)
    with tempfile.TemporaryDirectory(prefix="trainyard-") as folder:
        missing = {dest for name in failed for dest in members[name].lacks if not copies[dest].source}
        copies |= _fetch_from_hosts(
            members, files, copies, missing, connect, Path(folder), {entry.host for entry in sources or entries}
        )
        calls = {
            entry.host: functools.partial(
                _copy_lacking, connect(entry.host), members[entry.host], copies, requests[entry.host], token
            )
            for entry in lacking
        }
        done = answers_of(FanOut(calls).wait(STAGE_LIMIT))
    for name, answer in done.items():  # a relay has written files before the second query of the host
        written = [f"{members[name].data_dir}/{dest}" for dest in sorted(members[name].lacks)]
        changed[name] = list(dict.fromkeys([*written, *answer["changed"]]))
    return {name: changed[name] for name in names}


def _relay(
    chain: Sequence[Member], copies: Mapping[str, Copy], connect: Connect, token: str, report: Report
) -> set[str]:
    """Copy from host to host; return the hosts for which that failed."""
    failed = run_relay(chain, copies, connect, token)
    if failed:
        host, why = next(iter(failed.items()))
        rest = f" and {len(failed) - 1} more hosts" if len(failed) > 1 else ""
        report(f"warning: the relay failed at {host}{rest} ({why}): the controller copies the files instead")
    return set(failed)


def _fetch_from_hosts(
    members: Mapping[str, Member],
    files: Sequence[StagedFile],
    copies: Mapping[str, Copy],
    missing: set[str],
    connect: Connect,
    folder: Path,
    present: Collection[str],
) -> dict[str, Copy]:
    """Copy to the controller what only hosts have: what one of them fetched from the hub, or had at an earlier start.

    `present`: all hosts that take part, also those of other groups. Raises StageError: no host has a file;
    LostSourceError: one that does not take part may have it.
    """
    found = {}
    for file in files:
        first = file.fetched_by
        below = (file.dest, f"{file.dest}/")
        wanted = sorted(dest for dest in missing if dest == below[0] or dest.startswith(below[1])) if first else []
        for dest in wanted:
            copy, aside = copies[dest], folder / copies[dest].sha256
            have = [name for name, member in members.items() if dest not in member.lacks]
            if not have and first in members:
                raise StageError(
                    f"no host has the {file.kind} any more: start the run with its spec, on the controller"
                )
            if not have and first not in present:
                raise LostSourceError(f"{first}, which has the {file.kind}, does not take part: start {first}")
            holder = first if first in have or not have else have[0]  # it may be in another group of hosts
            try:
                connection = connect(holder)
                name = dest.removeprefix("store/")
                with lent_files(connection, f"{connection.host.data_dir}/store", [name]) as lent:
                    fetch_file(connection, lent[name], aside, copy.size)
            except RemoteError as error:
                raise StageError(f"{holder}: {error}") from None
            if sha256_file(aside) != copy.sha256:
                raise StageError(f"{holder}: {dest} arrived damaged: run the same command again")
            found[dest] = dataclasses.replace(copy, source=str(aside))
    return found


def staged_copies(files: Sequence[StagedFile], check: bool = False) -> dict[str, Copy]:
    """Return every file that hosts may lack, by its path below their data directory."""
    copies = {}
    for file in files:
        for name, digest in file.sha256.items():
            dest = f"{file.dest}/{name}" if name else file.dest
            source = file.src and (f"{file.src}/{name}" if name else file.src)
            size, mode = file.sizes.get(name, 0), file.modes.get(name, HUB_MODE)
            # In check mode, a model that a run would make no longer exists.
            if source and not check:
                found = Path(source).stat()
                size, mode = found.st_size, found.st_mode & 0o777
            copies[dest] = Copy(dest, source, size, digest, mode)
    return copies


def receive_request(
    entry: PlanEntry, files: Sequence[StagedFile], copies: Mapping[str, Copy], check: bool = False
) -> dict[str, Any]:
    """Return the request to one host, see trainyard/remote/receive.py."""
    store = f"{entry.data_dir}/store"
    return {
        "files": {f"{entry.data_dir}/{dest}": copy.sha256 for dest, copy in copies.items()},
        "arrived": {},
        # {path in the host's store: (path of what the host has already, its SHA-256)}
        "links": {f"{entry.data_dir}/{file.dest}": (file.on_hosts, file.digest) for file in files if file.on_hosts},
        "modes": {} if check else {f"{entry.data_dir}/{dest}": copy.mode for dest, copy in copies.items()},
        "cache": f"{store}/digests.json",
        "incoming": f"{store}/incoming",
        "check": check,
    }


def answers_of(done: FanOut[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the answers of all hosts. Raises StageError that names the first host without one."""
    if done.errors:
        host = next(host for host in done.threads if host in done.errors)
        raise StageError(f"{host}: {done.errors[host]}", lost=list(done.errors))
    return done.answers


def _member(entry: PlanEntry, answer: Mapping[str, Any], request: Mapping[str, Any]) -> Member:
    """Return a host and the files that it lacks. Raises StageError if it names a file that is not staged."""
    lacks = set() if "changed" in answer else set(answer["lacking"])
    if unknown := sorted(lacks - set(request["files"])):
        raise StageError(f"{entry.host}: the reply names a file that is not staged: {unknown[0]}")
    prefix = f"{entry.data_dir}/"
    names = frozenset(path.removeprefix(prefix) for path in lacks)
    return Member(entry.host, entry.address, entry.data_dir, names, entry.link_mbit)


def _copy_lacking(
    connection: HostConnection, member: Member, copies: Mapping[str, Copy], request: dict[str, Any], token: str
) -> dict[str, Any]:
    """Copy from the controller what a host lacks, and move it to the store. Raises RemoteError."""
    answer = connection.call("receive", request)
    if "changed" in answer:
        return answer
    arrived = {}
    for dest in sorted(member.lacks):
        if (path := f"{member.data_dir}/{dest}") in answer["lacking"]:
            # Not where a relay that failed may still write or remove a file.
            arrived[path] = member.temporary(copies[dest], f"{token}-direct")
            connection.put(copies[dest].source, arrived[path])
    answer = connection.call("receive", request | {"arrived": arrived})
    if "changed" not in answer:
        raise RemoteError("a file that was copied is missing afterwards; run the same command again")
    return answer
