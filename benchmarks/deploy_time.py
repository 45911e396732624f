"""Time of playbooks/deploy.yml on three nodes of this machine with a real server each, above a playbook that does nothing.

    make bench NAME=deploy_time [ARGS='--rounds 3']

Needs a real `ollama` on PATH. Measures the first deployment of a run, that of a converted run, and one that changes nothing, for a
run with all weights and for one with an adapter. Exits with 1 above 5 s.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from real_ollama import serve

from benchmarks.inputs import TOP
from trainer.common.formats import table

NODES = 3
PORT = 18438
LIMIT = 5.0  # s of wall time above the empty playbook
EMPTY = "- hosts: cluster\n  gather_facts: false\n  tasks:\n    - ansible.builtin.meta: noop\n"


@dataclass
class Cost:
    """The cost of a command: seconds of wall time, and CPU seconds of its processes and of the servers."""

    wall: float
    cpu: float
    servers: float


def cpu_of_servers() -> float:
    """Return the CPU seconds of all descendants of this process that run, which are the servers and their runners."""
    parents, used = {}, {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        parents[int(stat.parent.name)], used[int(stat.parent.name)] = int(fields[1]), sum(map(int, fields[11:15]))
    mine = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in mine} - mine:
        mine |= more
    return sum(used[pid] for pid in mine - {os.getpid()}) / os.sysconf("SC_CLK_TCK")


def measure(command: list[str]) -> tuple[Cost, str]:
    """Run a command; return its cost and its output. Exits if it fails."""
    environment = os.environ | {"ANSIBLE_CONFIG": str(TOP / "ansible.cfg"), "HF_HUB_OFFLINE": "1"}
    servers, start = cpu_of_servers(), time.monotonic()
    process = subprocess.Popen(
        command, cwd=TOP, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert process.stdout is not None
    output = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(output)
    wall = time.monotonic() - start
    return Cost(wall, usage.ru_utime + usage.ru_stime, cpu_of_servers() - servers), output


class Nodes:
    """Three hosts that are folders of this machine; the first one has the runs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.places = [f"127.0.11.{21 + number}:{PORT}" for number in range(NODES)]
        self.runs = folder / "node1/runs"
        self.runs.mkdir(parents=True)
        hosts = {
            f"node{number + 1}": {"cluster_data_dir": f"{folder}/node{number + 1}", "ollama_url": f"http://{place}"}
            for number, place in enumerate(self.places)
        }
        values = {"ansible_connection": "local", "cluster_address": "127.0.0.1", "cluster_backend": "process"}
        values |= {"ansible_python_interpreter": sys.executable, "cluster_python": sys.executable}
        cluster = {"hosts": hosts, "vars": values | {"cluster_managed": False}}
        (folder / "hosts.json").write_text(json.dumps({"all": {"children": {"cluster": cluster}}}))
        (folder / "empty.yml").write_text(EMPTY)

    def play(self, playbook: str | Path, **values: object) -> tuple[Cost, str]:
        program = str(Path(sys.executable).with_name("ansible-playbook"))
        options = [word for name, value in values.items() for word in ("-e", f"{name}={value}")]
        return measure([program, "-i", str(self.folder / "hosts.json"), str(playbook), *options])

    def floor(self, rounds: int) -> Cost:
        """Return the medians of the empty playbook."""
        costs = [self.play(self.folder / "empty.yml")[0] for _ in range(rounds)]
        return Cost(statistics.median(c.wall for c in costs), statistics.median(c.cpu for c in costs), 0.0)

    def deploy(self, run: str, changed: bool) -> Cost:
        """Deploy a run to all nodes; check what the playbook reports."""
        cost, output = self.play("playbooks/deploy.yml", run=run, deploy_name=run, deploy_as="merged")
        if ("changed=1" in output) != changed:
            raise SystemExit(f"error: expected changed={int(changed)}\n{output}")
        return cost

    def rounds(self, run_dir: Path, count: int) -> dict[str, list[Cost]]:
        """Deploy a run `count` times from the beginning; return the costs of each kind of deployment."""
        costs: dict[str, list[Cost]] = {"first": [], "converted": [], "unchanged": []}
        for number in range(count):
            copy = self.runs / f"{run_dir.name}{number}"
            shutil.copytree(run_dir, copy, ignore=shutil.ignore_patterns("*.gguf", "merged", "*-*.json", "tensorboard"))
            costs["first"].append(self.deploy(copy.name, True))
            self.play("playbooks/undeploy.yml", deploy_name=copy.name)
            costs["converted"].append(self.deploy(copy.name, True))
            costs["unchanged"].append(self.deploy(copy.name, False))
        return costs


def train(folder: Path, run: str, **fields: Any) -> Path:
    """Train a run of the tiny model with the data folder `folder`; return its folder."""
    words = [f"{name}={value}" for name, value in ({"run": run, "model": "tiny", "max_steps": 20} | fields).items()]
    command = [sys.executable, "-P", "-m", "trainer", *words, "--data-dir", str(folder)]
    environment = os.environ | {"PYTHONPATH": str(TOP), "HF_HUB_OFFLINE": "1"}
    subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
    return folder / "runs" / run


def time_deployments(folder: Path, rounds: int) -> int:
    """Print the times of the deployments of two runs; return 1 if a median is above the limit."""
    runs = [train(folder / "trained", "full", lora_r=0), train(folder / "trained", "adapter")]
    nodes = Nodes(folder)
    late = False
    with serve(nodes.places, folder):
        nodes.play(folder / "empty.yml")
        floor = nodes.floor(rounds)
        rows = [["", "wall s", "above", "CPU s", "above", "CPU s of the servers"]]
        rows.append(["empty playbook", f"{floor.wall:.2f}", "", f"{floor.cpu:.2f}", "", ""])
        for run_dir in runs:
            for kind, costs in nodes.rounds(run_dir, rounds).items():
                wall, cpu = statistics.median(c.wall for c in costs), statistics.median(c.cpu for c in costs)
                servers = statistics.median(c.servers for c in costs)
                row = [f"{run_dir.name}, {kind}", f"{wall:.2f}", f"{wall - floor.wall:.2f}"]
                rows.append([*row, f"{cpu:.2f}", f"{cpu - floor.cpu:.2f}", f"{servers:.2f}"])
                late = late or wall - floor.wall > LIMIT
        load = os.getloadavg()[0]
    print(*table(rows), f"load {load:.1f}; the limit is {LIMIT:g} s of wall time above the empty playbook", sep="\n")
    return int(late)


def main() -> int:
    """Train two runs, and measure their deployments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as folder:
        return time_deployments(Path(folder), rounds)


if __name__ == "__main__":
    sys.exit(main())
