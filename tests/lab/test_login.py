"""The login user of a host, on real hosts: keys between hosts, sshd, links in the user's folders, log rotation."""

from __future__ import annotations

import hashlib
import ipaddress
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from lab_hosts import NEEDS_LAB, Host, Lab, Played, inventory_with, remove_role, run_playbook

pytestmark = [*NEEDS_LAB, pytest.mark.slow]

SSH = "runuser -u tester -- ssh -o BatchMode=yes -o ConnectTimeout=10"
KEY = "/home/tester/.ssh/trainyard_ed25519"
COPY = {"nfs_dataset_delivery": "copy"}
FOLDER = "/etc/ssh/sshd_config.d"
HARDENED = "PermitRootLogin no\nMaxAuthTries 3\nLoginGraceTime 20\n"


@pytest.fixture(scope="module")
def lab(bare: Lab) -> Lab:
    """Stock hosts: these tests change the login of the hosts."""
    return bare


def site(lab: Lab, tags: str, **variables: Any) -> Played:
    played = run_playbook("site.yml", lab.inventory, variables, f"--tags {tags}")
    assert played.rc == 0, played.stdout
    return played


def login(lab: Lab, source: Host, target: Host, command: str = "hostname") -> str:
    """Return what the user of `source` gets from a command on `target`, or "refused"."""
    return lab.inside(
        source, f"timeout 30 {SSH} {target.name} {command} </dev/null 2>/dev/null || echo refused"
    ).strip()


def rsync(lab: Lab, host: Host, *words: str) -> str:
    """Return what rsync prints for the user of a host."""
    return lab.inside(
        host, f"cd /tmp; timeout 30 runuser -u tester -- rsync -e 'ssh -o BatchMode=yes' {' '.join(words)} 2>&1 || :"
    )


def authorized(lab: Lab, host: Host) -> str:
    return lab.inside(host, "cat /home/tester/.ssh/authorized_keys")


@pytest.mark.long
def test_peers_have_no_keys_unless_a_role_copies_files(lab: Lab, tmp_path: Path) -> None:
    one, two, three = lab.hosts
    # A cluster as version 0.2.0 left it: every host logs in to every other one.
    former = site(lab, "ssh", ssh_peer_keys=True)
    assert former.count("changed") > 0
    assert login(lab, two, one) == "node1" and login(lab, one, three) == "node3"

    site(lab, "ssh")
    for source in lab.hosts:
        assert "absent" in lab.inside(source, f"ls {KEY} 2>/dev/null || echo absent")
        assert "from=" not in authorized(lab, source)
        for target in lab.hosts:
            assert source == target or login(lab, source, target) == "refused"
    assert site(lab, "ssh").count("changed") == 0

    # With datasets to copy, the key of a worker reads this folder on the head and nothing else.
    (tmp_path / "data").mkdir()
    (tmp_path / "data/one.jsonl").write_text('{"text": "one"}\n')
    variables = COPY | {"nfs_copy_from": str(tmp_path / "data")}
    site(lab, "ssh,nfs", **variables)
    data = "/home/tester/trainyard/datasets"
    assert lab.inside(three, f"cat {data}/one.jsonl") == '{"text": "one"}\n'
    assert site(lab, "ssh,nfs", **variables).count("changed") == 0
    assert authorized(lab, one).count('restrict,from="') == 2 and "restrict" not in authorized(lab, two)
    assert login(lab, one, two) == login(lab, three, two) == "refused"
    assert "node1" not in login(lab, two, one)
    module = f"node1::{hashlib.sha1(data.encode()).hexdigest()}"
    assert "one.jsonl" in rsync(lab, two, f"{module}/")
    for source in (f"{module}/../../.ssh/authorized_keys", "node1:/etc/passwd", "node1::", "node1::etc/passwd"):
        stolen = rsync(lab, two, source, "/tmp/stolen/")
        assert lab.inside(two, "ls /tmp/stolen 2>/dev/null || :") == "", stolen
    rsync(lab, two, "/etc/hostname", f"{module}/")
    assert lab.inside(one, f"ls -A {data}").split() == ["one.jsonl"], "the folder is read only"
    forward = lab.inside(two, f"timeout 20 {SSH} -W localhost:22 node1 </dev/null 2>&1 || :")
    assert "SSH-2.0" not in forward, forward

    assert run_playbook("playbooks/reset.yml", lab.inventory, variables).rc == 0
    for host in lab.hosts:
        assert "trainyard" not in authorized(lab, host)
        assert "absent" in lab.inside(host, f"ls {KEY} /etc/trainyard-rsyncd.conf 2>/dev/null || echo absent")


