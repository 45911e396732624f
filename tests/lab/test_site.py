"""site.yml as a whole, on hosts as they come: from stock to a cluster and back, and through every kind of interruption."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from bed import until
from lab_hosts import NEEDS_LAB, REPO, Host, Lab, run_playbook

pytestmark = [*NEEDS_LAB, pytest.mark.slow, pytest.mark.long]

# A quarter of a minute each: ten are a measurement, three a test.
KILLS = int(os.environ.get("TRAINYARD_KILLS", "3"))
# What every file, link and folder of a host is, by path: kind, mode, owner, contents. Run on the host.
STATE = r"""
import hashlib, json, os, stat, sys
out = {}
for top in sys.argv[1:]:
    for folder, folders, files in os.walk(top):
        for name in folders + files:
            path = os.path.join(folder, name)
            s = os.lstat(path)
            entry = [oct(s.st_mode), s.st_uid, s.st_gid]
            if stat.S_ISREG(s.st_mode):
                entry.append(hashlib.sha256(open(path, "rb").read()).hexdigest())
            elif stat.S_ISLNK(s.st_mode):
                entry.append(os.readlink(path))
            out[path] = entry
print(json.dumps(out))
"""
TOPS = "/etc /home /srv /root /opt /usr/local /var/lib /run/systemd/transient /run/systemd/system"
# dpkg and apt write down packages, which may stay; systemd writes down when timers ran; sudo and Ansible leave a folder.
OTHERS = (
    "/var/lib/dpkg", "/var/lib/apt", "/var/lib/systemd", "/var/lib/ucf", "/var/lib/sudo", "/var/lib/private",
    "/home/yard/.ansible", "/root/.ansible", "/home/yard/.cache", "/home/yard/.sudo_as_admin_successful",
    "/var/lib/logrotate", "/run/systemd/transient/session", "/var/lib/pam", "/etc/ld.so.cache",
)  # fmt: skip


def state(lab: Lab, host: Host) -> dict[str, Any]:
    """What the host is: its files, what systemd is to start, what the firewall says."""
    told = lab.inside(host, f"python3 - {TOPS} <<'P'\n{STATE}\nP")
    files = {path: what for path, what in json.loads(told).items() if not path.startswith(OTHERS)}
    units = lab.inside(host, "systemctl list-unit-files --no-legend --no-pager --state=enabled,masked,disabled")
    firewall = lab.inside(host, "ufw status verbose; ufw show added")
    return files | {"units": sorted(units.splitlines()), "firewall": firewall}


def differences(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """What is not as it was; files of packages that came meanwhile are no difference."""
    return {
        path: (before.get(path), after.get(path))
        for path in before.keys() | after.keys()
        if before.get(path) != after.get(path)
    }


def test_from_stock_to_a_cluster_and_back(bare: Lab) -> None:
    stock = {host.name: state(bare, host) for host in bare.hosts}

    looked = run_playbook("site.yml", bare.inventory, None, "--check --diff")
    assert looked.rc == 0, looked.stdout
    assert looked.count("changed") > 0
    for host in bare.hosts:
        assert not differences(stock[host.name], state(bare, host))

    made = run_playbook("site.yml", bare.inventory)
    assert made.rc == 0, made.stdout
    again = run_playbook("site.yml", bare.inventory)
    assert again.rc == 0 and again.count("changed") == 0, again.stdout
    for host in bare.hosts:
        for peer in bare.hosts:
            if peer != host:
                word = f"runuser -u yard -- ssh -o BatchMode=yes {peer.name} hostname"
                assert bare.inside(host, word).strip() == peer.name

    gone = run_playbook("playbooks/reset.yml", bare.inventory)
    assert gone.rc == 0, gone.stdout
    for host in bare.hosts:
        assert not differences(stock[host.name], state(bare, host)), host.name
    twice = run_playbook("playbooks/reset.yml", bare.inventory)
    assert twice.rc == 0 and twice.count("changed") == 0, twice.stdout


def killed_at(playbook: str, inventory: Path, task: int, folder: Path) -> bool:
    """Play, and kill Ansible with everything below it at its task number `task`; False if it ended before."""
    output = folder / f"killed-{task}.txt"
    with output.open("w") as sink:
        play = subprocess.Popen(
            [Path(sys.executable).with_name("ansible-playbook"), "-i", inventory, playbook],
            cwd=REPO,
            env={**os.environ, "ANSIBLE_CONFIG": str(REPO / "ansible.cfg"), "ANSIBLE_NOCOLOR": "1"},
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        until(lambda: play.poll() is not None or output.read_text().count("\nTASK [") >= task, limit=300)
        return play.poll() is None
    finally:
        if play.poll() is None:
            os.killpg(play.pid, signal.SIGKILL)
        play.wait()


def test_a_killed_run_converges(bare: Lab, tmp_path: Path) -> None:
    dice = random.Random(20261121)
    run_playbook("playbooks/reset.yml", bare.inventory)
    tasks = dice.sample(range(5, 60), KILLS)
    kills = sum(killed_at("site.yml", bare.inventory, task, tmp_path) for task in tasks)
    assert kills >= (KILLS + 1) // 2
    made = run_playbook("site.yml", bare.inventory)
    assert made.rc == 0, made.stdout
    again = run_playbook("site.yml", bare.inventory)
    assert again.rc == 0 and again.count("changed") == 0, again.stdout
    for host in bare.hosts:
        assert "passwordauthentication no" in bare.inside(host, "sshd -T")
        assert "Status: active" in bare.inside(host, "ufw status")


def without(lab: Lab, name: str, folder: Path) -> Path:
    """The lab's inventory without one host."""
    document = yaml.safe_load(lab.inventory.read_text())
    for group in document["all"]["children"].values():
        group["hosts"].pop(name, None)
    (folder / "inventory.yml").write_text(yaml.safe_dump(document, sort_keys=False))
    return folder / "inventory.yml"


