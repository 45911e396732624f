"""Collect the results of a run: compare the hosts' weights, gather the logs, copy artifacts, and summarize."""

from __future__ import annotations

import functools
import json
import re
import shlex
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from trainer.common.formats import counted
from trainer.config import RunSpec
from trainer.config.reward_source import NOTHING_LEARNED
from trainer.data.data_report import DataReport
from trainyard import front_end
from trainyard.run.plan.gather_facts import Connect
from trainyard.run.types import PlanEntry, StepResult
from trainyard.wire.connection import Host, HostConnection, RemoteError, call_hosts
from trainyard.wire.copy_files import Exchange, copy_artifacts, fetch_file, lent_files, split_run
from trainyard.wire.replies import ReplyError, checked_reply, untrusted_json
from trainyard.wire.reply_types.run_replies import FinalResult
from trainyard.wire.run_errors import RunError

READ_LIMIT = 600.0  # s for a host to return results and digests
# What is copied from a run folder: no checkpoints, no secrets.
ARTIFACTS = ["adapter/*", "model/*", "merged/*", "output/*", "result.json", "spec.yml", "metrics.jsonl"]
ARTIFACTS += ["logs/*.log", "tensorboard/*"]
ADAPTER_CONFIG = "adapter/adapter_config.json"
LOG_LIMIT = 256 << 20  # bytes; a larger log stays on its host
_STATE = re.compile(r"state/rank(\d{1,6})\.json")
_LOG = re.compile(r"logs/((?:rank|torchrun\.)\d{1,6}\.log)")
_APART = 1.25  # times the MFU of the lowest rank
_DIGESTS = ("adapter_sha256", "model_sha256")


@dataclass(frozen=True)
class _HostResult:
    """What a host has of a run that has ended: its result, the ranks of the last start, sizes of logs."""

    result: FinalResult | None
    ranks: list[int]
    logs: dict[str, int]


def collect_artifacts(
    entries: list[PlanEntry], connect: Connect, copy_to: str = "", base_model: str = "", spec: RunSpec | None = None
) -> StepResult:
    """Collect the results of a run that has ended.

    Returns `result`, the head's result.json; `lines`, the summary; `changed`, whether a file was copied. Raises
    RunError: a host does not answer, there is no result, the weights differ, or a file cannot be copied.

    Args:
        entries: the plan, the head first.
        copy_to: folder on the controller that receives the artifacts below the run's name; empty: none.
        base_model: path or hub id of the base model on the controller, for the copy of an adapter; empty: unknown.
        spec: of the run; None: unknown.
    """
    connections = {entry.host: connect(entry.host) for entry in entries}
    head = entries[0]
    run = Path(head.run_dir).name  # of the plan, not of a host's result
    results = _read_results(entries, connections)
    entries = [entry for entry in entries if entry.host in results]
    result = results[head.host].result
    if not result:
        raise RunError(f"{head.host}: {head.run_dir} has no result.json: see its logs in {head.run_dir}/logs")
    _check_weights(entries, results)
    try:
        with tempfile.TemporaryDirectory() as folder:
            copied = _gather_logs(entries, results, connections, Path(folder))
        if copy_to:
            target = Path(copy_to).expanduser() / run
            edits = {ADAPTER_CONFIG: functools.partial(with_base_model, base_model)} if base_model else {}
            copied += copy_artifacts(connections[head.host], head.run_dir, target, ARTIFACTS, edits)
    except (RemoteError, ReplyError) as error:
        raise RunError(f"{head.host}: {error}") from None
    except OSError as error:
        raise RunError(f"cannot write {error.filename}: {error.strerror}") from None
    lines = summary(run, result, head, len(entries), connections[head.host], spec)
    if exposed := [entry.host for entry in entries if entry.exposed]:
        where = ", ".join(exposed)
        lines.insert(
            -1,
            f"  warning      nothing kept other machines from the ports of the run on {where}: see isolate, and the role firewall",
        )
    if copy_to:
        lines.insert(-1, f"  copy here    {target}")
    return {"result": result, "lines": lines, "changed": bool(copied)}


