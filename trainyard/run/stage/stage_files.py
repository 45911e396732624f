"""Copy the trainer, the spec, the datasets and the model to all hosts at once. Only files that differ are copied.

Staging has two phases. The first copies large files to a store (see transfer.py), where a file's name contains its digest: controllers do
not disturb each other. The second writes the small files of the run folders, and claims the run for this controller.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Collection, Mapping
from dataclasses import asdict
from typing import Any

from trainer.config import RunSpec
from trainyard.run.plan.gather_facts import Connect
from trainyard.run.plan.nodes import environment
from trainyard.run.stage.transfer import answers_of, copy_to_hosts
from trainyard.run.types import PlanEntry, PreparedRun, Report
from trainyard.wire.connection import call_hosts
from trainyard.wire.run_errors import RunClaimedError, StageError

COMMIT_LIMIT = 60.0  # s for a host to write the small files
RELEASE_LIMIT = 5.0  # s for the hosts to remove a claim, which expires otherwise
# Fields of an entry that plan.json does not have. `peers` repeats the addresses of all entries.
_PRIVATE = ("previous", "claim", "link_mbit", "script", "peers", "servers", "stop_wanted", "writable", "reads")
# Variables that name folders of programs.
_CODE = {"PATH", "PYTHONPATH", "LD_LIBRARY_PATH"}


def stage_files(
    entries: list[PlanEntry],
    spec: RunSpec,
    prepared: PreparedRun,
    connect: Connect,
    environments: Mapping[str, dict[str, str]],
    token: str,
    *,
    transfer: str,
    check: bool = False,
    report: Report = print,
    staged: Collection[str] = (),
) -> dict[str, list[str]]:
    """Copy what differs to every host of the plan, claim the run, and write the run folder's small files.

    Returns the paths that changed (or would change) on each host. Raises StageError: a host lacks a file afterwards;
    RunClaimedError: another controller starts the run, or has started it since it was planned; PlanError: a value of
    `environments` cannot be written to a file.

    Args:
        entries: the plan. Their `claim` is set, and their `writable` and `reads`: paths of variables.
        spec: of the plan.
        environments: environment variables for the ranks, by host.
        token: token of this controller's claim on the run.
        check: compare only.
        transfer: `auto`: from host to host where that is faster; `controller`: from the controller only.
        report: receives a warning if a relay between the hosts fails.
        staged: hosts that have all large files from an earlier start of this session: they are not asked again.
    """
    plan = packed(plan_file(entries))
    commits = {e.host: commit_request(e, plan, spec, prepared, environments.get(e.host, {}), token) for e in entries}
    changed: dict[str, list[str]] = {entry.host: [] for entry in entries}
    if lacking := [entry for entry in entries if entry.host not in staged]:
        how = (lacking, prepared.files, connect, token)
        changed |= copy_to_hosts(*how, check=check, transfer=transfer, report=report, sources=entries)
    if check:
        return changed
    # Controllers claim a run on the same host first, so that one of them gets it on all hosts.
    order = sorted(entries, key=lambda entry: (entry.address, entry.run_dir))
    for group in (order[:1], order[1:]):
        asked = call_hosts(connect, "commit", {entry.host: commits[entry.host] for entry in group})
        answers = answers_of(asked.wait(COMMIT_LIMIT))
        if refusals := {host: answer["claimed"] for host, answer in answers.items() if "claimed" in answer}:
            release_claims(order, connect, token)
            whys = "; ".join(f"{host}: {why}" for host, why in refusals.items())
            raise RunClaimedError(f"{whys}; run the same command again")
        for host, answer in answers.items():
            if "changed" not in answer:
                raise StageError(f"{host}: sent an invalid reply to commit")
            changed[host] = changed[host] + answer["changed"]
    for entry in entries:
        entry.claim = token
        named = environments.get(entry.host, {}).items()
        entry.reads += [part for _, value in named for part in value.split(":") if part.startswith("/")]
        entry.writable = sorted(value for name, value in named if value.startswith("/") and name not in _CODE)
        if spec.rollout_folder and entry.servers:
            entry.writable.append(spec.rollout_folder)
    return changed


def release_claims(entries: list[PlanEntry], connect: Connect, token: str) -> None:
    """Remove this controller's claims, so that another one need not wait until they expire."""
    requests = {entry.host: {"run_dir": entry.run_dir, "token": token, "release": True} for entry in entries}
    call_hosts(connect, "commit", requests).wait(RELEASE_LIMIT)


def commit_request(
    entry: PlanEntry, plan: str, spec: RunSpec, prepared: PreparedRun, run_env: dict[str, str], token: str
) -> dict[str, Any]:
    """Return the request that claims the run on a host and writes its run folder; `plan`: plan.json, packed. Raises PlanError."""
    trainer = next(file for file in prepared.files if file.kind == "trainer")
    return {
        "run_dir": entry.run_dir,
        "token": token,
        "trainer": f"{entry.data_dir}/{trainer.dest}",
        "contents": small_files(entry, plan, prepared.spec_on(entry.data_dir, spec), prepared.origin, run_env),
        "previous": entry.previous,
        "stop_wanted": entry.stop_wanted,
        "stale": entry.stale,
    }


def plan_file(entries: list[PlanEntry]) -> str:
    """Return plan.json, which is the same on all hosts: one line per host, without the fields that are empty."""
    rows = [asdict(entry).items() for entry in entries]
    empty: tuple[object, ...] = (None, "", [])  # and False, which equals zero, a number
    hosts = [{k: v for k, v in row if k not in _PRIVATE and v is not False and v not in empty} for row in rows]
    return "[" + ",\n ".join(map(json.dumps, hosts)) + "]\n"


def small_files(
    entry: PlanEntry, plan: str, spec: RunSpec, origin: dict[str, str], run_env: dict[str, str]
) -> dict[str, tuple[int, str]]:
    """Return {name: (mode, packed content)} of the files that every start writes; `plan`: plan.json, packed. Raises PlanError."""
    texts = {
        "spec.yml": (0o644, spec.to_yaml()),
        "origin.json": (0o644, json.dumps(origin, indent=1)),
        "env": (0o600, environment(entry, run_env)),
    }
    return {"plan.json": (0o644, plan)} | {name: (mode, packed(text)) for name, (mode, text) in texts.items()}


def packed(text: str) -> str:
    """Return a text compressed and in base64. Every host receives plan.json, which grows with their number."""
    return base64.b64encode(zlib.compress(text.encode())).decode()