def test_a_host_joins_and_leaves(bare: Lab, tmp_path: Path) -> None:
    two = without(bare, "node3", tmp_path)
    run_playbook("playbooks/reset.yml", bare.inventory)
    stock = state(bare, bare.host("node3"))
    assert run_playbook("site.yml", two).rc == 0
    lonely = {name: state(bare, bare.host(name)) for name in ("node1", "node2")}

    joined = run_playbook("playbooks/add_host.yml", bare.inventory, {"host": "node3"})
    assert joined.rc == 0, joined.stdout
    assert bare.inside(bare.host("node3"), "runuser -u yard -- ssh -o BatchMode=yes node1 hostname").strip() == "node1"

    left = run_playbook("playbooks/remove_host.yml", bare.inventory, {"host": "node3"})
    assert left.rc == 0, left.stdout
    assert not differences(stock, state(bare, bare.host("node3")))
    for name, before in lonely.items():
        assert not differences(before, state(bare, bare.host(name)))


def test_a_dead_host_leaves(bare: Lab, tmp_path: Path) -> None:
    from yard import faults

    host = bare.host("node3")
    assert run_playbook("site.yml", bare.inventory).rc == 0
    faults.inject(bare, host, "cut")
    try:
        left = run_playbook("playbooks/remove_host.yml", bare.inventory, {"host": "node3"})
        assert left.rc == 0, left.stdout
        assert "node3" not in bare.inside(bare.host("node1"), "cat /etc/hosts /etc/ssh/ssh_known_hosts; ufw status")
    finally:
        faults.undo(bare, host)


@pytest.mark.parametrize("playbook", ["playbooks/add_host.yml", "playbooks/remove_host.yml"])
def test_nobody_and_strangers_are_refused(bare: Lab, playbook: str) -> None:
    for said, word in (({}, "-e host=NAME"), ({"host": "node9"}, "node9")):
        played = run_playbook(playbook, bare.inventory, said)
        assert played.rc != 0 and word in played.stdout
