"""A second site.yml on three hosts against a play with the same number of tasks that do nothing; and time per role and task.

    sudo make bench NAME=site [ARGS='--rounds 5 --hosts 3']

Every task of site.yml that ran on a host has a counterpart in the other play: `command: true` over SSH for a task on the host,
`debug` for a task on the controller, `run_once` where the task ran once. Includes have no counterpart. A loop counts as one task. Exits with
1 if the ratio exceeds 1.5. Requires root on Debian or Ubuntu: it starts a lab. Takes about five minutes.
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
from lab_hosts import Lab, run_playbook

TOP = Path(__file__).resolve().parents[1]
LIMIT = 1.5
# Actions that run on the controller.
LOCAL = ("assert", "debug", "fail", "set_fact", "validate_argument_spec", "trainyard")
NONE = ("include_role", "include_tasks", "import_role", "import_tasks", "meta")


@dataclass
class Task:
    """A task that ran: its number of hosts, and its start and end times on each (s)."""

    role: str
    name: str
    action: str
    hosts: int = 0
    delegated: bool = False
    starts: list[float] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)

    @property
    def duration(self) -> float:
        return max(self.ends) - min(self.starts)

    @property
    def local(self) -> bool:
        return self.action in LOCAL


def tasks_of(events: list[dict[str, Any]]) -> list[Task]:
    """Return the tasks of a play that ran on a host, in order, from the events of ansible-runner."""
    found: dict[str, Task] = {}
    for event in events:
        data = event.get("event_data", {})
        action = str(data.get("resolved_action") or data.get("task_action", "")).rpartition(".")[2]
        if event["event"] != "runner_on_ok" or action in NONE:
            continue
        task = found.setdefault(data["task_uuid"], Task(data.get("role") or "playbooks", data["task"], action))
        task.hosts += 1
        task.starts.append(seconds(data["start"]))
        task.ends.append(seconds(data["end"]))
    return list(found.values())


def seconds(stamp: str) -> float:
    from datetime import datetime

    return datetime.fromisoformat(stamp).timestamp()


def empty_plays(tasks: list[Task], hosts: int, plays: int) -> list[dict[str, Any]]:
    """Return plays with the same number of tasks that do nothing."""
    empty: list[dict[str, Any]] = []
    for task in tasks:
        once = {"run_once": True} if task.hosts < hosts else {}
        if task.local:
            empty.append({"name": task.name, "ansible.builtin.debug": {"msg": ""}, **once})
        else:
            empty.append({"name": task.name, "ansible.builtin.command": "true", "changed_when": False, **once})
    size = -(-len(empty) // plays)
    return [
        {"name": "Run tasks that do nothing", "hosts": "cluster", "gather_facts": False, "tasks": empty[at : at + size]}
        for at in range(0, len(empty), size)
    ]


def timed(inventory: Path, playbook: Path) -> float:
    """Return the seconds that ansible-playbook takes, including its start."""
    start = time.monotonic()
    command = [str(Path(sys.executable).with_name("ansible-playbook")), "-i", str(inventory), str(playbook)]
    environment = {**os.environ, "ANSIBLE_CONFIG": str(TOP / "ansible.cfg")}
    done = subprocess.run(command, cwd=TOP, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    return time.monotonic() - start


def profile(tasks: list[Task]) -> None:
    """Print the share of time per role, and the longest tasks."""
    total = sum(task.duration for task in tasks)
    roles = list(dict.fromkeys(task.role for task in tasks))
    print("| role | tasks | share of the time |\n| --- | --- | --- |")
    for role in roles:
        of_role = [task for task in tasks if task.role == role]
        print(f"| {role} | {len(of_role)} | {sum(task.duration for task in of_role) / total:.0%} |")
    print("longest tasks:")
    for task in sorted(tasks, key=lambda task: -task.duration)[:12]:
        print(f"  {task.duration:5.2f} s  {task.role} : {task.name} ({task.action}, {task.hosts} hosts)")


def main() -> None:
    """Measure, and print the profile and the ratio."""
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
            raise SystemExit(f"site.yml still reports changes:\n{done.stdout}")
        tasks = tasks_of(done.events)
        with tempfile.TemporaryDirectory() as folder:
            playbook = Path(folder, "empty.yml")
            playbook.write_text(yaml.safe_dump(empty_plays(tasks, a.hosts, 2)))
            site, empty = [], []
            for _ in range(a.rounds):
                empty.append(timed(lab.inventory, playbook))
                site.append(timed(lab.inventory, TOP / "site.yml"))
                print(
                    f"site.yml {site[-1]:.1f} s, empty tasks {empty[-1]:.1f} s; load {os.getloadavg()[0]:.1f}",
                    flush=True,
                )
        profile(tasks)
        remote = sum(not task.local for task in tasks)
        ratio = statistics.median(seconds / empty_seconds for seconds, empty_seconds in zip(site, empty, strict=True))
        print(
            f"{a.hosts} hosts, {remote} tasks over SSH and {len(tasks) - remote} on the controller, median of {a.rounds}: "
            f"a second site.yml takes {ratio:.2f} times as long as empty tasks (limit {LIMIT})"
        )
        if ratio > LIMIT:
            raise SystemExit(1)
    finally:
        lab.down()


if __name__ == "__main__":
    main()
