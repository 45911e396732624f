"""Collect the results of a run: compare the hosts' weights, gather the logs, copy artifacts, and summarize."""

from __future__ import annotations

import functools
import json
import shlex
import tempfile
from pathlib import Path
from typing import Any

from trainer.files import sha256_file
from trainyard.connection import FanOut, HostConnection, RemoteError
from trainyard.run.errors import RunError
from trainyard.run.gather import Connect

READ_LIMIT = 600.0  # s for a host to return results and digests
# What is copied from a run folder: no checkpoints, no secrets.
ARTIFACTS = [
    "adapter/*",
    "model/*",
    "merged/*",
    "result.json",
    "spec.yml",
    "metrics.jsonl",
    "logs/*.log",
    "tensorboard/*",
]
_DIGESTS = ("adapter_sha256", "model_sha256")


def collect_artifacts(entries: list[dict[str, Any]], connect: Connect, copy_to: str = "") -> dict[str, Any]:
    """Collect the results of a run that has ended.

    Args:
        entries: the plan, the head first.
        copy_to: folder on the controller that receives the artifacts below the run's name; empty: none.

    Returns:
        `result`, the head's result.json; `lines`, the summary; `changed`, whether a file was copied.

    Raises:
        RunError: a host does not answer, there is no result, the weights differ, or a file cannot be copied.
    """
    connections = {entry["host"]: connect(entry["host"]) for entry in entries}
    head = entries[0]
    results = _read_results(entries, connections)
    entries = [entry for entry in entries if entry["host"] in results]
    result = results[head["host"]]["result"]
    if not result:
        raise RunError(f"{head['host']}: {head['run_dir']} has no result.json: see its logs in {head['run_dir']}/logs")
    _check_weights(entries, results)
    try:
        with tempfile.TemporaryDirectory() as folder:
            copied = _gather_logs(entries, results, connections, folder)
        if copy_to:
            target = Path(copy_to).expanduser() / result["run"]
            copied += _copy_artifacts(connections[head["host"]], head["run_dir"], target)
    except RemoteError as error:
        raise RunError(f"{head['host']}: {error}") from None
    except OSError as error:
        raise RunError(f"cannot write {error.filename}: {error.strerror}") from None
    lines = summary(result, head, len(entries), connections[head["host"]])
    if copy_to:
        lines.insert(-1, f"  copy here    {target}")
    return {"result": result, "lines": lines, "changed": bool(copied)}


def _read_results(entries: list[dict[str, Any]], connections: dict[str, HostConnection]) -> dict[str, dict[str, Any]]:
    """Return `result`, `ranks` of the last start, and `logs` with their sizes, for each host that answers.

    Raises:
        RunError: a host does not answer, and the run cannot have ended without it.
    """
    wanted = {"text": ["result.json"], "sizes": ["logs/*.log", "state/rank*.json"]}
    requests = {
        entry["host"]: functools.partial(
            connections[entry["host"]].call, "read_files", wanted | {"folder": entry["run_dir"]}
        )
        for entry in entries
    }
    asked = FanOut(requests).wait(READ_LIMIT)
    for entry in entries:
        if entry["host"] in asked.errors and not _may_be_absent(entry):
            raise RunError(f"{entry['host']}: {asked.errors[entry['host']]}")
    results = {}
    for host, answer in asked.answers.items():
        sizes = answer["sizes"]
        results[host] = {
            "result": _parse_json(answer["text"]["result.json"]),
            "ranks": [Path(name).stem.removeprefix("rank") for name in sizes if name.startswith("state/")],
            "logs": {Path(name).name: size for name, size in sizes.items() if name.startswith("logs/")},
        }
    return results


def _parse_json(text: str | None) -> dict[str, Any] | None:
    try:
        value = json.loads(text or "")
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _may_be_absent(entry: dict[str, Any]) -> bool:
    """Return whether the run may have ended without this host: it belongs to a replica group other than the head's."""
    return entry.get("replica") is not None and entry["node_rank"] > 0


