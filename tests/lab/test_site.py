"""site.yml on stock hosts: set-up, reset, interruptions, and hosts that join and leave."""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from installed_collection import installed_collection
from lab_hosts import NEEDS_LAB, OLLAMA, Host, Lab, inventory_with, run_playbook, small_wheels, with_ollama
from run_hosts import kill_playbook, start_playbook, until

pytestmark = [*NEEDS_LAB, pytest.mark.slow]

DATA = "/home/tester/trainyard"
# A kill takes two minutes: 3 are a test, 10 are a measurement. The seed determines the tasks at which the kills happen.
KILLS = int(os.environ.get("TRAINYARD_KILLS", "3"))
SEED = int(os.environ.get("TRAINYARD_SEED", "20261121"))
VERSION_URL = "http://{}:11434/api/version"
# Prints every file, link and folder of a host by path: kind, mode, owner, contents. Runs on the host.
STATE = r"""
import hashlib, json, os, stat, sys
out = {}
for top in sys.argv[1:]:
    for folder, folders, files in os.walk(top):
        # Mounts of the lab do not belong to the host.
        folders[:] = [name for name in folders if not os.path.ismount(os.path.join(folder, name))]
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
# Files that may differ: backups of user databases (passwd-), records of dpkg and apt about packages that may stay, time stamps
# of systemd's timers, and folders of sudo and Ansible.
OTHERS = (
    "/var/lib/dpkg", "/var/lib/apt", "/var/lib/systemd", "/var/lib/ucf", "/var/lib/sudo", "/var/lib/private",
    "/home/tester/.ansible", "/root/.ansible", "/home/tester/.cache", "/home/tester/.sudo_as_admin_successful",
    "/etc/passwd-", "/etc/shadow-", "/etc/group-", "/etc/gshadow-",
    "/var/lib/logrotate", "/run/systemd/transient/session", "/var/lib/pam", "/etc/ld.so.cache",
)  # fmt: skip


def state(lab: Lab, host: Host) -> dict[str, Any]:
    """Return the state of a host: its files, its unit files and its firewall."""
    output = lab.inside(host, f"python3 - {TOPS} <<'P'\n{STATE}\nP")
    files = {path: what for path, what in json.loads(output).items() if not path.startswith(OTHERS)}
    listed = lab.inside(host, "systemctl list-unit-files --no-legend --no-pager --state=enabled,masked,disabled")
    units = {f"unit {line.split()[0]}": line.split()[1:] for line in listed.splitlines()}
    firewall = lab.inside(host, "ufw status verbose; ufw show added")
    return files | units | {"firewall": firewall}


def packages(lab: Lab, host: Host) -> set[str]:
    return set(lab.inside(host, "dpkg-query --show --showformat '${Package}\n'").split())


def changed_by(packages: set[str]) -> set[str]:
    """Return what the installation of these packages changes on a stock host."""
    lab = Lab(f"control-{os.getpid()}")
    lab.up(hosts=1, persistent=False)
    try:
        before = state(lab, lab.hosts[0])
        install = (
            f"apt-get -qq update; DEBIAN_FRONTEND=noninteractive apt-get -qq install {' '.join(packages)} >/dev/null"
        )
        lab.inside(lab.hosts[0], install if packages else ":")
        return set(differences(before, state(lab, lab.hosts[0])))
    finally:
        lab.down()


def login_between(lab: Lab, source: Host, target: Host) -> str:
    """Return what `hostname` on `target` prints to the user of `source`; "refused" without a login."""
    command = f"runuser -u tester -- ssh -o BatchMode=yes {target.name} hostname"
    return lab.inside(source, f"timeout 20 {command} </dev/null 2>/dev/null || echo refused").strip()


def differences(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """Return the entries that differ, with both values."""
    return {
        path: (before.get(path), after.get(path))
        for path in before.keys() | after.keys()
        if before.get(path) != after.get(path)
    }


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Variables with which every role of site.yml acts on light hosts, without torch and with a simulated Ollama."""
    folder = tmp_path_factory.mktemp("everything")
    (folder / "datasets").mkdir()
    (folder / "datasets/one.jsonl").write_text('{"text": "one"}\n')
    return {
        "netplan_address": "{{ ansible_host }}/24",
        "python_env": "venv",
        "python_torch": False,
        "python_wheelhouse": str(small_wheels(folder / "wheels")),
        "cluster_python": "{{ cluster_data_dir }}/venv/bin/python",
        "nfs_dataset_delivery": "copy",
        "nfs_copy_from": str(folder / "datasets"),
    } | with_ollama(folder, OLLAMA)


