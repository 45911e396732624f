"""The launch and follow steps over SSH on hosts with systemd: kinds of units, lost hosts, memory limits, and logouts."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from lab_hosts import NEEDS_LAB, Host, Lab
from ranks_site import DATA, RUN_DIR, UNIT, Site, as_user, site
from run_hosts import until
from testbed import faults

__all__ = ["site"]

pytestmark = NEEDS_LAB


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
    sudo = "/etc/sudoers.d/90-cloud-init-users"  # with it, a run gets a system unit, which protects more
    for host in lab.hosts:
        lab.inside(host, f"loginctl enable-linger tester; mv {sudo} /root/sudoers")
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
            lab.inside(host, f"loginctl disable-linger tester; mv /root/sudoers {sudo}")


@pytest.mark.parametrize("backend", [pytest.param("process", marks=pytest.mark.long), "systemd"])
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


@pytest.mark.parametrize(
    ("fault", "options", "silence"),
    [("cut", {}, r"\d+"), pytest.param("pause", {"lost_limit": 10}, r"1\d", marks=pytest.mark.long)],
)
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


def test_a_rank_that_halts_every_process_of_its_user_is_ended_from_outside(lab: Lab, site: Site) -> None:
    """Also the SSH session over which the controller follows the run."""
    playbook = site.run(site.plan())
    site.at_step(1)
    lab.inside(lab.hosts[1], "cd /; runuser -u tester -- python3 -c 'import os; os.kill(-1, 19)'")
    assert playbook.wait(90) == 2
    assert site.error().startswith(("error: node2 has not answered for ", "error: the supervisor on node2 is halted"))
    site.check_no_processes()


def test_out_of_memory_kill_is_reported(lab: Lab, site: Site) -> None:
    site.stage("FAKE=1:3:eat\n")
    faults.FAULTS["memory"].inject(lab, lab.hosts[1], "1000")
    playbook = site.run(site.plan(torchrun=True))
    assert playbook.wait(120) == 2
    assert site.error() == "error: rank 1 on node2 was killed by SIGKILL, while its machine was out of memory"
    site.check_no_processes()


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
    assert alive() == 3, "the unit outlives its supervisor"
    assert [run["left"] for run in ask(lab, host, "list", data_dir=DATA)["runs"]] == [True]
    assert "still running" in ask(lab, host, "start", command=command)["error"]
    assert ask(lab, host, "stop", wanted=True)["killed"] == 3
    assert alive() == 0