def _check_weights(entries: list[dict[str, Any]], results: dict[str, dict[str, Any]]) -> None:
    """Check that all hosts ended with the same weights. Raises RunError."""
    head = entries[0]
    ended = {
        entry["host"]: results[entry["host"]]["result"]
        for entry in entries
        if results[entry["host"]]["result"] or not _may_be_absent(entry)
    }
    for kind in _DIGESTS:
        digests = {host: (result or {}).get(kind) for host, result in ended.items()}
        if len(set(digests.values())) > 1:
            shown = ", ".join(f"{host} {str(digest)[:12]}" for host, digest in digests.items())
            raise RunError(
                f"the hosts ended with different weights ({kind}: {shown}): do not use them; "
                f"see the logs in {head['run_dir']}/logs"
            )


def _gather_logs(
    entries: list[dict[str, Any]],
    results: dict[str, dict[str, Any]],
    connections: dict[str, HostConnection],
    folder: str,
) -> list[str]:
    """Copy the other hosts' logs to the head's run folder; return the names that were copied. Raises RemoteError."""
    head = entries[0]
    present = results[head["host"]]["logs"]
    copied = []
    for entry in entries[1:]:
        answer = results[entry["host"]]
        # Ranks are renumbered when hosts leave or return: logs of other ranks belong to earlier starts.
        current = {f"torchrun.{entry['node_rank']}.log", *(f"rank{rank}.log" for rank in answer["ranks"])}
        for name, size in sorted(answer["logs"].items()):
            if name in current and present.get(name) != size:
                connections[entry["host"]].fetch(f"{entry['run_dir']}/logs/{name}", f"{folder}/{name}")
                connections[head["host"]].put(f"{folder}/{name}", f"{head['run_dir']}/logs/{name}")
                copied.append(name)
    return copied


def _copy_artifacts(head: HostConnection, run_dir: str, folder: Path) -> list[str]:
    """Copy the head's artifacts to the controller; return the names that differed. Raises RemoteError, OSError."""
    files = head.call("read_files", {"folder": run_dir, "sha256": ARTIFACTS})["sha256"]
    copied = []
    for name, digest in sorted(files.items()):
        target = folder / name
        if target.is_file() and sha256_file(target) == digest:
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        aside = target.with_name(f".tmp-{target.name}")
        head.fetch(f"{run_dir}/{name}", str(aside))
        aside.replace(target)
        copied.append(name)
    return copied


def summary(result: dict[str, Any], head: dict[str, Any], hosts: int, connection: HostConnection) -> list[str]:
    """Return the summary of a run, and the next command."""
    kind = "adapter" if result.get("adapter") else "model"
    where = f" on {head['host']}" if hosts > 1 else ""
    eval_loss = result.get("eval_loss")
    first, last = result["loss_first"], result["loss_last"]
    samples = f"{result['tokens']} tokens of {result['samples']} samples (without the eval split)"
    lines = [
        f"run {result['run']} {result['status']}: {result['step']} of {result['steps']} steps on "
        f"{result['world_size']} ranks, {hosts} hosts",
        f"  loss         {first:.4f} -> {last:.4f} ({(last / first - 1) * 100:+.0f} %)",
        f"  eval loss    {eval_loss:.4f}" if eval_loss is not None else "  eval loss    none (eval_split is 0)",
        f"  speed        {result['tokens_per_second']:.0f} tokens/s, {samples}",
        f"  {kind:<12} {result[kind]}{where}",
        *([f"  merged       {result['merged']}{where}"] if result.get("merged") else []),
        f"  logs         {head['run_dir']}/logs",
    ]
    if result.get("tensorboard"):
        command = tensorboard_command(result["tensorboard"], connection)
        lines += [f"  TensorBoard  {result['tensorboard']}", f"next: {command}"]
    lines.append("for another run, change a value in the same command; -e run=NAME names it")
    return lines


def tensorboard_command(folder: str, connection: HostConnection) -> str:
    """Return the command that shows a host's TensorBoard folder on the controller."""
    login = connection.host.login
    if not login.address:
        return f"tensorboard --logdir {shlex.quote(folder)}"
    words = ["ssh", *login.ssh_arguments(), "-L", "6006:127.0.0.1:6006", login.destination()]
    return f"{shlex.join(words)} {connection.host.python} -m tensorboard.main --logdir {shlex.quote(folder)}"
