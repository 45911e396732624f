"""site.yml on three hosts that need nothing any more, beside as many tasks that do nothing; and where the time goes.

    python benchmarks/site.py [--rounds 5]          root, Debian or Ubuntu: it boots a lab of its own

Every task that ran on a host, not one that was skipped, has its like in the other play: `command: true` over the same SSH for what
runs on the host, `debug` for what runs on the controller, once where it ran once. Includes have none. A loop counts as one task.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

TOP = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TOP), str(TOP / "tests"), str(TOP / "molecule/resources")]

from lab_hosts import Lab, run_playbook  # noqa: E402  found by the line above

LIMIT = 1.5
# What these do, they do on the controller.
LOCAL = ("assert", "debug", "fail", "set_fact", "validate_argument_spec", "python_plan", "python_env_consistency")
NONE = ("include_role", "include_tasks", "import_role", "import_tasks", "meta")


@dataclass
class Task:
    """A task that ran: on how many hosts, and from when to when on any of them (s)."""

    role: str
    name: str
    action: str
    hosts: int = 0
    delegated: bool = False
    starts: list[float] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)

    @property
    def took(self) -> float:
        return max(self.ends) - min(self.starts)

    @property
    def local(self) -> bool:
        return self.action in LOCAL


def tasks_of(events: list[dict[str, Any]]) -> list[Task]:
    """The tasks of a play that ran on a host, in their order, off ansible-runner's events."""
    found: dict[str, Task] = {}
    for event in events:
        data = event.get("event_data", {})
        action = str(data.get("resolved_action") or data.get("task_action", "")).rpartition(".")[2]
        if event["event"] != "runner_on_ok" or action in NONE:
            continue
        one = found.setdefault(data["task_uuid"], Task(data.get("role") or "playbooks", data["task"], action))
        one.hosts += 1
        one.starts.append(seconds(data["start"]))
        one.ends.append(seconds(data["end"]))
    return list(found.values())


def seconds(stamp: str) -> float:
    from datetime import datetime

    return datetime.fromisoformat(stamp).timestamp()


def nothing(tasks: list[Task], hosts: int, plays: int) -> list[dict[str, Any]]:
    """The play of the same number of tasks that do nothing."""
    twins: list[dict[str, Any]] = []
    for task in tasks:
        once = {"run_once": True} if task.hosts < hosts else {}
        if task.local:
            twins.append({"name": task.name, "ansible.builtin.debug": {"msg": ""}, **once})
        else:
            twins.append({"name": task.name, "ansible.builtin.command": "true", "changed_when": False, **once})
    size = -(-len(twins) // plays)
    return [
        {"name": "Do nothing", "hosts": "cluster", "gather_facts": False, "tasks": twins[at : at + size]}
        for at in range(0, len(twins), size)
    ]


def timed(inventory: Path, playbook: Path) -> float:
    """Seconds that ansible-playbook takes, its own start included."""
    began = time.monotonic()
    command = [str(Path(sys.executable).with_name("ansible-playbook")), "-i", str(inventory), str(playbook)]
    environment = {**os.environ, "ANSIBLE_CONFIG": str(TOP / "ansible.cfg")}
    done = subprocess.run(command, cwd=TOP, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    return time.monotonic() - began


def profile(tasks: list[Task]) -> None:
    """Print where the time of a play goes, by role and by task."""
    whole = sum(task.took for task in tasks)
    roles = list(dict.fromkeys(task.role for task in tasks))
    print("| role | tasks | share of the time |\n| --- | --- | --- |")
    for role in roles:
        mine = [task for task in tasks if task.role == role]
        print(f"| {role} | {len(mine)} | {sum(task.took for task in mine) / whole:.0%} |")
    print("the longest:")
    for task in sorted(tasks, key=lambda task: -task.took)[:12]:
        print(f"  {task.took:5.2f} s  {task.role} : {task.name} ({task.action}, {task.hosts} hosts)")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--hosts", type=int, default=3)
    a = parser.parse_args()
    lab = Lab(f"bench-{os.getpid()}")
    try:
        lab.up(hosts=a.hosts, venv=Path(sys.prefix), persistent=False)
        for _ in range(3):
            done = run_playbook("site.yml", lab.inventory)
            if done.rc:
                raise SystemExit(done.stdout)
            if not done.count("changed"):
                break
        else:
            raise SystemExit(f"site.yml still changes something:\n{done.stdout}")
        tasks = tasks_of(done.events)
        with tempfile.TemporaryDirectory() as folder:
            twin = Path(folder, "nothing.yml")
            twin.write_text(yaml.safe_dump(nothing(tasks, a.hosts, 2)))
            site, twins = [], []
            for _ in range(a.rounds):
                twins.append(timed(lab.inventory, twin))
                site.append(timed(lab.inventory, TOP / "site.yml"))
                print(
                    f"site.yml {site[-1]:.1f} s, nothing {twins[-1]:.1f} s; load {os.getloadavg()[0]:.1f}", flush=True
                )
        profile(tasks)
        remote = sum(not task.local for task in tasks)
        ratio = statistics.median(mine / theirs for mine, theirs in zip(site, twins, strict=True))
        print(
            f"{a.hosts} hosts, {remote} tasks over SSH and {len(tasks) - remote} on the controller, median of {a.rounds}: "
            f"site.yml again takes {ratio:.2f} x of as many tasks that do nothing (limit {LIMIT})"
        )
        if ratio > LIMIT:
            raise SystemExit(1)
    finally:
        lab.down()


if __name__ == "__main__":
    main()