def test_passwords_stay_where_a_new_connection_accepts_no_key(lab: Lab, tmp_path: Path) -> None:
    """Although the play itself logs in, over a connection that was opened before."""
    two = lab.hosts[1]
    opened = ["-o", f"ControlPath={tmp_path}/opened"]
    command = [*map(str, lab.ssh(two)), *opened, "-o", "ControlMaster=yes", "-N"]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL) as connection:
        try:
            lab.wait((tmp_path / "opened").exists, "node2 accepts no login")
            # Another test may have left the drop-in of the role.
            settings = "PasswordAuthentication yes\nPubkeyAuthentication no\n"
            lab.inside(two, f"rm -f {FOLDER}/10-trainyard.conf; printf '{settings}' > {FOLDER}/01-no-keys.conf")
            lab.inside(two, "systemctl reload ssh")
            before = sshd(lab, two)
            inventory = inventory_with(lab, tmp_path, ansible_ssh_extra_args=" ".join(opened))
            played = run_playbook("site.yml", inventory, {}, "--tags ssh --limit node2")
            assert played.rc != 0
            assert "cannot log in to node2 with a key, so password authentication stays enabled" in played.stdout
            assert sshd(lab, two) == before and before["passwordauthentication"] == "yes"
        finally:
            lab.inside(two, f"rm {FOLDER}/01-no-keys.conf; systemctl reload ssh")
            connection.terminate()
    assert run_playbook("playbooks/reset.yml", lab.inventory, {}, "--tags ssh").rc == 0


@pytest.mark.long
def test_hosts_by_name_by_address_and_behind_a_jump_host(lab: Lab, tmp_path: Path) -> None:
    """Only ssh knows where they are. Roles prove the login with a key at each, and our own SSH reaches it, too."""
    one, two, three = lab.hosts
    name = f"0x{int(ipaddress.ip_address(three.address)):x}"  # which the resolver knows without a server
    (tmp_path / "config").write_text(
        f"Host box\nHostName 127.0.0.1\nPort 2222\nProxyJump jump\nHostKeyAlias {two.address}\n"
        f"Host jump\nHostName {two.address}\nHost {name}\nHostKeyAlias {three.address}\n"
        f"Host *\nUser tester\nIdentityFile {lab.key}\nUserKnownHostsFile {lab.known_hosts}\n"
    )
    document = yaml.safe_load(lab.inventory.read_text())
    groups = document["all"]["children"]
    names = {one.name: one.address, two.name: "box", three.name: name}
    for group in groups.values():
        group["hosts"] = {names[host]: values for host, values in group["hosts"].items()}
    groups["cluster"]["vars"]["ansible_ssh_common_args"] += f" -F {tmp_path}/config -o 'SetEnv=\"LAB=two words\"'"
    for values in groups["cluster"]["hosts"].values():
        del values["ansible_host"]
    (tmp_path / "inventory.yml").write_text(yaml.safe_dump(document))
    for host in lab.hosts:
        lab.inside(host, f"mv {FOLDER}/50-cloud-init.conf /root/; systemctl reload ssh")
    lab.inside(two, f"printf 'Port 22\nPort 2222\n' > {FOLDER}/02-ports.conf; systemctl restart ssh")
    try:
        assert {sshd(lab, host)["passwordauthentication"] for host in lab.hosts} == {"yes"}
        played = run_playbook("site.yml", tmp_path / "inventory.yml", {}, "--tags ssh")
        assert played.rc == 0, played.stdout
        assert {sshd(lab, host)["passwordauthentication"] for host in lab.hosts} == {"no"}
        shown = run_playbook("playbooks/status.yml", tmp_path / "inventory.yml")
        assert shown.rc == 0 and "error" not in shown.stdout and "no run on" in shown.stdout, shown.stdout
        assert remove_role("ssh", lab.inventory, tmp_path).rc == 0
    finally:
        lab.inside(two, f"rm {FOLDER}/02-ports.conf; systemctl restart ssh")
        for host in lab.hosts:
            lab.inside(host, f"mv /root/50-cloud-init.conf {FOLDER}/; systemctl reload ssh")