def _read_results(entries: list[PlanEntry], connections: dict[str, HostConnection]) -> dict[str, _HostResult]:
    """Return what each host that answers has. Raises RunError: a host does not answer, and the run cannot have ended without it."""
    wanted = {"sizes": ["logs/*.log", "state/rank*.json"], "text": ["result.json"]}
    requests = {entry.host: {"run_dir": entry.run_dir, **wanted} for entry in entries}
    asked = call_hosts(connections.__getitem__, "read_files", requests).wait(READ_LIMIT)
    for entry in entries:
        if entry.host in asked.errors:
            raise RunError(f"{entry.host}: {asked.errors[entry.host]}")
    results = {}
    for host, answer in asked.answers.items():
        sizes = answer["sizes"]
        results[host] = _HostResult(
            parse_result(host, answer["text"].get("result.json")),
            [int(match[1]) for name in sizes if (match := _STATE.fullmatch(name))],
            {match[1]: size for name, size in sizes.items() if (match := _LOG.fullmatch(name))},
        )
    return results


def parse_result(host: str, text: str | None) -> FinalResult | None:
    """Return a host's result.json, or None if it has none. Raises RunError if it is not valid."""
    if not text:
        return None
    try:
        return cast("FinalResult", checked_reply("result.json", untrusted_json(text)))
    except ReplyError as error:
        raise RunError(f"{host}: {error}") from None


def _check_weights(entries: list[PlanEntry], results: dict[str, _HostResult]) -> None:
    """Check that all hosts ended with the same weights. Raises RunError."""
    head = entries[0]
    ended = {entry.host: results[entry.host].result for entry in entries}
    for kind in _DIGESTS:
        digests = {host: result.get(kind) if result else None for host, result in ended.items()}
        if len(set(digests.values())) > 1:
            shown = ", ".join(f"{host} {str(digest)[:12]}" for host, digest in digests.items())
            logs = f"{head.run_dir}/logs"
            raise RunError(f"the hosts ended with different weights ({kind}: {shown}): do not use them; see {logs}")


def _gather_logs(
    entries: list[PlanEntry], results: dict[str, _HostResult], connections: dict[str, HostConnection], folder: Path
) -> list[str]:
    """Copy the other hosts' logs to the head's run folder; return the names that were copied. Raises RemoteError."""
    head = entries[0]
    present = results[head.host].logs
    # A host delivers the logs of its own ranks only, each file once.
    taken = {f"rank{rank}.log" for rank in results[head.host].ranks} | {"torchrun.0.log"}
    copied: list[str] = []
    for entry in entries[1:]:
        answer = results[entry.host]
        # torchrun renumbers the ranks of an elastic run: logs of other ranks belong to earlier starts.
        ranks = answer.ranks if entry.elastic else entry.ranks
        current = {f"torchrun.{entry.node_rank}.log", *(f"rank{rank}.log" for rank in ranks)} - taken
        taken |= current
        wanted = {
            name: size
            for name, size in sorted(answer.logs.items())
            if name in current and present.get(name) != size and size <= LOG_LIMIT
        }
        try:
            _fetch_logs(connections[entry.host], entry.run_dir, wanted, folder)
        except RemoteError as error:
            raise RunError(f"{entry.host}: {error}") from None
        copied += wanted
    if copied:
        root, run = split_run(head.run_dir)
        exchange = Exchange(connections[head.host], root)
        exchange.call()
        for name in copied:
            exchange.put(folder / name, name)
        exchange.call(take={f"{run}/logs/{name}": name for name in copied}, end=True)
    return copied


def _fetch_logs(connection: HostConnection, run_dir: str, sizes: Mapping[str, int], folder: Path) -> None:
    """Copy logs of a host to the controller. Raises RemoteError."""
    root, run = split_run(run_dir)
    with lent_files(connection, root, [f"{run}/logs/{name}" for name in sizes]) as lent:
        for name, size in sizes.items():
            fetch_file(connection, lent[f"{run}/logs/{name}"], folder / name, size)


def _mfu(result: FinalResult) -> list[str]:
    """Return a line about the share of the devices' peak that the run used, or none; ranks that differ by much are named."""
    mean = result.get("mfu")
    if not mean:
        return []
    ranks = result.get("mfu_ranks") or [mean]
    low, high = min(ranks), max(ranks)
    owners = "device's" if result["world_size"] == 1 else "devices'"
    apart = f": rank {ranks.index(low)} {100 * low:.0f} %, rank {ranks.index(high)} {100 * high:.0f} %"
    return [f"  MFU          {100 * mean:.0f} % of the {owners} peak{apart if high > _APART * low else ''}"]


