"""Copy the trainer, the spec, the dataset and the model to all hosts at once. Only files that differ are copied."""

from __future__ import annotations

import base64
import functools
import json
from typing import Any

import yaml

from trainyard.connection import FanOut, HostConnection
from trainyard.run.errors import StageError
from trainyard.run.gather import Connect
from trainyard.run.plan import Node, environment
from trainyard.run.spec_files import PreparedRun

STAGE_LIMIT = 3600.0  # s: a large model over a slow link takes long


def stage_files(
    entries: list[dict[str, Any]], prepared: PreparedRun, connect: Connect, run_env: dict[str, str], check: bool = False
) -> dict[str, list[str]]:
    """Copy what differs to every host of the plan, and write the run folder's small files.

    Args:
        entries: the plan; each entry has the node's fields and its `spec`.
        run_env: environment variables for the ranks.
        check: compare only.

    Returns:
        The paths that changed (or would change) on each host.

    Raises:
        StageError: a host lacks a file afterwards.
        PlanError: a value of `run_env` cannot be written to a file.
    """
    requests = {}
    for entry in entries:
        small = small_files(entry, entries, prepared.origin, run_env)
        stage_host = functools.partial(_stage_host, entry=entry, files=prepared.files, small=small, check=check)
        requests[entry["host"]] = functools.partial(stage_host, connect(entry["host"]))
    done = FanOut(requests).wait(STAGE_LIMIT)
    if done.errors:
        host = next(entry["host"] for entry in entries if entry["host"] in done.errors)
        raise StageError(f"{host}: {done.errors[host]}", lost=list(done.errors))
    return {host: answer["changed"] for host, answer in done.answers.items()}


def _stage_host(
    connection: HostConnection,
    *,
    entry: dict[str, Any],
    files: list[dict[str, Any]],
    small: dict[str, tuple[int, str]],
    check: bool,
) -> dict[str, Any]:
    """Compare, copy what the host lacks, and put everything in place. Raises RemoteError."""
    sources, expected = target_files(entry, files)
    store = f"{entry['data_dir']}/store"
    request = {
        "files": expected,
        "arrived": {},
        "contents": small,
        "cache": f"{store}/digests.json",
        "incoming": f"{store}/incoming",
        "check": check,
    }
    answer = connection.call("receive", request)
    if "changed" in answer:
        return answer
    arrived = {path: f"{store}/incoming/{expected[path]}" for path in answer["lacking"]}
    for path, aside in arrived.items():
        connection.put(sources[path], aside)
    return connection.call("receive", request | {"arrived": arrived})


def target_files(entry: dict[str, Any], files: list[dict[str, Any]]) -> tuple[dict[str, str], dict[str, str]]:
    """Return two mappings by path on the host: the path on the controller, and the SHA-256."""
    sources, expected = {}, {}
    for file in files:
        base = f"{entry['data_dir']}/{file['dest']}" if file["dest"] else f"{entry['run_dir']}/trainer.zip"
        for name, digest in file["sha256"].items():
            target = f"{base}/{name}" if name else base
            sources[target] = f"{file['src']}/{name}" if name else file["src"]
            expected[target] = digest
    return sources, expected


def small_files(
    entry: dict[str, Any], entries: list[dict[str, Any]], origin: dict[str, str], run_env: dict[str, str]
) -> dict[str, tuple[int, str]]:
    """Return {path: (mode, base64 content)} of the files that every start writes. Raises PlanError."""
    hosts = [{name: value for name, value in other.items() if name != "spec"} for other in entries]
    texts = {
        "spec.yml": (0o644, yaml.safe_dump(json.loads(json.dumps(entry["spec"])), sort_keys=False)),
        "plan.json": (0o644, json.dumps(hosts, indent=1)),
        "origin.json": (0o644, json.dumps(origin, indent=1)),
        "env": (0o600, environment(Node.from_dict(entry), run_env)),
    }
    return {
        f"{entry['run_dir']}/{name}": (mode, base64.b64encode(text.encode()).decode())
        for name, (mode, text) in texts.items()
    }