def test_sshd_of_a_hardened_host_is_not_weakened(lab: Lab, tmp_path: Path) -> None:
    """And one that accepts passwords, as the distribution delivers it, no longer does."""
    two, three = lab.hosts[1:]
    inventory = inventory_with(lab, tmp_path, {"node2": {}, "node3": {}})
    lab.inside(two, f"printf '{HARDENED}' > {FOLDER}/50-hardened.conf; systemctl reload ssh")
    lab.inside(three, f"mv {FOLDER}/50-cloud-init.conf /root/; systemctl reload ssh")
    try:
        before = {host.name: sshd(lab, host) for host in (two, three)}
        assert before["node3"]["passwordauthentication"] == "yes"
        played = run_playbook("site.yml", inventory, {}, "--tags ssh")
        assert played.rc == 0, played.stdout
        shown = " ".join(played.stdout.split())  # the output breaks long lines
        assert "node2 would become weaker, so its own settings stay: PermitRootLogin no, MaxAuthTries 3" in shown
        hardened, stock = sshd(lab, two), sshd(lab, three)
        assert [hardened[key] for key in ("permitrootlogin", "maxauthtries", "logingracetime")] == ["no", "3", "20"]
        assert hardened["x11forwarding"] == "no" and hardened["clientaliveinterval"] == "30"
        assert (stock["passwordauthentication"], stock["maxauthtries"], stock["logingracetime"]) == ("no", "6", "30")
        assert run_playbook("site.yml", inventory, {}, "--tags ssh").count("changed") == 0
        assert run_playbook("playbooks/reset.yml", inventory, {}, "--tags ssh").rc == 0
        assert {host.name: sshd(lab, host) for host in (two, three)} == before
    finally:
        lab.inside(three, f"mv /root/50-cloud-init.conf {FOLDER}/; systemctl reload ssh")
        lab.inside(two, f"rm {FOLDER}/50-hardened.conf; systemctl reload ssh")


def sshd(lab: Lab, host: Host) -> dict[str, str]:
    lines = lab.inside(host, "sshd -T").splitlines()
    return {name: value for name, _, value in (line.partition(" ") for line in lines)}


@pytest.mark.long
def test_links_of_the_login_user_do_not_redirect_root(lab: Lab, tmp_path: Path) -> None:
    """The login user, without sudo in this test, replaces its own folders with links to files of root."""
    _, two, three = lab.hosts
    state = (
        "stat -c '%n %U %a' /root /etc /etc/shadow /root/data 2>&1; sha256sum /etc/shadow; ls -A /root/.ssh 2>&1 || :"
    )
    for host in (two, three):
        lab.inside(host, "mkdir -p /root/data; rm -rf /home/tester/trainyard")
    before = {host.name: lab.inside(host, state) for host in (two, three)}
    user = "runuser -u tester -- "
    lab.inside(
        two,
        f"cp -a /home/tester/.ssh/authorized_keys /root/kept; {user}ln -sf /etc/shadow /home/tester/.ssh/authorized_keys",
    )
    lab.inside(two, "mkdir -p /etc/ssh/lab; cp /root/kept /etc/ssh/lab/tester; chmod 644 /etc/ssh/lab/tester")
    lab.inside(
        two, "echo 'AuthorizedKeysFile /etc/ssh/lab/%u' > /etc/ssh/sshd_config.d/00-lab.conf; systemctl reload ssh"
    )
    lab.inside(three, f"{user}ln -s /root/data /home/tester/trainyard")
    try:
        played = run_playbook("site.yml", inventory_with(lab, tmp_path, **COPY), None, "--tags ssh,storage,nfs")
        assert played.rc != 0
        assert "cannot write /home/tester/.ssh/authorized_keys: Permission denied" in played.stdout, played.stdout
        assert "cannot create /home/tester/trainyard for tester" in played.stdout, played.stdout
        gone = run_playbook("playbooks/reset.yml", lab.inventory, {"storage_remove_runs": True})
        assert "Traceback" not in played.stdout + gone.stdout
        assert {host.name: lab.inside(host, state) for host in (two, three)} == before
    finally:
        lab.inside(
            two,
            "rm -rf /etc/ssh/sshd_config.d/00-lab.conf /etc/ssh/lab; mv /root/kept /home/tester/.ssh/authorized_keys",
        )
        lab.inside(two, "systemctl reload ssh; rmdir /root/data")
        lab.inside(three, "rm -f /home/tester/trainyard; rmdir /root/data")


@pytest.mark.long
def test_the_log_rotation_of_earlier_versions_is_removed(lab: Lab) -> None:
    rule, variables = "/etc/logrotate.d/trainyard", {"system_time": False, "system_tcmalloc": False}
    site(lab, "system", **variables)
    lab.inside(lab.hosts[1], f"echo '/home/tester/trainyard/runs/*/logs/*.log {{ copytruncate }}' > {rule}")
    assert site(lab, "system", **variables).count("changed") == 1
    assert lab.inside(lab.hosts[1], f"test -e {rule} || echo none").strip() == "none"
    assert site(lab, "system", **variables).count("changed") == 0
