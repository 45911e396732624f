"""site.yml on hosts that are not fresh: a dead apt source, bytes in /etc/hosts, a limit of SSH, a mount, sudo that refuses."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from lab_hosts import NEEDS_LAB, Host, Lab, Played, run_playbook

pytestmark = [*NEEDS_LAB, pytest.mark.slow]

SUDOERS = "/etc/sudoers.d/90-cloud-init-users"
# What makes a host dirty, and what undoes it. root runs both inside the host.
DIRT = {
    "dead apt source": (
        "echo 'deb [trusted=yes] http://127.0.0.1:9/cuda/ stable main' > /etc/apt/sources.list.d/dead.list; apt-get -qy purge chrony",
        "rm -f /etc/apt/sources.list.d/dead.list",
    ),
    "Latin-1 in /etc/hosts": (r"printf '# B\374ro\n' >> /etc/hosts", "sed -i '/^# B.*ro$/d' /etc/hosts"),
    "/etc/hosts is a mount": ("cp /etc/hosts /run/hosts; mount --bind /run/hosts /etc/hosts", "umount /etc/hosts"),
    "ufw limits SSH": ("ufw limit ssh; ufw --force enable", "ufw delete limit ssh"),
}
SUDO = {
    "echo 'Defaults requiretty' > /etc/sudoers.d/zz": "sudo wants a terminal: add `Defaults:USER !requiretty`",
    "mv /usr/bin/sudo /usr/bin/sudo.off": "sudo is not installed: install it as root",
    f"echo 'tester ALL=(ALL) ALL' > {SUDOERS}": "sudo needs a password: give it with -K",
}


@pytest.fixture
def dirty(lab: Lab, hosts: list[Host]) -> Iterator[Host]:
    """Return the second host with all dirt of the first table on it, and clean it afterwards."""
    for make, _undo in DIRT.values():
        lab.inside(hosts[1], make)
    yield hosts[1]
    for _make, undo in DIRT.values():
        lab.inside(hosts[1], undo, check=False)
    run_playbook("reset.yml", lab.inventory)


def site(lab: Lab, *arguments: str) -> Played:
    return run_playbook("site.yml", lab.inventory, {}, "--tags", "ssh,firewall,system", *arguments)


def test_a_dirty_host_is_configured_and_says_what_was_left_out(lab: Lab, hosts: list[Host], dirty: Host) -> None:
    played = site(lab)
    assert played.rc == 0, played.stdout
    said = " ".join(played.stdout.split())
    assert (
        "an apt source does not answer" in said and "http://127.0.0.1:9/cuda" in said and "run site.yml again" in said
    )
    hosts_file = lab.inside(dirty, "cat -v /etc/hosts; ufw status")
    assert "trainyard:node1" in hosts_file and "BM-|ro" in hosts_file, "the lines of others stay"
    assert "LIMIT" in hosts_file, "the user's rule stays"
    rules = lab.inside(dirty, "ufw status numbered").splitlines()
    limit = next(number for number, line in enumerate(rules) if "LIMIT" in line)
    assert sum("trainyard: SSH" in line for line in rules[:limit]) == len(hosts), (
        "the controller and the peers come before the limit"
    )
    again = site(lab)
    assert again.rc == 0 and again.count("changed") == 0, again.stdout


def test_sudo_that_refuses_is_one_line_before_any_change(lab: Lab, hosts: list[Host]) -> None:
    lab.inside(hosts[1], f"cp -a {SUDOERS} /root/sudoers")
    for make, line in SUDO.items():
        lab.inside(hosts[1], make)
        played = site(lab)
        lab.inside(hosts[1], f"rm -f /etc/sudoers.d/zz; cp -a /root/sudoers {SUDOERS}")
        lab.inside(hosts[1], "mv /usr/bin/sudo.off /usr/bin/sudo", check=False)
        assert played.rc != 0 and f"error: {hosts[1].name}: {line}" in played.stdout, played.stdout
        assert "[ERROR]" not in played.stdout


def test_what_the_inventory_tells_is_said_first(lab: Lab, hosts: list[Host], tmp_path: Path) -> None:
    document = yaml.safe_load(lab.inventory.read_text())
    cluster = document["all"]["children"]["cluster"]
    cluster["vars"]["queue_state"] = "present"
    cluster["hosts"]["GPU_Box"] = dict(cluster["hosts"][hosts[0].name])
    (tmp_path / "inventory.yml").write_text(yaml.safe_dump(document))
    played = run_playbook("site.yml", tmp_path / "inventory.yml")
    output = played.stdout
    assert played.rc != 0 and "rename it in the inventory" in output and "both have the address" in output
    assert played.count("changed") == 0