def check_cluster(lab: Lab) -> None:
    """Check the result of all roles on all hosts."""
    for host in lab.hosts:
        assert "passwordauthentication no" in lab.inside(host, "sshd -T")
        assert "Status: active" in lab.inside(host, "ufw status")
        # No rollback timer is active, and no unit of the playbook is left.
        assert not lab.inside(host, "systemctl list-units --all --plain --no-legend 'trainyard-*'").strip()
        assert "trainyard" in lab.inside(host, "cat /etc/netplan/60-trainyard.yaml")
        lab.inside(
            host, f"{DATA}/venv/bin/python -I -c 'import trainer.config.run_spec'; test -s {DATA}/datasets/one.jsonl"
        )
        # From the host itself: the firewall rejects other sources.
        ask = (
            f"python3 -c 'import urllib.request as u; print(u.urlopen(\"{VERSION_URL.format(host.address)}\").read())'"
        )
        assert "0.12.3" in lab.inside(host, ask)
        # The keys of the workers copy folders of the head, and open no shell.
        assert all(login_between(lab, host, peer) != peer.name for peer in lab.hosts)


@pytest.mark.long
def test_site_and_reset_restore_stock_hosts(bare: Lab, everything: dict[str, Any], tmp_path: Path) -> None:
    """The second site.yml and the reset are those of the Ansible collection, which does the same as the checkout."""
    collection = installed_collection(tmp_path)
    stock = {host.name: state(bare, host) for host in bare.hosts}
    packages_before = {host.name: packages(bare, host) for host in bare.hosts}

    checked = run_playbook("site.yml", bare.inventory, everything, "--check --diff")
    assert checked.rc == 0, checked.stdout
    assert checked.count("changed") > 0
    for host in bare.hosts:
        assert not differences(stock[host.name], state(bare, host))

    made = run_playbook("site.yml", bare.inventory, everything)
    assert made.rc == 0, made.stdout
    check_cluster(bare)
    again = run_playbook("trainyard.cluster.site", bare.inventory, everything, environment=collection)
    assert again.rc == 0 and again.count("changed") == 0, again.stdout

    gone = run_playbook("trainyard.cluster.reset", bare.inventory, everything, environment=collection)
    assert gone.rc == 0, gone.stdout
    for host in bare.hosts:
        differs = differences(stock[host.name], state(bare, host))
        installed = changed_by(packages(bare, host) - packages_before[host.name]) if differs else set()
        remaining = {path: what for path, what in differs.items() if path not in installed}
        assert not remaining, f"{host.name}: {remaining}"
    twice = run_playbook("playbooks/reset.yml", bare.inventory, everything)
    assert twice.rc == 0 and twice.count("changed") == 0, twice.stdout


def play_site(
    inventory: Path, variables: Path, output: Path, task: int | None = None, delay: float = 0.0
) -> int | None:
    """Run site.yml and return its exit code. With `task`, kill Ansible `delay` seconds after that task, and return None."""
    with output.open("w") as sink:
        play = start_playbook(inventory, "site.yml", "-e", f"@{variables}", stdout=sink)
    try:
        until(lambda: play.poll() is not None or (task and tasks_in(output) >= task), limit=600)
        with contextlib.suppress(subprocess.TimeoutExpired):
            play.wait(delay)
        return play.poll()
    finally:
        kill_playbook(play)