def _rewards(result: FinalResult) -> list[str]:
    """Return the mean reward of the first and the last step, if the run has rewards, and whether they taught anything."""
    if "learning_steps" not in result:
        return []
    first, last = result.get("reward_first"), result.get("reward_last")
    shown = "none" if first is None or last is None else f"{first:.4f} -> {last:.4f}"
    nothing = [] if result["learning_steps"] else [f"  warning      {NOTHING_LEARNED}"]
    return [f"  reward       {shown}", *nothing]


def summary(
    run: str, result: FinalResult, head: PlanEntry, hosts: int, connection: HostConnection, spec: RunSpec | None
) -> list[str]:
    """Return the summary of a run, and the next command."""
    where = f" on {head.host}" if hosts > 1 else ""
    logs = f"  logs         {head.run_dir}/logs"
    again = f"to start another run, change an option; {front_end.option('run', 'NAME')} sets its name"
    place = f"{counted(result['world_size'], 'rank')}, {counted(hosts, 'host')}"
    if result.get("script"):
        known = [loss for loss in (result["loss_first"], result["loss_last"]) if loss is not None]
        steps = f"{result['step']} of {counted(result['steps'], 'step')}" if result["steps"] else "no steps reported"
        lines = [f"run {run} {result['status']}: {steps} on {place}", f"  script       {result['script']}"]
        lines += ["  loss         " + " -> ".join(f"{loss:.4f}" for loss in known)] if known else []
        return [*lines, f"  result       {head.run_dir}/result.json{where}", logs, again]
    kind = "adapter" if result.get("adapter") else "model"
    eval_loss = result.get("eval_loss")
    first, last = result.get("loss_first"), result.get("loss_last")
    change = f" ({(last / first - 1) * 100:+.0f} %)" if first and last is not None else ""
    losses = " -> ".join("none" if loss is None else f"{loss:.4f}" for loss in (first, last))
    samples = f"{result['tokens']} tokens of {counted(int(result['samples']), 'sample')} (without the eval split)"
    lines = [f"run {run} {result['status']}: {result['step']} of {result['steps']} steps on {place}"]
    part = counted(result.get("train_samples") or 0, "different sample")
    lines += [
        f"  loss         {losses}{change}",
        *_rewards(result),
        f"  eval loss    {eval_loss:.4f}" if eval_loss is not None else "  eval loss    none (eval_split is 0)",
        f"  speed        {result['tokens_per_second'] or 0:.0f} tokens/s, {samples}",
        *_mfu(result),
        *(DataReport.of(result["data"]).lines("  data         ") if "data" in result else []),
        *(
            [f"  data part    {spec.data_part}: {part}"]
            if spec and spec.data_part and "train_samples" in result
            else []
        ),
        f"  {kind:<12} {head.run_dir}/{kind}{where}{_averaged(result)}",
        *([f"  merged       {head.run_dir}/merged{where}"] if result.get("merged") else []),
        logs,
    ]
    if result.get("tensorboard"):
        folder = f"{head.run_dir}/tensorboard"
        lines += [f"  TensorBoard  {folder}", f"next: {tensorboard_command(folder, connection.host)}"]
    return [*lines, again]


def with_base_model(name: str, config: bytes) -> bytes:
    """Return peft's configuration of an adapter with the name of its base model replaced. Raises ReplyError."""
    values = untrusted_json(config.decode(errors="replace"))
    if not isinstance(values, dict):
        raise ReplyError(f"sent an {ADAPTER_CONFIG} that is not a JSON object")
    return json.dumps(values | {"base_model_name_or_path": name}, indent=2, sort_keys=True).encode()


def _averaged(result: FinalResult) -> str:
    """Return the rank of an averaged adapter, which is not lora_r."""
    if not result.get("adapter_rank"):
        return ""
    error = result.get("averaging_error")
    exact = "the exact mean of the workers" if error is None else f"{100 * error:.2g} % from the exact mean"
    return f" (rank {result['adapter_rank']}, {exact})"


def tensorboard_command(folder: str, host: Host) -> str:
    """Return the command that shows a host's TensorBoard folder on this machine."""
    command = shlex.join([host.python, "-m", "tensorboard.main", "--logdir", folder])
    login = host.login
    if not login.address:
        return command
    # The host's shell parses the command again. With a terminal (-t), Ctrl-C ends TensorBoard there, too.
    program, *arguments = login.ssh_command()
    words = [program, "-t", *arguments, "-L", "6006:127.0.0.1:6006", login.destination(), command]
    return shlex.join(words)
