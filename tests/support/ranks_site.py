"""A run of `fake_rank.py` on the hosts of a lab, over SSH and under systemd."""

import base64
import io
import json
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from lab_hosts import Host, Lab, inventory_with
from run_hosts import FAKE_RANK, RUN_VARIABLE, TOP, kill_playbook, start_playbook, until
from testbed import faults

from trainyard.wire.remote_archive import remote_command, remote_input

DATA = "/home/tester/trainyard"
RUN_DIR = f"{DATA}/runs/r"
UNIT = "'trainyard-r-*.service'"


class Site:
    """A run of `fake_rank.py` on the hosts of a lab."""

    def __init__(self, lab: Lab, folder: Path) -> None:
        self.lab, self.folder = lab, folder
        self.inventory = inventory_with(lab, folder)
        self.playbooks: list[subprocess.Popen[Any]] = []

    def stage(self, environment: str = "") -> None:
        """Stage the run: copy the trainer to each host; the user of the hosts owns the files."""
        archive = io.BytesIO()
        with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as content:
            content.writestr("trainer/__init__.py", "")
            for source in sorted((TOP / "trainer/supervise").glob("*.py")):
                content.write(source, f"trainer/supervise/{source.name}")
        files = {"trainer.zip": archive.getvalue(), "env": environment.encode()}
        files |= {name: FAKE_RANK.with_name(name).read_bytes() for name in ("fake_rank.py", "hiding_rank.py")}
        script = [f"rm -rf {RUN_DIR}; mkdir -p {RUN_DIR}; cd {RUN_DIR}; umask 077"]
        script += [f"base64 -d > {name} <<'.'\n{base64.encodebytes(data).decode()}." for name, data in files.items()]
        for host in self.lab.hosts:
            self.lab.inside(host, "\n".join([*script, f"chown -R tester: {DATA}"]))

    def plan(self, steps: int = 2000, pause: float = 0.1, torchrun: bool = False) -> list[dict[str, Any]]:
        worker = [f"{RUN_DIR}/fake_rank.py", str(steps), str(pause)]
        launcher = ["-m", "torch.distributed.run", "--nnodes=3", "--nproc-per-node=1", "--master-port=29471"]
        launcher += [f"--master-addr={self.lab.hosts[0].address}"]
        plan: list[dict[str, Any]] = []
        for rank, host in enumerate(self.lab.hosts):
            alone = ["/usr/bin/env", f"RANK={rank}", sys.executable]
            command = [sys.executable, *launcher, f"--node-rank={rank}"] if torchrun else alone
            plan.append({"host": host.name, "node_rank": rank, "ranks": [rank], "run_dir": RUN_DIR})
            plan[-1]["command"] = [*command, *worker]
        return plan

    def play(self, playbook: str, *arguments: str) -> subprocess.Popen[Any]:
        self.output = self.folder / f"output-{len(self.playbooks)}.txt"
        with self.output.open("w") as sink:
            started = start_playbook(self.inventory, *arguments, playbook, stdout=sink)
        self.playbooks.append(started)
        return started

    def run(self, plan: list[dict[str, Any]], **arguments: Any) -> subprocess.Popen[Any]:
        """Launch and follow; `backend` is for every host of the plan, the other arguments are launch options."""
        if "backend" in arguments:
            backend = arguments.pop("backend")
            plan = [entry | {"backend": backend} for entry in plan]
        steps = {
            name: {"command": "train", "step": name, "session": {"plan": plan}, "options": arguments}
            for name in ("launch", "follow")
        }
        tasks = [
            {"name": "Launch", "trainyard": steps["launch"], "run_once": True, "register": "up"},
            {"name": "Skew", "ansible.builtin.debug": {"msg": "skew {{ up.skew_seconds }} s"}, "run_once": True},
            {"name": "Follow", "trainyard": steps["follow"], "run_once": True},
        ]
        file = self.folder / f"play-{len(self.playbooks)}.yml"
        file.write_text(yaml.safe_dump([{"name": "Run", "hosts": "cluster", "gather_facts": False, "tasks": tasks}]))
        return self.play(str(file))

    def read_output(self) -> str:
        return self.output.read_text()

    def error(self) -> str:
        (line,) = [line for line in self.read_output().splitlines() if line.startswith("error: ")]
        return line

    def read(self, host: Host, name: str) -> dict[str, Any]:
        return json.loads(self.lab.inside(host, f"cat {RUN_DIR}/state/{name}.json 2>/dev/null || echo '{{}}'"))

    def at_step(self, rank: int, step: int = 2) -> dict[str, Any]:
        """Wait until the rank reaches that step, for up to 240 s. Fails if its part of the run ends earlier."""

        def reached_state() -> dict[str, Any] | None:
            node = self.read(self.lab.hosts[rank], "node")
            state = self.read(self.lab.hosts[rank], f"rank{rank}")
            if (state.get("step") or 0) >= step:
                return state
            assert not node.get("ended"), f"the run ended before step {step}: {node}, {state}"
            return None

        return until(reached_state, 240, what=f"step {step} of rank {rank}")

    def processes(self, host: Host) -> str:
        return self.lab.inside(host, f"grep -lsaz {RUN_VARIABLE}={RUN_DIR} /proc/[0-9]*/environ || true").strip()

    def check_no_processes(self, hosts: list[Host] | None = None) -> None:
        for host in hosts or self.lab.hosts:
            assert not self.processes(host), host.name


@pytest.fixture
def site(lab: Lab, hosts: list[Host], tmp_path: Path) -> Iterator[Site]:
    here = Site(lab, tmp_path)
    here.stage()
    yield here
    for playbook in here.playbooks:
        kill_playbook(playbook)
    for host in hosts:
        faults.undo(lab, host)
        lab.inside(
            host,
            f"for p in $(grep -lsaz {RUN_VARIABLE}={RUN_DIR} /proc/[0-9]*/environ); do kill -9 $(echo $p | cut -d/ -f3); done",
            False,
        )


def export(lab: Lab, host: Host, run_dir: str, weights: str, quantize: str) -> subprocess.CompletedProcess[bytes]:
    """Export a run as GGUF on its host, by the trainer that is stored there; `weights`: the digest of the adapter."""
    trainer = lab.inside(host, f"ls -t {DATA}/store/trainers/*.zip | head -n 1").strip()
    wanted = {"run_dir": run_dir, "weights": weights, "quantize": quantize, "converter": "", "converter_id": "x"}
    request = {"trainer": trainer, "digest": lab.inside(host, f"sha256sum {trainer}").split()[0], "run_dir": run_dir}
    request |= {"reads": [], "backend": "auto", "limit": 300, "input": wanted}
    command = [*map(str, lab.ssh(host)), remote_command("gguf_export", sys.executable)]
    return subprocess.run(command, input=remote_input(request, "gguf_export"), capture_output=True, timeout=300)


def as_user(lab: Lab, host: Host, command: str) -> str:
    argv = [str(word) for word in lab.ssh(host)]
    return subprocess.run([*argv, command], check=True, capture_output=True, text=True).stdout.strip()
