"""The launch and follow steps over SSH on hosts with systemd: kinds of units, lost hosts, memory limits, and logouts."""

from __future__ import annotations

import base64
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from lab_hosts import NEEDS_LAB, Host, Lab, inventory_with
from run_hosts import FAKE_RANK, RUN_VARIABLE, TOP, until
from testbed import faults

pytestmark = NEEDS_LAB
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
            content.writestr("trainer/distributed/__init__.py", "")
            for name in ("standby", "torchrun"):
                content.write(FAKE_RANK.with_name("fake_standby.py"), f"trainer/distributed/{name}.py")
        files = {"trainer.zip": archive.getvalue(), "env": environment.encode()}
        files |= {name: FAKE_RANK.with_name(name).read_bytes() for name in ("fake_rank.py", "hiding_rank.py")}
        script = [f"rm -rf {RUN_DIR}; mkdir -p {RUN_DIR}; cd {RUN_DIR}; umask 077"]
        script += [f"base64 -d > {name} <<'.'\n{base64.encodebytes(data).decode()}." for name, data in files.items()]
        for host in self.lab.hosts:
            self.lab.inside(host, "\n".join([*script, f"chown -R tester: {DATA}"]))

    def plan(self, steps: int = 2000, pause: float = 0.1, torchrun: bool = False) -> list[dict[str, Any]]:
        worker = [f"{RUN_DIR}/fake_rank.py", str(steps), str(pause)]
        launcher = ["-m", "torch.distributed.run", "--nnodes=3", "--nproc-per-node=1", "--master-port=29471"]
        where = [f"--master-addr={self.lab.hosts[0].address}"]
        return [
            {
                "host": host.name,
                "node_rank": rank,
                "ranks": [rank],
                "run_dir": RUN_DIR,
                "command": [sys.executable, *launcher, *where, f"--node-rank={rank}", *worker]
                if torchrun
                else ["/usr/bin/env", f"RANK={rank}", sys.executable, *worker],
            }
            for rank, host in enumerate(self.lab.hosts)
        ]

    def play(self, playbook: str, *arguments: str) -> subprocess.Popen[Any]:
        self.output = self.folder / f"output-{len(self.playbooks)}.txt"
        with self.output.open("w") as sink:
            started = subprocess.Popen(
                [Path(sys.executable).with_name("ansible-playbook"), "-i", self.inventory, *arguments, playbook],
                cwd=TOP,
                env={**os.environ, "ANSIBLE_CONFIG": str(TOP / "ansible.cfg"), "ANSIBLE_NOCOLOR": "1"},
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.playbooks.append(started)
        return started

    def run(self, plan: list[dict[str, Any]], **arguments: Any) -> subprocess.Popen[Any]:
        """Launch and follow; `backend` is for every host of the plan, the other arguments are launch options."""
        if "backend" in arguments:
            backend = arguments.pop("backend")
            plan = [entry | {"backend": backend} for entry in plan]
        steps = {name: {"step": name, "session": {"plan": plan}, "options": arguments} for name in ("launch", "follow")}
        tasks = [
            {"name": "Launch", "trainyard_run": steps["launch"], "run_once": True, "register": "up"},
            {"name": "Skew", "ansible.builtin.debug": {"msg": "skew {{ up.skew_seconds }} s"}, "run_once": True},
            {"name": "Follow", "trainyard_run": steps["follow"], "run_once": True},
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
        if playbook.poll() is None:
            os.killpg(playbook.pid, signal.SIGKILL)
            playbook.wait()
    for host in hosts:
        faults.undo(lab, host)
        lab.inside(
            host,
            f"for p in $(grep -lsaz {RUN_VARIABLE}={RUN_DIR} /proc/[0-9]*/environ); do kill -9 $(echo $p | cut -d/ -f3); done",
            False,
        )


def as_user(lab: Lab, host: Host, command: str) -> str:
    argv = [str(word) for word in lab.ssh(host)]
    return subprocess.run([*argv, command], check=True, capture_output=True, text=True).stdout.strip()


def ask(lab: Lab, host: Host, verb: str, run_dir: str = RUN_DIR, **request: Any) -> dict[str, Any]:
    """Return the answer of the supervisor's command line to a request of the login user."""
    text = json.dumps({"run_dir": run_dir} | request)
    code = f"PYTHONPATH={run_dir}/trainer.zip {sys.executable} -P -m trainer.supervise {verb} <<'.' || :\n{text}\n."
    return json.loads(as_user(lab, host, code))


def test_system_unit_with_sudo(lab: Lab, site: Site) -> None:
    playbook = site.run(site.plan(torchrun=True), progress_interval=1)
    worker = site.at_step(1)["pid"]
    host = lab.hosts[1]
    shown = as_user(lab, host, f"systemctl show -p User,KillMode,SubState,MainPID {UNIT}")
    assert "KillMode=mixed" in shown and "SubState=running" in shown
    assert f"MainPID={site.read(host, 'node')['pid']}" in shown
    assert as_user(lab, host, f"stat -c %U /proc/{worker}") == "tester"
    starts = [site.read(each, "node")["started"] for each in lab.hosts]
    print("start skew:", round(max(starts) - min(starts), 3), "s")
    assert max(starts) - min(starts) < 0.5
    began = time.monotonic()
    lab.inside(host, f"kill -9 {worker}")
    assert playbook.wait(30) == 2
    seconds = time.monotonic() - began
    print("from kill -9 to the end of the playbook:", round(seconds, 2), "s")
    assert seconds < 5
    assert site.error() == "error: rank 1 on node2 was killed by SIGKILL"
    site.check_no_processes()


def test_user_unit_with_lingering(lab: Lab, site: Site) -> None:
    for host in lab.hosts:
        lab.inside(host, "loginctl enable-linger tester")
    try:
        until(lambda: all(lab.inside(h, "ls /run/user/1000/systemd/private || true").strip() for h in lab.hosts))
        playbook = site.run(site.plan(steps=30, pause=0.05), unit_properties=["MemoryMax=4G"])
        site.at_step(1)
        show = f"XDG_RUNTIME_DIR=/run/user/1000 systemctl --user show -p SubState,MemoryMax {UNIT}"
        assert "SubState=running" in as_user(lab, lab.hosts[1], show)
        assert playbook.wait(60) == 0, site.read_output()
        assert site.read(lab.hosts[1], "node")["status"] == "finished"
        site.check_no_processes()
    finally:
        for host in lab.hosts:
            lab.inside(host, "loginctl disable-linger tester")


@pytest.mark.parametrize("backend", ["process", "systemd"])
def test_a_run_outlives_the_login_that_started_it(lab: Lab, site: Site, backend: str) -> None:
    playbook = site.run(site.plan(), backend=backend)
    step = site.at_step(2)["step"]
    os.killpg(playbook.pid, signal.SIGKILL)
    control = yaml.safe_load(site.inventory.read_text())["all"]["children"]["cluster"]["vars"][
        "ansible_control_path_dir"
    ]
    for socket in Path(control).iterdir():  # connections that ControlPersist keeps open
        subprocess.run(["ssh", "-O", "exit", "-o", f"ControlPath={socket}", "any"], capture_output=True, check=True)
    if backend == "systemd":  # with the process backend, the run belongs to the login session and ends with it
        for host in lab.hosts:
            lab.inside(host, "loginctl terminate-user tester || true")
    for host in lab.hosts:
        assert site.processes(host), f"the run has ended on {host.name}"
    site.at_step(2, step + 10)
    stopped = site.play("playbooks/stop.yml", "-e", "run=r")
    assert stopped.wait(120) == 0, site.read_output()
    assert site.read(lab.hosts[2], "rank2")["status"] == "stopped"
    site.check_no_processes()


def test_controller_reattaches(lab: Lab, site: Site) -> None:
    playbook = site.run(site.plan())
    site.at_step(0)
    os.killpg(playbook.pid, signal.SIGKILL)
    assert site.play("playbooks/status.yml").wait(60) == 0
    rows = [line.split()[:4] for line in site.read_output().splitlines() if line.startswith("r ")]
    assert rows == [["r", f"node{i + 1}", str(i), "training"] for i in range(3)]
    attached = site.play("playbooks/attach.yml", "-e", "run=r")
    following = site.output
    until(lambda: "step " in following.read_text(), 30)
    assert site.play("playbooks/stop.yml", "-e", "run=r").wait(60) == 0
    assert attached.wait(30) == 0
    site.check_no_processes()


@pytest.mark.parametrize(("fault", "options", "silence"), [("cut", {}, r"\d+"), ("pause", {"lost_limit": 10}, r"1\d")])
def test_unreachable_host_ends_the_playbook(
    lab: Lab, site: Site, fault: str, options: dict[str, Any], silence: str
) -> None:
    playbook = site.run(site.plan(), **options)
    lost = lab.hosts[1]
    site.at_step(1)
    began = time.monotonic()
    faults.FAULTS[fault].inject(lab, lost)
    assert playbook.wait(60) == 2
    seconds = time.monotonic() - began
    print(f"{fault} to the end of the playbook:", round(seconds, 2), "s")
    assert seconds < 15
    assert re.match(f"error: node2 has not answered for {silence} s", site.error())
    site.check_no_processes([lab.hosts[0], lab.hosts[2]])
    faults.FAULTS[fault].undo(lab, lost)
    assert site.play("playbooks/stop.yml", "-e", "run=r", "-e", "force=true").wait(60) == 0, site.read_output()
    site.check_no_processes()


def test_power_loss_of_a_host_ends_the_playbook(lab: Lab, site: Site) -> None:
    playbook = site.run(site.plan())
    site.at_step(2)
    began = time.monotonic()
    faults.FAULTS["crash"].inject(lab, lab.hosts[2])
    assert playbook.wait(60) == 2
    assert time.monotonic() - began < 15
    assert site.error().startswith("error: node3 has not answered for ")
    faults.FAULTS["crash"].undo(lab, lab.hosts[2])
    assert site.play("playbooks/status.yml").wait(60) == 0
    row = next(line.split() for line in site.read_output().splitlines() if line.startswith("r  ") and "node3" in line)
    assert row[3] == "lost"


def test_out_of_memory_kill_is_reported(lab: Lab, site: Site) -> None:
    site.stage("FAKE=1:3:eat\n")
    faults.FAULTS["memory"].inject(lab, lab.hosts[1], "1000")
    playbook = site.run(site.plan(torchrun=True))
    assert playbook.wait(120) == 2
    assert site.error() == "error: rank 1 on node2 was killed by SIGKILL, while its machine was out of memory"
    site.check_no_processes()


def test_end_of_a_supervisor_ends_its_unit(lab: Lab, site: Site) -> None:
    playbook = site.run(site.plan(torchrun=True))
    site.at_step(1)
    lab.inside(lab.hosts[1], f"kill -9 {site.read(lab.hosts[1], 'node')['pid']}")
    assert playbook.wait(30) == 2
    assert site.error().startswith("error: the supervisor on node2 has exited")
    site.check_no_processes()
    again = site.run(site.plan(steps=3))  # a failed unit does not prevent the next start
    assert again.wait(60) == 0, site.read_output()


def test_no_process_leaves_the_unit(lab: Lab, site: Site) -> None:
    """Neither when a rank kills its supervisor, nor when a property of the unit keeps what the supervisor leaves."""
    host = lab.hosts[0]
    site.stage(f"PYTHONPATH={RUN_DIR}/trainer.zip\n")
    command = ["/usr/bin/env", "RANK=0", sys.executable, f"{RUN_DIR}/hiding_rank.py", "2000", "0.05", "orphan"]

    def alive() -> int:
        """Return how many of the processes live that the rank has hidden and reported; -1 before that."""
        pids = f"$(tr -d '[],' < {RUN_DIR}/hidden)"
        count = f"for pid in {pids}; do ! grep -q '^State:.[^Z]' /proc/$pid/status || echo; done | wc -l"
        return int(lab.inside(host, f"[ ! -e {RUN_DIR}/hidden ] && echo -1 || {count}"))

    assert "pid" in ask(lab, host, "start", command=command)
    until(lambda: alive() == 0, 20, what="the end of the unit")
    lab.inside(host, f"rm {RUN_DIR}/hidden")
    assert "pid" in ask(lab, host, "start", command=command, properties=["KillMode=process"])
    until(lambda: ask(lab, host, "status")["status"] == "lost", 20, what="the end of the supervisor")
    assert alive() == 3 and not site.processes(host), "they have no mark of the run"
    assert [run["left"] for run in ask(lab, host, "list", data_dir=DATA)["runs"]] == [True]
    assert "still running" in ask(lab, host, "start", command=command)["error"]
    assert ask(lab, host, "stop", wanted=True)["killed"] == 3
    assert alive() == 0


def test_a_restart_from_the_standby_process_stays_in_its_unit(lab: Lab, site: Site) -> None:
    """Also that another property of the unit needs another unit, and that no unit is left after a stop."""
    host, launcher = lab.hosts[0], [sys.executable, "-m", "trainer.distributed.torchrun", "2000", "0.05"]
    site.stage(f"FAKE_RANK={RUN_DIR}/fake_rank.py\n")

    def start(**more: Any) -> tuple[int, str]:
        answer = ask(
            lab, host, "start", **{"command": launcher, "standby": 60.0, "properties": ["CPUWeight=50"]} | more
        )
        site.at_step(0)
        return answer["pid"], show(answer["unit"], "InvocationID")

    def show(unit: str, name: str) -> str:
        return lab.inside(host, f"systemctl show --value --property={name} {unit}").strip()

    def fail() -> None:
        lab.inside(host, f"kill -9 {site.read(host, 'rank0')['pid']}")
        until(lambda: site.read(host, "standby"), 10, what="the wait for the next start")

    first = start(reachable=["10.9.0.1", "10.9.0.2"])
    unit = site.read(host, "node")["unit"]
    fail()
    assert show(unit, "ActiveState") == "active" and ask(lab, host, "status")["status"] == "failed"
    assert len(site.processes(host).split()) == 2
    assert start(reachable=["10.9.0.1"]) == first
    assert "10.9.0.2" in show(unit, "IPAddressAllow"), "the unit keeps its limit, which has hosts of the run only"
    fail()
    second = start(reachable=["10.9.0.1", "10.9.0.3"])
    assert (
        second != first
        and "10.9.0.3" in show(unit, "IPAddressAllow")
        and "10.9.0.2" not in show(unit, "IPAddressAllow")
    )
    fail()
    third = start(properties=["CPUWeight=60"])
    assert third[1] != second[1] and show(unit, "CPUWeight") == "60" and not show(unit, "IPAddressAllow")
    fail()
    ask(lab, host, "stop", wanted=True)
    assert show(unit, "ActiveState") == "inactive" and not site.processes(host)


# Permissions of code in a rank: it prints the outcome of each attempt.
PROBE = """
import json, pathlib, socket, subprocess, sys

def attempt(action):
    try:
        return str(action() or "works")
    except (OSError, subprocess.SubprocessError) as error:
        return type(error).__name__

def connect(address):
    socket.create_connection((address, 22), 3).close()

home = pathlib.Path.home()
print(json.dumps({
    "sudo": attempt(lambda: subprocess.run(["sudo", "-n", "true"], capture_output=True, check=True) and ""),
    "keys": attempt(lambda: list((home / ".ssh").iterdir()) and ""),
    "profile": attempt(lambda: (home / ".profile").touch()),
    "cache": attempt(lambda: (home / ".cache/probe").touch()),
    "data": attempt(lambda: pathlib.Path("probe").touch()),
    "bus": attempt(lambda: list(pathlib.Path("/run/dbus").iterdir()) and ""),
    "shm": attempt(lambda: pathlib.Path("/dev/shm/probe").touch()),
    "peer": attempt(lambda: connect(sys.argv[1])),
    "outside": attempt(lambda: connect(sys.argv[2])),
}))
"""
CLOSED = {
    "sudo": "CalledProcessError",
    "keys": "PermissionError",
    "profile": "OSError",
    "cache": "works",
    "data": "works",
}
CLOSED |= {"bus": "PermissionError", "shm": "works", "peer": "works", "outside": "TimeoutError"}


@pytest.mark.parametrize(
    ("isolated", "properties", "changed"),
    [
        (True, [], {}),
        (False, [], {"outside": "ConnectionRefusedError"}),  # a run with loggers=wandb
        (True, ["ProtectHome=no", "IPAddressDeny="], {"profile": "works", "outside": "ConnectionRefusedError"}),
    ],
    ids=["isolated", "open", "unit_properties"],
)
def test_what_a_rank_may_do(
    lab: Lab, site: Site, isolated: bool, properties: list[str], changed: dict[str, str]
) -> None:
    addresses = [host.address for host in lab.hosts]
    outside = addresses[0].rpartition(".")[0] + ".1"  # the switch, where nothing listens
    plan = [
        entry
        | {"command": [sys.executable, "-c", PROBE, addresses[1 - place], outside]}
        | {"peers": addresses, "isolated": isolated}
        for place, entry in enumerate(site.plan()[:2])
    ]
    assert site.run(plan, unit_properties=properties).wait(90) == 0, site.read_output()
    for host, rank in zip(lab.hosts[:2], (0, 1), strict=True):
        log = lab.inside(host, f"cat {RUN_DIR}/logs/torchrun.{rank}.log").splitlines()
        assert json.loads(log[-1]) == CLOSED | changed


@pytest.mark.parametrize(("isolated", "limit"), [(True, 3.0), (False, 3.5)])
def test_exposure_of_a_unit(lab: Lab, site: Site, isolated: bool, limit: float) -> None:
    plan = [site.plan()[0] | {"peers": [lab.hosts[0].address], "isolated": isolated}]
    site.run(plan)
    site.at_step(0)
    found = lab.inside(
        lab.hosts[0],
        f"systemd-analyze security --no-pager $(systemctl list-units --plain --no-legend {UNIT} | cut -d' ' -f1)",
    )
    exposure = re.search(r"Overall exposure level for .*: ([0-9.]+)", found)
    assert exposure and float(exposure[1]) < limit, found
    assert site.play("playbooks/stop.yml", "-e", "run=r", "-e", "force=true").wait(60) == 0, site.read_output()