def tasks_in(output: Path) -> int:
    """Return the number of tasks that ran on any host."""
    return output.read_text().count("\nTASK [")


@pytest.mark.long
def test_killed_site_converges(everything: dict[str, Any], tmp_path: Path) -> None:
    """After kills at random tasks, once or several times, site.yml repairs everything, and a further run changes nothing."""
    generator = random.Random(SEED)
    variables = tmp_path / "variables.json"
    variables.write_text(json.dumps(everything))
    with stock_hosts() as lab:
        # The number of tasks of a complete run.
        assert play_site(lab.inventory, variables, tmp_path / "complete.txt") == 0, (
            tmp_path / "complete.txt"
        ).read_text()
        total = tasks_in(tmp_path / "complete.txt")
        check_cluster(lab)
    points = generator.sample(range(1, total), KILLS)
    # Half of the kills happen on separate hosts, the other kills in sequence on the same hosts.
    alone = points[: (KILLS + 1) // 2]
    together = sorted(points[len(alone) :])
    for kill_tasks in [*([point] for point in alone), *([together] if together else [])]:
        kills = []
        with stock_hosts() as lab:
            for task in kill_tasks:
                output, delay = tmp_path / f"killed-{task}.txt", generator.uniform(0, 1)
                code = play_site(lab.inventory, variables, output, task, delay)
                last = output.read_text().rpartition("\nTASK [")[2].partition("]")[0]
                kills.append(
                    f"{'killed' if code is None else 'ended'} {delay:.2f} s after task {task} of {total}: {last}"
                )
                print(kills[-1], flush=True)
                # Completed work is skipped: a later run may end before it reaches its task.
                assert code is None or (code == 0 and task != kill_tasks[0]), f"{kills}\n{output.read_text()}"
            made = run_playbook("site.yml", lab.inventory, everything)
            assert made.rc == 0, f"{kills}\n{made.stdout}"
            again = run_playbook("site.yml", lab.inventory, everything)
            assert again.rc == 0 and again.count("changed") == 0, f"{kills}\n{again.stdout}"
            check_cluster(lab)


@contextlib.contextmanager
def stock_hosts() -> Iterator[Lab]:
    """Start a lab of two stock hosts."""
    lab = Lab(f"killed-{os.getpid()}")
    lab.up(hosts=2, persistent=False)
    try:
        yield lab
    finally:
        lab.down()


@pytest.mark.long
def test_host_joins_and_leaves(bare: Lab, tmp_path: Path) -> None:
    two = inventory_with(bare, tmp_path, {"node1": {}, "node2": {}})
    run_playbook("playbooks/reset.yml", bare.inventory)
    stock = state(bare, bare.host("node3"))
    assert run_playbook("site.yml", two).rc == 0
    lonely = {name: state(bare, bare.host(name)) for name in ("node1", "node2")}

    joined = run_playbook("playbooks/add_host.yml", bare.inventory, {"host": "node3"})
    assert joined.rc == 0, joined.stdout
    # The names and host keys of the peers: the login reaches authentication, which fails without a key.
    ask = "runuser -u tester -- ssh -o BatchMode=yes node1 hostname 2>&1 || :"
    assert "Permission denied (publickey)" in bare.inside(bare.host("node3"), ask)

    left = run_playbook("playbooks/remove_host.yml", bare.inventory, {"host": "node3"})
    assert left.rc == 0, left.stdout
    assert not differences(stock, state(bare, bare.host("node3")))
    for name, before in lonely.items():
        assert not differences(before, state(bare, bare.host(name)))


@pytest.mark.long
def test_unreachable_host_is_removed(bare: Lab, tmp_path: Path) -> None:
    from testbed import faults

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
def test_missing_and_unknown_hosts_are_errors(bare: Lab, playbook: str) -> None:
    for variables, message in (({}, "-e host=NAME"), ({"host": "node9"}, "node9")):
        played = run_playbook(playbook, bare.inventory, variables)
        assert played.rc != 0 and message in played.stdout
