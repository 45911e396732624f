"""Copy the trainer, the spec, the dataset and the model to all hosts at once. Only files that differ are copied.

Staging has two phases. The first copies large files to a store, where a file's name contains its digest: controllers do
not disturb each other. The second writes the small files of the run folders, and claims the run for this controller.
"""

from __future__ import annotations

import base64
import functools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from trainyard.connection import FanOut, HostConnection, RemoteError
from trainyard.run.errors import RunClaimedError, StageError
from trainyard.run.gather import Connect
from trainyard.run.plan import Node, environment
from trainyard.run.spec_files import PreparedRun

STAGE_LIMIT = 3600.0  # s: a large model over a slow link takes long
COMMIT_LIMIT = 60.0  # s for a host to write the small files
RELEASE_LIMIT = 5.0  # s for the hosts to remove a claim, which expires otherwise
_PRIVATE = ("spec", "previous", "claim")  # fields of an entry that plan.json does not have


def stage_files(
    entries: list[dict[str, Any]],
    prepared: PreparedRun,
    connect: Connect,
    run_env: dict[str, str],
    token: str,
    check: bool = False,
) -> dict[str, list[str]]:
    """Copy what differs to every host of the plan, claim the run, and write the run folder's small files.

    Args:
        entries: the plan; each entry has the node's fields, its `spec` and its `previous` start. Their `claim` is set.
        run_env: environment variables for the ranks.
        token: of this controller's claim on the run.
        check: compare only.

    Returns:
        The paths that changed (or would change) on each host.

    Raises:
        StageError: a host lacks a file afterwards.
        RunClaimedError: another controller starts the run, or has started it since it was planned.
        PlanError: a value of `run_env` cannot be written to a file.
    """
    commits = {e["host"]: commit_request(e, entries, prepared, run_env, token) for e in entries}
    copies = {
        entry["host"]: functools.partial(
            copy_to_host, connect(entry["host"]), entry=entry, files=prepared.files, token=token, check=check
        )
        for entry in entries
    }
    changed = {host: answer["changed"] for host, answer in _ask(entries, copies, STAGE_LIMIT).items()}
    if check:
        return changed
    # Controllers claim a run on the same host first, so that one of them gets it on all hosts.
    order = sorted(entries, key=lambda entry: (entry["address"], entry["run_dir"]))
    for group in (order[:1], order[1:]):
        calls = {e["host"]: functools.partial(connect(e["host"]).call, "commit", commits[e["host"]]) for e in group}
        answers = _ask(group, calls, COMMIT_LIMIT)
        if refusals := {host: answer["claimed"] for host, answer in answers.items() if "claimed" in answer}:
            release_claims(order, connect, token)
            whys = "; ".join(f"{host}: {why}" for host, why in refusals.items())
            raise RunClaimedError(f"{whys}; run the same command again")
        for host, answer in answers.items():
            if "changed" not in answer:
                raise StageError(f"{host}: sent an invalid reply to commit")
            changed[host] = changed[host] + answer["changed"]
    for entry in entries:
        entry["claim"] = token
    return changed


def release_claims(entries: list[dict[str, Any]], connect: Connect, token: str) -> None:
    """Remove this controller's claims, so that another one need not wait until they expire."""
    requests = {
        entry["host"]: functools.partial(
            connect(entry["host"]).call, "commit", {"run_dir": entry["run_dir"], "token": token, "release": True}
        )
        for entry in entries
    }
    FanOut(requests).wait(RELEASE_LIMIT)


def _ask(
    entries: list[dict[str, Any]], calls: Mapping[str, Callable[[], dict[str, Any]]], limit: float
) -> dict[str, dict[str, Any]]:
    """Return the answers of all hosts. Raises StageError."""
    done = FanOut(calls).wait(limit)
    if done.errors:
        host = next(entry["host"] for entry in entries if entry["host"] in done.errors)
        raise StageError(f"{host}: {done.errors[host]}", lost=list(done.errors))
    return done.answers


def copy_to_host(
    connection: HostConnection, *, entry: dict[str, Any], files: list[dict[str, Any]], token: str, check: bool
) -> dict[str, Any]:
    """Compare, copy what the host lacks, and move it to the store. Raises RemoteError."""
    sources, expected = target_files(entry, files)
    store = f"{entry['data_dir']}/store"
    request = {
        "files": expected,
        "arrived": {},
        "contents": {},
        # In check mode, a model that a run would make does not exist any more.
        "modes": {path: Path(source).stat().st_mode & 0o777 for path, source in sources.items() if not check},
        "cache": f"{store}/digests.json",
        "incoming": f"{store}/incoming",
        "check": check,
    }
    answer = connection.call("receive", request)
    if "changed" in answer:
        return answer
    if unknown := sorted(set(answer["lacking"]) - set(expected)):
        raise RemoteError(f"the reply names a file that is not staged: {unknown[0]}")
    # The token keeps simultaneous copies of the same file apart.
    arrived = {path: f"{store}/incoming/{expected[path]}-{token}" for path in answer["lacking"]}
    for path, aside in arrived.items():
        connection.put(sources[path], aside)
    answer = connection.call("receive", request | {"arrived": arrived})
    if "changed" not in answer:
        raise RemoteError("a file that was copied is missing afterwards; run the same command again")
    return answer


def target_files(entry: dict[str, Any], files: list[dict[str, Any]]) -> tuple[dict[str, str], dict[str, str]]:
    """Return two mappings by path on the host: the path on the controller, and the SHA-256."""
    sources, expected = {}, {}
    for file in files:
        base = f"{entry['data_dir']}/{file['dest']}"
        for name, digest in file["sha256"].items():
            target = f"{base}/{name}" if name else base
            sources[target] = f"{file['src']}/{name}" if name else file["src"]
            expected[target] = digest
    return sources, expected


def commit_request(
    entry: dict[str, Any], entries: list[dict[str, Any]], prepared: PreparedRun, run_env: dict[str, str], token: str
) -> dict[str, Any]:
    """Return the request that claims the run on a host and writes its run folder. Raises PlanError."""
    trainer = next(file for file in prepared.files if file["kind"] == "trainer")
    return {
        "run_dir": entry["run_dir"],
        "token": token,
        "trainer": f"{entry['data_dir']}/{trainer['dest']}",
        "contents": small_files(entry, entries, prepared.origin, run_env),
        "previous": entry["previous"],
        "stale": entry["stale"],
    }


def small_files(
    entry: dict[str, Any], entries: list[dict[str, Any]], origin: dict[str, str], run_env: dict[str, str]
) -> dict[str, tuple[int, str]]:
    """Return {name: (mode, base64 content)} of the files that every start writes. Raises PlanError."""
    hosts = [{name: value for name, value in other.items() if name not in _PRIVATE} for other in entries]
    texts = {
        "spec.yml": (0o644, yaml.safe_dump(json.loads(json.dumps(entry["spec"])), sort_keys=False)),
        "plan.json": (0o644, json.dumps(hosts, indent=1)),
        "origin.json": (0o644, json.dumps(origin, indent=1)),
        "env": (0o600, environment(Node.from_dict(entry), run_env)),
    }
    return {name: (mode, base64.b64encode(text.encode()).decode()) for name, (mode, text) in texts.items()}
