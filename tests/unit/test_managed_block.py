"""The module that keeps lines in other people's files: what is not ours stays, byte for byte."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plugins.filter.cluster import peer_host_keys, peer_keys, peer_names
from plugins.module_utils.atomic_file import write_atomic
from plugins.modules.managed_block import BEGIN, update_text

LINE = st.text(st.characters(blacklist_categories=("Cs", "Cc"), blacklist_characters="#\u2028\u2029\x85"), min_size=1)
NAMES = ["a", "b", "c"]
LINES = st.dictionaries(st.sampled_from(NAMES), st.lists(LINE, max_size=2))
THEIRS = st.lists(LINE, max_size=4).map(lambda lines: "".join(f"{line}\n" for line in lines))


@given(theirs=THEIRS, lines=LINES)
def test_what_is_theirs_comes_back_byte_for_byte(theirs: str, lines: dict[str, list[str]]) -> None:
    ours = update_text(theirs, lines, NAMES, False)
    assert ours is not None and ours.endswith(theirs)
    assert update_text(ours, lines, NAMES, False) == ours
    assert update_text(ours, {}, [], False) == theirs


@given(theirs=THEIRS, first=LINES, second=LINES)
def test_lines_of_who_is_not_spoken_of_stay_until_they_leave(
    theirs: str, first: dict[str, list[str]], second: dict[str, list[str]]
) -> None:
    before = update_text(theirs, first, NAMES, False)
    assert before is not None
    assert update_text(before, second, NAMES, False) == update_text(theirs, first | second, NAMES, False)
    assert update_text(before, {}, ["a"], False) == update_text(theirs, {"a": first.get("a", [])}, ["a"], False)


def test_a_file_that_was_made_for_our_lines_goes_with_them() -> None:
    made = update_text("", {"a": ["one"]}, ["a"], True)
    assert made is not None and update_text(made, {}, [], False) is None
    assert update_text(made + "theirs\n", {}, [], False) == "theirs\n"
    assert update_text("", {}, ["a"], True) is None


@pytest.mark.parametrize("cut", range(1, 5))
def test_a_block_that_was_cut_short_is_written_again(cut: int) -> None:
    whole = update_text("theirs\n", {"a": ["one"], "b": ["two"]}, ["a", "b"], False)
    assert whole is not None
    lines = whole.splitlines(keepends=True)
    text = "".join(lines[: min(cut, 3)]) + "theirs\n"
    assert BEGIN in text
    assert update_text(text, {"a": ["one"], "b": ["two"]}, ["a", "b"], False) == whole


def test_owner_and_mode_stay(tmp_path: Path) -> None:
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
TOLD = {"stdout_lines": ["user u", "home /home/u", "key ssh-ed25519 AAAA any comment", "host ssh-ed25519 BBBB root@x"]}


def test_lines_say_who_is_who() -> None:
    hosts = {name: values | {"__ssh_told": TOLD} for name, values in HOSTS.items()}
    assert peer_names(hosts, list(hosts)) == {"node1": ["10.0.0.1 node1"], "node2": ["10.0.0.2 node2"], "10.0.0.3": []}
    keys = peer_host_keys(hosts, list(hosts))
    assert keys["node1"] == ["node1,10.0.0.1 ssh-ed25519 BBBB"]
    assert keys["node2"] == ["[node2]:2222,[10.0.0.2]:2222 ssh-ed25519 BBBB"]
    told = peer_keys(hosts, list(hosts), "ssh-rsa CCCC me@desk")
    assert told["node2"][0].startswith('from="10.0.0.1,10.0.0.2,10.0.0.3",') and told["node2"][0].endswith(
        "ssh-ed25519 AAAA"
    )
    assert told["(controller)"] == ["ssh-rsa CCCC"]


def test_who_was_not_asked_is_not_spoken_of() -> None:
    assert peer_host_keys(HOSTS, list(HOSTS)) == {}
    assert peer_keys(HOSTS, list(HOSTS)) == {}
