"""Test hosts: inventory hosts on this machine, each with its own data folder, and runs of `fake_rank.py` on them."""

import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import yaml

from trainer.supervise.processes import RUN_VARIABLE
from trainyard.run.types import PlanEntry

TOP = Path(__file__).resolve().parents[2]
FAKE_RANK = Path(__file__).with_name("fake_rank.py")


def until(true: Callable[[], Any], limit: float = 240.0, what: str = "") -> Any:
    """Wait up to `limit` seconds for a condition; return its value."""
    deadline = time.monotonic() + limit
    while not (value := true()):
        assert time.monotonic() < deadline, f"waited {limit} s for {what or true}"
        time.sleep(0.01)
    return value


# Below the kernel's range of ephemeral ports, and below those of runs (29500 to 29599), which a run opens seconds after its plan has
# chosen one. Test processes that run at the same time have similar pids. Their ports are 500 apart, so that none takes a port
# that another process has chosen but not opened yet.
_FIRST, _COUNT = 20_000, 9_000
_PORTS = itertools.count(os.getpid() * 500 % _COUNT)


def free_port() -> int:
    """Return a free port, never the same one twice."""
    for _ in range(_COUNT):
        port = _FIRST + next(_PORTS) % _COUNT
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise AssertionError("no free port")


def questions(folder: Path, count: int = 60) -> Path:
    """Write a dataset of short samples to `folder`; return its path."""
    rows = [{"instruction": f"What follows {n}?", "output": f"After {n} comes {n + 1}."} for n in range(count)]
    path = folder / "questions.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def local_inventory(folder: Path, variables: dict[str, Any] | None = None, **hosts: dict[str, Any]) -> Path:
    """Write inventory/local.yml with data folders in `folder`; `hosts` are further variables of node1 and node2."""
    document = yaml.safe_load((TOP / "inventory/local.yml").read_text())
    cluster = document["all"]["children"]["cluster"]
    cluster["vars"] = (cluster.get("vars") or {}) | (variables or {})
    for group, name in (("head", "node1"), ("workers", "node2")):
        known = cluster["children"][group]["hosts"]
        known[name] = (known[name] or {}) | {"cluster_data_dir": str(folder / name)} | hosts.get(name, {})
    (folder / "inventory.yml").write_text(yaml.safe_dump(document, sort_keys=False))
    return folder / "inventory.yml"


def write_inventory(folder: Path, own: Mapping[str, Mapping[str, object]], **variables: object) -> Path:
    """Write an inventory of hosts that are this machine, with folders in `folder`; `own` are the variables of each host."""
    here = {"ansible_connection": "local", "ansible_python_interpreter": sys.executable, "cluster_managed": False}
    here |= {"cluster_python": sys.executable, "cluster_address": "127.0.0.1", "cluster_backend": "process"}
    hosts = {name: {"cluster_data_dir": str(folder / name), **more} for name, more in own.items()}
    (folder / "inventory.yml").write_text(yaml.safe_dump({"cluster": {"hosts": hosts, "vars": here | variables}}))
    return folder / "inventory.yml"


def unreachable_inventory(folder: Path, **variables: object) -> Path:
    """Write an inventory of two hosts that do not answer: the controller detects every error of a run on them."""
    hosts = {f"node{n}": {"ansible_host": f"127.0.0.{n}", "ansible_port": 1} for n in (1, 2)}
    (folder / "nowhere.yml").write_text(yaml.safe_dump({"cluster": {"hosts": hosts, "vars": variables}}))
    return folder / "nowhere.yml"


