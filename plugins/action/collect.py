"""Gather what a run left, hold the hosts' results against each other, and say what came of it.

Documented in plugins/modules/collect.py.
"""

from __future__ import annotations

import json
import shlex
import tempfile
from pathlib import Path
from typing import Any

from trainer.files import sha256_file
from trainyard.ansible_adapter import ClusterAction, cluster_connections, failure
from trainyard.connection import FanOut, HostConnection, RemoteError

GATHER_LIMIT = 600.0  # s
# What of a run folder is worth having elsewhere: no checkpoints, no secrets.
KEPT = ["adapter/*", "model/*", "merged/*", "result.json", "spec.yml", "metrics.jsonl", "logs/*.log", "tensorboard/*"]


class ActionModule(ClusterAction):
    def run(self, tmp: Any = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        super().run(tmp, task_vars)
        connect = cluster_connections(self, task_vars or {})
        _, a = self.validate_argument_spec(
            {
                "plan": {"type": "list", "elements": "dict", "required": True},
                "state": {"type": "str", "default": "new"},
                "to": {"type": "path", "default": ""},
            }
        )
        if self._task.check_mode:
            return {"skipped": True, "msg": "nothing ran in check mode"}
        plan = a["plan"]
        links = {entry["host"]: connect(entry["host"]) for entry in plan}
        asked = FanOut({e["host"]: asker(links[e["host"]], e["run_dir"]) for e in plan}).wait(GATHER_LIMIT)
        head = plan[0]
        # A replica that was away at the end has no result; the others' is the run's.
        may_be_away = {entry["host"] for entry in plan[1:] if entry.get("replica") is not None}
        if lost := [e["host"] for e in plan if e["host"] in asked.errors and e["host"] not in may_be_away]:
            return failure(f"{lost[0]}: {asked.errors[lost[0]]}")
        plan = [entry for entry in plan if entry["host"] in asked.answers]
        result = asked.answers[head["host"]]["result"]
        if not result:
            return failure(
                f"{head['host']}: there is no result.json in {head['run_dir']}: its logs are in {head['run_dir']}/logs"
            )
        for kind in ("adapter_sha256", "model_sha256"):
            answers = asked.answers.items()
            ended = {host: answer["result"] for host, answer in answers if answer["result"] or host not in may_be_away}
            digests = {host: (told or {}).get(kind) for host, told in ended.items()}
            if len(set(digests.values())) > 1:
                shown = ", ".join(f"{host} {str(digest)[:12]}" for host, digest in digests.items())
                return failure(
                    f"the hosts ended with different weights ({kind}: {shown}): do not use them; logs in {head['run_dir']}/logs"
                )
        there = asked.answers[head["host"]]["logs"]
        brought = []
        try:
            with tempfile.TemporaryDirectory() as here:
                for entry in plan[1:]:
                    answer = asked.answers[entry["host"]]
                    # Ranks are numbered anew when hosts come and go: what lies there of other numbers is of earlier starts.
                    mine = {f"torchrun.{entry['node_rank']}.log", *(f"rank{rank}.log" for rank in answer["ranks"])}
                    for name, size in sorted(answer["logs"].items()):
                        if name in mine and there.get(name) != size:
                            source = f"{entry['run_dir']}/logs/{name}"
                            bring(links[entry["host"]], links[head["host"]], source, head["run_dir"], here)
                            brought.append(name)
            if a["to"]:
                folder = Path(a["to"]).expanduser() / result["run"]
                kept = links[head["host"]].call("read_files", {"folder": head["run_dir"], "sha256": KEPT})["sha256"]
                brought += take(links[head["host"]], head["run_dir"], kept, folder)
        except RemoteError as error:
            return failure(f"{head['host']}: {error}")
        except OSError as error:
            return failure(f"cannot write {error.filename}: {error.strerror}")
        lines = summary(result, head, len(plan), links[head["host"]])
        if a["to"]:
            lines.insert(-1, f"  copy here    {folder}")
        if a["state"] == "finished":
            lines.insert(0, f"run {result['run']} is finished: nothing to do")
        return {"changed": bool(brought), "result": result, "lines": lines}


def asker(link: HostConnection, run_dir: str) -> Any:
    request = {"folder": run_dir, "text": ["result.json"], "sizes": ["logs/*.log", "state/rank*.json"]}

    def ask() -> dict[str, Any]:
        answer = link.call("read_files", request)
        text, sizes = answer["text"]["result.json"], answer["sizes"]
        logs = {name.removeprefix("logs/"): size for name, size in sizes.items() if name.startswith("logs/")}
        ranks = [Path(name).stem.removeprefix("rank") for name in sizes if name.startswith("state/")]
        return {"result": json.loads(text) if text else None, "logs": logs, "ranks": ranks}

    return ask


def take(head: HostConnection, run_dir: str, files: dict[str, str], folder: Path) -> list[str]:
    """Copy files of the head's run folder to the controller unless they are there; return those that travelled.

    Raises:
        RemoteError, OSError: a file cannot be copied.
    """
    brought = []
    for name, digest in sorted(files.items()):
        target = folder / name
        if target.is_file() and sha256_file(target) == digest:
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        aside = target.with_name(f".tmp-{target.name}")
        head.fetch(f"{run_dir}/{name}", str(aside))
        aside.replace(target)
        brought.append(name)
    return brought


def bring(source: HostConnection, head: HostConnection, path: str, run_dir: str, here: str) -> None:
    """Copy a log from its host to the head's run folder. Raises RemoteError."""
    aside = f"{here}/{Path(path).name}"
    source.fetch(path, aside)
    head.put(aside, f"{run_dir}/logs/{Path(path).name}")


def summary(result: dict[str, Any], head: dict[str, Any], hosts: int, link: HostConnection) -> list[str]:
    """Return what a person wants to know at the end, and the next command."""
    kind = "adapter" if result.get("adapter") else "model"
    where = f" on {head['host']}" if hosts > 1 else ""
    eval_loss = result.get("eval_loss")
    first, last = result["loss_first"], result["loss_last"]
    lines = [
        f"run {result['run']} {result['status']}: {result['step']} of {result['steps']} steps on {result['world_size']} ranks, {hosts} hosts",
        f"  loss         {first:.4f} -> {last:.4f} ({(last / first - 1) * 100:+.0f} %)",
        f"  eval loss    {eval_loss:.4f}" if eval_loss is not None else "  eval loss    none (eval_split is 0)",
        f"  speed        {result['tokens_per_second']:.0f} tokens/s, {result['tokens']} tokens of {result['samples']} samples (without those held out for eval)",
        f"  {kind:<12} {result[kind]}{where}",
        *([f"  merged       {result['merged']}{where}"] if result.get("merged") else []),
        f"  logs         {head['run_dir']}/logs",
    ]
    if result.get("tensorboard"):
        lines += [f"  TensorBoard  {result['tensorboard']}", f"next: {tensorboard(result['tensorboard'], link)}"]
    lines.append("another run: the same command with what you change, and -e run=NAME if you want to name it")
    return lines


def tensorboard(folder: str, link: HostConnection) -> str:
    """Return the command that shows a folder of events on the controller's screen, wherever the folder is."""
    here = f"tensorboard --logdir {shlex.quote(folder)}"
    login = link.host.login
    if not login.address:
        return here
    words = ["ssh", *login.ssh_arguments(), "-L", "6006:127.0.0.1:6006", login.destination()]
    return f"{shlex.join(words)} {link.host.python} -m tensorboard.main --logdir {shlex.quote(folder)}"
