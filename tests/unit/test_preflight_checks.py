"""What preflight says of answers that no lab gives: clocks, GPUs, stalled paths, dead names; and nothing of sound hosts."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from trainyard.preflight import checks

GB = 1 << 30


def host(place: int) -> dict[str, Any]:
    """A sound host, as its own answers describe it."""
    name, address = f"node{place}", f"10.0.0.{place}"
    peers = [f"node{other}" for other in (1, 2, 3) if other != place]
    return {
        "host": name,
        "address": address,
        "data_dir": "/srv/trainyard",
        "python": "/srv/trainyard/venv/bin/python",
        "memory_mib": 512,
        "asked": [1000.0, 1001.5],
        "facts": {
            "boot_id": f"boot{place}",
            "machine_id": f"machine{place}",
            "addresses": [address],
            "source": address,
            "interface": "eth0",
            "trouble": "",
            "cpus": 8,
            "gpus": [],
            "versions": {"python": "3.12.1", "torch": "2.13.0"},
            "python_exists": True,
            "may_write": True,
            "free_bytes": 100 * GB,
            "busy_with": "",
        },
        "health": {
            "hostname": name,
            "devices": [
                {"name": "eth0", "address": address, "mask": "255.255.255.0", "mtu": 1500, "mbit": 1000}
                | {"wireless": False, "virtual": False}
            ],
            "names": {"addresses": {peer: [f"10.0.0.{peer[4:]}"] for peer in peers}, "seconds": 0.1},
            "memory": {"total_mib": 32000, "available_mib": 30000},
            "memory_had": True,
            "quota": None,
            "load": 0.1,
            "busy": [],
            "spin": {"share": 1.0, "gap": 0.001, "pauses": 0},
            "torchruns": [],
            "gpu": {"cards": 0, "gpus": [], "users": []},
            "files": {"spoilt": [], "equal": {"datasets/a.jsonl": "1" * 64}},
            "sudo": True,
            "inodes_free": 1000000,
            "clock": [1000.1, 1001.4],
        },
        "mesh": {
            "mtu": 1500,
            "taken": [],
            "reached": {peer: {"29500": "", "40000": "", "50000": ""} for peer in peers},
            "lines": {
                peer: {"latency_ms": 0.2, "ping_small": True, "ping_large": True}
                | ({"mbit": 940.0} if peer == "node1" else {})
                for peer in peers
            },
        },
    }


def hosts() -> list[dict[str, Any]]:
    return [host(place) for place in (1, 2, 3)]


def judge(them: list[dict[str, Any]]) -> list[checks.Finding]:
    return checks.judge(them, [29500, 40000, 50000], 29500, 200 << 20)


def test_sound_hosts() -> None:
    them = hosts()
    assert judge(them) == []
    assert checks.table(them, [])[0].split()[0] == "host"


def clock(off: float) -> dict[str, Any]:
    return {"clock": [1000.1 + off, 1001.4 + off]}


@pytest.mark.parametrize(
    ("part", "values", "check", "level", "word"),
    [
        ("health", clock(3600), "clock", "warning", "3600 s"),
        ("health", clock(-5), "clock", "warning", "s off"),
        ("facts", {"gpus": [{"name": "x"}]}, "gpu", "warning", "no GPU"),
        ("health", {"gpu": {"cards": 1, "gpus": [], "users": []}}, "gpu", "warning", "driver shows 0"),
        ("health", {"gpu": {"cards": 0, "gpus": [], "users": ["77, python, 900"]}}, "gpu", "warning", "computes on"),
        ("health", {"quota": 2.0}, "cpu", "warning", "2 of 8"),
        ("health", {"spin": {"share": 0.5, "gap": 0.05, "pauses": 6}}, "cpu", "warning", "50% of a core"),
        ("health", {"spin": {"share": 0.5, "gap": 0.05, "pauses": 6}, "load": 30.0}, "load", "warning", "load 30.0"),
        ("health", {"busy": [{"pid": 7, "name": "x", "uid": 0, "cores": 3.0}]}, "load", "warning", "3.0 cores"),
        ("health", {"names": {"addresses": {}, "seconds": 10.0}}, "names", "warning", "10 s"),
        ("health", {"memory": {"total_mib": 4000, "available_mib": 1000}}, "memory", "warning", "1000 of 4000"),
        ("health", {"files": {"spoilt": [], "equal": {"datasets/a.jsonl": "2" * 64}}}, "checksum", "failure", "differs"),
        ("health", {"files": {"spoilt": [], "equal": {}}}, "checksum", "failure", "not there"),
        ("health", {"inodes_free": 0}, "disk", "failure", "inode"),
        ("facts", {"free_bytes": 5 * GB}, "disk", "warning", "5.4 GB"),
        ("facts", {"source": "192.168.1.7"}, "nic", "failure", "192.168.1.7"),
        ("facts", {"trouble": "no route to the head"}, "nic", "failure", "no route"),
        ("facts", {"busy_with": "other"}, "busy", "failure", "run other"),
        ("facts", {"may_write": False}, "disk", "failure", "cannot write"),
        ("facts", {"python_exists": False}, "python", "failure", "no Python"),
        ("facts", {"boot_id": "boot1", "machine_id": "machine1", "addresses": ["10.0.0.1"]}, "twice", "failure", "one machine"),
        ("facts", {"machine_id": "machine1"}, "twice", "warning", "cloned"),
    ],
)  # fmt: skip
def test_one_thing_wrong(part: str, values: dict[str, Any], check: str, level: str, word: str) -> None:
    them = hosts()
    them[1][part] |= values
    found = judge(them)
    named = [finding for finding in found if finding.check == check and word in finding.text]
    assert named and named[0].level == level and named[0].remedy, found
    if check != "gpu" or word != "no GPU":  # one with a GPU makes the others those without
        assert {finding.host for finding in named} == {"node2"}


def test_a_slow_answer_is_no_wrong_clock() -> None:
    """A host that takes a minute to answer has a right clock all the same."""
    them = hosts()
    them[1]["asked"] = [1000.0, 1060.0]
    them[1]["health"]["clock"] = [1001.0, 1059.0]
    assert judge(them) == []


@pytest.mark.parametrize(
    ("ports", "word"),
    [
        ({"29500": "no answer"}, "TCP port 29500"),
        ({"40000": "no answer", "50000": "no answer"}, "high TCP ports"),
        ({"29500": "no answer", "40000": "no answer", "50000": "no answer"}, "any TCP port"),
    ],
)
def test_firewalls(ports: dict[str, str], word: str) -> None:
    them = hosts()
    for source in (them[0], them[1]):
        source["mesh"]["reached"]["node3"] |= ports
    [finding] = judge(them)
    assert finding.host == "node3" and "node1, node2 cannot reach" in finding.text and word in finding.text


def test_a_port_that_is_taken_is_no_firewall() -> None:
    them = hosts()
    them[2]["mesh"]["taken"] = [29500]
    for source in (them[0], them[1]):
        source["mesh"]["reached"]["node3"] |= {"29500": "another program answers"}
    [finding] = judge(them)
    assert (finding.check, finding.host) == ("port", "node3")


def test_large_packets_that_vanish() -> None:
    them = hosts()
    them[0]["mesh"]["lines"]["node2"]["ping_large"] = False
    them[2]["mesh"]["lines"]["node1"]["stalled"] = "timed out"
    assert [(finding.check, finding.host) for finding in judge(them)] == [("mtu", "node1"), ("mtu", "node3")]


def test_no_ping_at_all_says_nothing_of_large_packets() -> None:
    them = hosts()
    them[0]["mesh"]["lines"]["node2"] |= {"ping_small": False, "ping_large": False}
    assert judge(them) == []


def test_the_head_is_the_slow_one_when_all_lines_are() -> None:
    them = hosts()
    slow = copy.deepcopy(them)
    slow[1]["mesh"]["lines"]["node1"]["mbit"] = 94.0
    assert [finding.host for finding in judge(slow)] == ["node2"]
    slow[2]["mesh"]["lines"]["node1"]["mbit"] = 95.0
    assert [finding.host for finding in judge(slow)] == ["node1"]


@pytest.mark.parametrize(
    ("word", "remedy"),
    [
        ("yard@10.0.0.2: Permission denied (publickey).", "ssh-copy-id"),
        ("Host key verification failed.", "known_hosts"),
        ("ssh: connect to host 10.0.0.2 port 22: No route to host", "cable"),
        ("ssh: connect to host 10.0.0.2 port 22: Connection refused", "sshd"),
        ("no answer within 20 s", "hangs"),
        ("something new", "by hand"),
    ],
)
def test_hosts_that_do_not_answer(word: str, remedy: str) -> None:
    them = hosts()
    them[1] = {"host": "node2", "address": "10.0.0.2", "data_dir": "/x", "python": "/y", "trouble": word}
    [finding] = judge(them)
    assert finding.check == "ssh" and word in finding.text and remedy in finding.remedy
    assert "ssh" in checks.table(them, [finding])[2]