def start_playbook(inventory: Path, *arguments: Path | str, stdout: Any = subprocess.DEVNULL) -> subprocess.Popen[str]:
    """Start ansible-playbook of this checkout in a session of its own; `stdout` receives its output and errors."""
    return subprocess.Popen(
        [Path(sys.executable).with_name("ansible-playbook"), "-i", inventory, *arguments],
        cwd=TOP,
        env={**os.environ, "ANSIBLE_CONFIG": str(TOP / "ansible.cfg"), "ANSIBLE_NOCOLOR": "1", "PYTHONUNBUFFERED": "1"},
        stdin=subprocess.DEVNULL, stdout=stdout, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip


def kill_playbook(process: subprocess.Popen[str] | None) -> None:
    """Kill a playbook that still runs, with its children."""
    if process and process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


class Bed:
    """Run folders and playbooks on hosts that are all this machine."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.started: list[subprocess.Popen[Any]] = []

    # Run folders

    def run_dir(self, host: int, run: str = "r") -> Path:
        return self.folder / f"node{host + 1}/runs/{run}"

    def make_run(self, hosts: int, run: str = "r", environment: str = "") -> None:
        """Create a run folder with the trainer on each host, as staging does."""
        for host in range(hosts):
            folder = self.run_dir(host, run)
            folder.mkdir(parents=True)
            with zipfile.ZipFile(folder / "trainer.zip", "w") as archive:
                archive.writestr("trainer/__init__.py", "")
                for source in sorted((TOP / "trainer/supervise").glob("*.py")):
                    archive.write(source, f"trainer/supervise/{source.name}")
            self.write_env(host, environment, run)

    def write_env(self, host: int, environment: str, run: str = "r") -> None:
        file = self.run_dir(host, run) / "env"
        file.write_text(environment)
        file.chmod(0o600)

    def command(self, rank: int, nnodes: int, steps: int, pause: float, torchrun: bool, port: int) -> list[str]:
        worker = [str(FAKE_RANK), str(steps), str(pause)]
        if not torchrun:
            return ["/usr/bin/env", f"RANK={rank}", sys.executable, *worker]
        launcher = ["-m", "torch.distributed.run", f"--nnodes={nnodes}", f"--node-rank={rank}", "--nproc-per-node=1"]
        return [sys.executable, *launcher, "--master-addr=127.0.0.1", f"--master-port={port}", *worker]

    def plan(
        self, hosts: int, steps: int = 1000, pause: float = 0.1, run: str = "r", torchrun: bool = False
    ) -> list[PlanEntry]:
        port = free_port()
        plan = [PlanEntry(f"node{i + 1}", i, [i], "127.0.0.1", backend="process") for i in range(hosts)]
        for i, entry in enumerate(plan):
            entry.run_dir = str(self.run_dir(i, run))
            entry.command = self.command(i, hosts, steps, pause, torchrun, port)
        return plan

    # Ansible

    def inventory(self, hosts: int) -> Path:
        names = {f"node{i + 1}": {"cluster_data_dir": str(self.folder / f"node{i + 1}")} for i in range(hosts)}
        variables = dict.fromkeys(("ansible_python_interpreter", "cluster_python"), sys.executable)
        variables["ansible_connection"] = "local"
        file = self.folder / f"inventory-{len(self.started)}.yml"
        file.write_text(yaml.safe_dump({"cluster": {"hosts": names, "vars": variables}}))
        return file

    def playbook(self, playbook: Path | str, hosts: int, *arguments: str) -> subprocess.Popen[str]:
        """Start ansible-playbook; the file `output` receives its output."""
        self.output = self.folder / f"output-{len(self.started)}.txt"
        with self.output.open("w") as sink:
            started = start_playbook(self.inventory(hosts), *arguments, playbook, stdout=sink)
        self.started.append(started)
        return started

    def ranks(self, plan: list[PlanEntry], *arguments: str, **follow: Any) -> subprocess.Popen[str]:
        """Start a play that launches and follows `plan`."""
        follow = {"progress_interval": 0.2} | follow
        session = {"plan": [asdict(entry) for entry in plan]}
        steps: list[dict[str, Any]] = [
            {"step": "launch", "session": session},
            {"step": "follow", "session": session, "options": follow},
        ]
        tasks = [
            {"name": step["step"].title(), "trainyard": {"command": "train"} | step, "run_once": True} for step in steps
        ]
        file = self.folder / f"play-{len(self.started)}.yml"
        file.write_text(yaml.safe_dump([{"name": "Run", "hosts": "cluster", "gather_facts": False, "tasks": tasks}]))
        return self.playbook(file, max(int(entry.host.removeprefix("node")) for entry in plan), *arguments)

    def output_text(self) -> str:
        """Return the output of the newest playbook so far."""
        return self.output.read_text()

    # The state of a run

    def state(self, rank: int, run: str = "r", host: int | None = None) -> dict[str, Any]:
        file = self.run_dir(rank if host is None else host, run) / f"state/rank{rank}.json"
        return json.loads(file.read_text()) if file.exists() else {}

    def node(self, host: int, run: str = "r") -> dict[str, Any]:
        file = self.run_dir(host, run) / "state/node.json"
        return json.loads(file.read_text()) if file.exists() else {}

    def at_step(self, rank: int, step: int = 2, run: str = "r", host: int | None = None) -> dict[str, Any]:
        """Wait until the rank has reached a step; return its state."""

        def there() -> dict[str, Any] | None:
            state = self.state(rank, run, host)
            return state if (state.get("step") or 0) >= step else None

        return until(there, what=f"step {step} of rank {rank}")

    def live_processes(self) -> list[int]:
        """Return every live process of any run of these hosts, by the variable in its environment."""
        found = []
        for entry in Path("/proc").iterdir():
            try:
                if (
                    entry.name.isdigit()
                    and f"{RUN_VARIABLE}={self.folder}".encode() in (entry / "environ").read_bytes()
                ):
                    found.append(int(entry.name))
            except OSError:
                continue
        return found

    def clean(self) -> None:
        for process in self.started:
            kill_playbook(process)
        for pid in self.live_processes():
            os.kill(pid, signal.SIGKILL)


def command_line(pid: int) -> bytes:
    """Return the words of a process, each followed by a zero byte; empty if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.fixture
def bed(tmp_path: Path) -> Iterator[Bed]:
    here = Bed(tmp_path)
    yield here
    here.clean()
