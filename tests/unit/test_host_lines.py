"""Lines for hosts in shared files: text outside of the block stays unchanged."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plugins.filter.cluster import peer_host_keys, peer_keys, peer_names
from plugins.module_utils.atomic_file import write_atomic
from plugins.module_utils.host_lines import BEGIN, update_text

LINE = st.text(st.characters(blacklist_categories=("Cs", "Cc"), blacklist_characters="#\u2028\u2029\x85"), min_size=1)
NAMES = ["a", "b", "c"]
LINES = st.dictionaries(st.sampled_from(NAMES), st.lists(LINE, max_size=2))
OTHER_TEXT = st.lists(LINE, max_size=4).map(lambda lines: "".join(f"{line}\n" for line in lines))


@given(other_text=OTHER_TEXT, lines=LINES)
def test_text_outside_the_block_is_preserved(other_text: str, lines: dict[str, list[str]]) -> None:
    updated = update_text(other_text, lines, NAMES, False)
    assert updated is not None and updated.endswith(other_text)
    assert update_text(updated, lines, NAMES, False) == updated
    assert update_text(updated, {}, [], False) == other_text


@given(other_text=OTHER_TEXT, first=LINES, second=LINES)
def test_lines_of_absent_hosts_stay_until_they_leave_the_cluster(
    other_text: str, first: dict[str, list[str]], second: dict[str, list[str]]
) -> None:
    before = update_text(other_text, first, NAMES, False)
    assert before is not None
    assert update_text(before, second, NAMES, False) == update_text(other_text, first | second, NAMES, False)
    assert update_text(before, {}, ["a"], False) == update_text(other_text, {"a": first.get("a", [])}, ["a"], False)


def test_a_created_file_is_removed_with_its_last_line() -> None:
    made = update_text("", {"a": ["one"]}, ["a"], True)
    assert made is not None and update_text(made, {}, [], False) is None
    assert update_text(made + "other\n", {}, [], False) == "other\n"
    assert update_text("", {}, ["a"], True) is None


@pytest.mark.parametrize("cut", range(1, 5))
def test_a_truncated_block_is_repaired(cut: int) -> None:
    complete = update_text("other\n", {"a": ["one"], "b": ["two"]}, ["a", "b"], False)
    assert complete is not None
    lines = complete.splitlines(keepends=True)
    text = "".join(lines[: min(cut, 3)]) + "other\n"
    assert BEGIN in text
    assert update_text(text, {"a": ["one"], "b": ["two"]}, ["a", "b"], False) == complete


def test_owner_and_mode_are_preserved(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("old")
    file.chmod(0o640)
    write_atomic(file, "new", 0o644, keep=True)
    assert file.read_text() == "new" and file.stat().st_mode & 0o777 == 0o640
    assert list(tmp_path.iterdir()) == [file]


HOSTS = {
    "node1": {"cluster_address": "10.0.0.1", "ansible_host": "10.0.0.1"},
    "node2": {"ansible_host": "10.0.0.2", "ansible_port": 2222},
    "10.0.0.3": {},
}
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
    assert keys_of_users["node2"][0].startswith('from="10.0.0.1,10.0.0.2,10.0.0.3",') and keys_of_users["node2"][
        0
    ].endswith("ssh-ed25519 AAAA")
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


def test_lines_of_absent_hosts_stay_only_with_the_prefix() -> None:
    before = update_text("", {"a": ["restrict key"], "b": ["from=x key"]}, ["a", "b"], False)
    assert before is not None
    after = update_text(before, {}, ["a", "b"], False, "restrict")
    assert after == update_text("", {"a": ["restrict key"]}, ["a", "b"], False)
