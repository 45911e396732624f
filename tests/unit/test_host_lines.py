"""Lines for hosts in shared files: text outside of the block stays unchanged."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from run_hosts import TOP
from tables import table

from plugins.filter.cluster import host_block, inventory_problems, peer_host_keys, peer_keys, peer_names

LINE = st.text(st.characters(blacklist_categories=("Cs", "Cc"), blacklist_characters="#\u2028\u2029\x85"), min_size=1)
NAMES = ["a", "b", "c"]
LINES = st.dictionaries(st.sampled_from(NAMES), st.lists(LINE, max_size=2))


@given(first=LINES, second=LINES)
def test_lines_of_absent_hosts_stay_until_they_leave(first: dict[str, list[str]], second: dict[str, list[str]]) -> None:
    text = f"other\n{host_block('other', first, NAMES)}\nother\n"
    assert host_block(text, second, NAMES) == host_block("other", first | second, NAMES)
    assert host_block(text, {}, ["a"]) == host_block("other", {"a": first.get("a", [])}, ["a"])
    assert host_block(text, first, []) == ""


def test_lines_of_absent_hosts_stay_only_with_the_prefix() -> None:
    text = host_block("other", {"a": ["restrict key"], "b": ["from=x key"]}, ["a", "b"])
    assert host_block(text, {}, ["a", "b"], "restrict") == host_block("other", {"a": ["restrict key"]}, ["a", "b"])


@pytest.mark.slow
def test_the_block_is_written_kept_and_removed(tmp_path: Path) -> None:
    """A file that the role created is removed with its last line; another keeps its text, mode and owner."""
    own, made = tmp_path / "hosts", tmp_path / "known"
    own.write_text("127.0.0.1 localhost\n")
    own.chmod(0o640)

    def play(lines: dict[str, list[str]], members: list[str], changed: bool) -> None:
        role = {"name": "cluster", "tasks_from": "host_lines"}
        files = [{"path": str(path), "lines": lines} for path in (own, made)]
        task = {"include_role": role, "vars": {"cluster_lines": files, "cluster_line_owners": members}}
        (tmp_path / "play.yml").write_text(
            yaml.safe_dump([{"hosts": "all", "connection": "local", "gather_facts": False, "tasks": [task]}])
        )
        words = [Path(sys.executable).with_name("ansible-playbook"), "-i", "localhost,", tmp_path / "play.yml"]
        environment = {**os.environ, "ANSIBLE_CONFIG": str(TOP / "ansible.cfg"), "ANSIBLE_NOCOLOR": "1"}
        environment["ANSIBLE_PYTHON_INTERPRETER"] = sys.executable
        done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False, cwd=TOP)
        assert done.returncode == 0, done.stdout + done.stderr
        assert ("changed=0" not in done.stdout) is changed, done.stdout

    for changed in (True, False):
        play({"node1": ["10.0.0.1 node1"], "node2": ["10.0.0.2 node2"]}, ["node1", "node2"], changed)
    begin = "# BEGIN trainyard: written by site.yml, taken away by playbooks/reset.yml\n"
    lines = "10.0.0.1 node1 # trainyard:node1\n10.0.0.2 node2 # trainyard:node2\n# END trainyard\n"
    assert own.read_text() == f"{begin}{lines}127.0.0.1 localhost\n" and own.stat().st_mode & 0o777 == 0o640
    assert made.read_text() == f"{begin}# trainyard made this file\n{lines}"
    play({"node1": ["10.0.0.9 node1"]}, ["node1", "node2"], True)
    assert "10.0.0.9 node1" in own.read_text() and "10.0.0.2 node2" in own.read_text()
    play({}, [], True)
    assert own.read_text() == "127.0.0.1 localhost\n" and not made.exists()
    play({}, [], False)


HOSTS = table("host_lines")["hosts"]
SSH_INFO = {
    "stdout_lines": ["user u", "home /home/u", "key ssh-ed25519 AAAA any comment", "host ssh-ed25519 BBBB root@x"]
}


def test_names_and_keys_of_hosts() -> None:
    hosts = {name: values | {"__ssh_info": SSH_INFO} for name, values in HOSTS.items()}
    assert peer_names(hosts, list(hosts)) == {"node1": ["10.0.0.1 node1"], "node2": ["10.0.0.2 node2"], "10.0.0.3": []}
    keys = peer_host_keys(hosts, list(hosts))
    assert keys["node1"] == ["node1,10.0.0.1 ssh-ed25519 BBBB"]
    assert keys["node2"] == ["[node2]:2222,[10.0.0.2]:2222 ssh-ed25519 BBBB"]
    keys_of_users = peer_keys(hosts, list(hosts), "ssh-rsa CCCC me@desk")
    assert keys_of_users["node2"][0].startswith('from="10.0.0.1,10.0.0.2,10.0.0.3",')
    assert keys_of_users["node2"][0].endswith("ssh-ed25519 AAAA")
    assert keys_of_users["(controller)"] == ["ssh-rsa CCCC"]


def test_hosts_outside_the_play_have_no_keys() -> None:
    assert peer_host_keys(HOSTS, list(HOSTS)) == {}
    assert peer_keys(HOSTS, list(HOSTS)) == {}


def test_a_peer_key_runs_only_the_command_of_the_role() -> None:
    copies = {"node1": [], "node2": ["/srv/data"], "10.0.0.3": ["/srv/data"]}
    hosts = {name: values | {"__ssh_info": SSH_INFO, "_ssh_copies": copies[name]} for name, values in HOSTS.items()}
    # By default no host has a line, and the lines of earlier versions are removed.
    assert peer_keys(hosts, list(hosts), command=None) == {"node1": [], "node2": [], "10.0.0.3": []}
    lines = peer_keys(hosts, list(hosts), command="rsync --server")
    assert lines["node1"] == []
    assert lines["node2"] == ['restrict,from="10.0.0.1,10.0.0.2,10.0.0.3",command="rsync --server" ssh-ed25519 AAAA']


def hosts_at(**addresses: str) -> dict[str, dict[str, str]]:
    return {name: {"ansible_host": address} for name, address in addresses.items()}


@pytest.mark.parametrize(
    ("hostvars", "named"),
    [
        (hosts_at(a="10.0.0.1", b="10.0.0.2"), []),
        (hosts_at(a="127.0.0.1", b="127.0.0.2"), []),  # peers on one machine
        (hosts_at(a="10.0.0.1", b="127.0.0.1"), ["b: has the address 127.0.0.1"]),
        (hosts_at(a="10.0.0.1", b="10.0.0.1"), ["b: a and b both have the address 10.0.0.1"]),
        ({"a": {"queue_state": "present", "ansible_host": "fd00::1"}}, ["a: has the address fd00::1, at which Slurm"]),
        ({"GPU_Box": {"queue_state": "present"}}, ["GPU_Box: has a name that Slurm refuses"]),
        ({"a": {}, "b": {"ansible_connection": "local", "ansible_host": "::1"}}, ["b: has the address ::1"]),
        ({"a": {"ansible_connection": "local"}, "b": {"ansible_connection": "local", "ansible_host": "a"}}, []),
    ],
)
def test_what_the_inventory_alone_tells(hostvars: dict[str, dict[str, str]], named: list[str]) -> None:
    found = inventory_problems(hostvars, [*hostvars])
    assert len(found) == len(named) and all(line.startswith(begin) for line, begin in zip(found, named, strict=True))
