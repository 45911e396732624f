"""Findings of preflight for conditions that lab hosts cannot have: clocks, GPUs, stalled paths, slow name resolution."""

from __future__ import annotations

import copy
import dataclasses
import socket
from typing import Any

import pytest
from tables import table

from trainyard.preflight.findings import Finding, Report, host_table
from trainyard.preflight.host_state import HostState
from trainyard.preflight.runner import check, controller_connections
from trainyard.wire.connection import Host, Login

GB = 1 << 30


def healthy_host(place: int) -> HostState:
    """The answers of a healthy host."""
    name, address = f"node{place}", f"10.0.0.{place}"
    peers = [f"node{other}" for other in (1, 2, 3) if other != place]
    return HostState(
        Host(name, address, "/srv/trainyard", "/srv/trainyard/venv/bin/python"),
        asked=(1000.0, 1001.5),
        facts={
            "boot_id": f"boot{place}",
            "machine_id": f"machine{place}",
            "addresses": [address],
            "source": address,
            "interface": "eth0",
            "route_error": "",
            "cpus": 8,
            "gpus": [],
            "versions": {"python": "3.12.1", "torch": "2.13.0"},
            "python_exists": True,
            "may_write": True,
            "free_bytes": 100 * GB,
            "busy_with": "",
        },
        health={
            "hostname": name,
            "devices": [
                {"name": "eth0", "address": address, "mask": "255.255.255.0", "mtu": 1500, "mbit": 1000}
                | {"wireless": False, "virtual": False}
            ],
            "names": {"addresses": {peer: [f"10.0.0.{peer[4:]}"] for peer in peers}, "seconds": 0.1},
            "memory": {"total_mib": 32000, "available_mib": 30000},
            "memory_allocated": True,
            "quota": None,
            "load": 0.1,
            "busy": [],
            "spin": {"share": 1.0, "gap": 0.001, "pauses": 0},
            "torchruns": [],
            "gpu": {"cards": 0, "gpus": [], "users": []},
            "files": {"damaged": [], "equal": {"datasets/a.jsonl": "1" * 64}},
            "sudo": True,
            "inodes_free": 1000000,
            "clock": [1000.1, 1001.4],
        },
        mesh={
            "mtu": 1500,
            "taken": [],
            "shares_with": {},
            "write_error": "",
            "reached": {peer: {"29500": "", "40000": "", "50000": ""} for peer in peers},
            "lines": {
                peer: {"latency_ms": 0.2, "ping_small": True, "ping_large": True}
                | ({"mbit": 940.0} if peer == "node1" else {})
                for peer in peers
            },
        },
    )


def healthy_hosts() -> list[HostState]:
    return [healthy_host(place) for place in (1, 2, 3)]


def findings(states: list[HostState]) -> list[Finding]:
    return check(states, [29500, 40000, 50000], 29500)


def mesh(state: HostState) -> dict[str, Any]:
    assert state.mesh is not None
    return state.mesh


def test_healthy_hosts_have_no_findings() -> None:
    states = healthy_hosts()
    assert findings(states) == []
    assert host_table(states, [])[0].split()[0] == "host"


def clock(off: float) -> dict[str, Any]:
    return {"clock": [1000.1 + off, 1001.4 + off]}


@pytest.mark.parametrize(
    ("part", "values", "check", "level", "word"),
    [
        ("health", clock(3600), "clock", "warning", "3600 s"),
        ("health", clock(-5), "clock", "warning", "differs by 5 s"),
        ("facts", {"gpus": [{"name": "x"}]}, "gpu", "warning", "no GPU"),
        ("health", {"gpu": {"cards": 1, "gpus": [], "users": []}}, "gpu", "warning", "driver shows 0"),
        ("health", {"gpu": {"cards": 0, "gpus": [], "users": ["77, python, 900"]}}, "gpu", "warning", "another process uses"),
        ("health", {"quota": 2.0}, "cpu", "warning", "2 of 8"),
        ("health", {"spin": {"share": 0.5, "gap": 0.05, "pauses": 6}}, "cpu", "warning", "50% of a core"),
        ("health", {"spin": {"share": 0.5, "gap": 0.05, "pauses": 6}, "load": 30.0}, "load", "warning", "load 30.0"),
        ("health", {"busy": [{"pid": 7, "name": "x", "uid": 0, "cores": 3.0}]}, "load", "warning", "3.0 cores"),
        ("health", {"names": {"addresses": {}, "seconds": 10.0}}, "names", "warning", "10 s"),
        ("health", {"memory": {"total_mib": 4000, "available_mib": 1000}}, "memory", "warning", "1000 of 4000"),
        ("health", {"files": {"damaged": [], "equal": {"datasets/a.jsonl": "2" * 64}}}, "checksum", "failure", "differs"),
        ("health", {"files": {"damaged": [], "equal": {}}}, "checksum", "failure", "is missing"),
        ("health", {"inodes_free": 0}, "disk", "failure", "inode"),
        ("facts", {"free_bytes": 5 * GB}, "disk", "warning", "5.4 GB"),
        ("facts", {"source": "192.168.1.7"}, "nic", "failure", "192.168.1.7"),
        ("facts", {"route_error": "no route to the head"}, "nic", "failure", "no route"),
        ("facts", {"busy_with": "other"}, "busy", "failure", "run other"),
        ("facts", {"may_write": False}, "disk", "failure", "cannot write"),
        ("facts", {"python_exists": False}, "python", "failure", "no Python"),
        ("facts", {"versions": {"python": "3.10.12", "torch": "2.13.0"}}, "python", "failure", "is Python 3.10.12"),
        ("facts", {"boot_id": "boot1", "machine_id": "machine1", "addresses": ["10.0.0.1"]}, "twice", "failure", "one machine"),
        ("facts", {"machine_id": "machine1"}, "twice", "warning", "clones of one image"),
    ],
)  # fmt: skip
def test_a_single_problem_has_one_finding(part: str, values: dict[str, Any], check: str, level: str, word: str) -> None:
    states = healthy_hosts()
    getattr(states[1], part).update(values)
    found = findings(states)
    named = [finding for finding in found if finding.check == check and word in finding.text]
    assert named and named[0].level == level and named[0].remedy, found
    if check != "gpu" or word != "no GPU":  # there, the finding is for the hosts without a GPU
        assert {finding.host for finding in named} == {"node2"}


@pytest.mark.parametrize(
    ("folder", "shown"), [("data_dir", "data directory /srv/trainyard"), ("runs", "folder of runs /srv/trainyard/runs")]
)
def test_hosts_that_share_a_folder_have_one_finding(folder: str, shown: str) -> None:
    states = [healthy_host(place) for place in (1, 2, 3, 4, 5)]
    mesh(states[1])["shares_with"] = {"node4": folder}  # node4 has not seen node2: its marker was removed before
    mesh(states[4])["shares_with"] = {"node4": folder, "unknown": folder}
    (finding,) = [finding for finding in findings(states) if finding.check == "shared"]
    assert (finding.host, finding.level) == ("node2", "failure")
    assert finding.text == f"shares its {shown} with node4, node5"
    assert "cluster_data_dir" in finding.remedy and "local disk" in finding.remedy


def test_one_machine_under_two_names_is_reported_once() -> None:
    states = healthy_hosts()
    for name in ("boot_id", "machine_id", "addresses"):
        states[1].facts[name] = states[0].facts[name]
    mesh(states[1])["shares_with"] = {"node1": "data_dir"}
    assert [finding.check for finding in findings(states)] == ["twice"]


def test_one_machine_under_two_names_has_its_load_reported_once() -> None:
    """The two nodes of inventory/local.yml are this machine."""
    states = healthy_hosts()
    for state in states[:2]:
        state.facts |= {name: states[0].facts[name] for name in ("boot_id", "machine_id", "addresses")}
        state.health |= {"busy": [{"pid": 7, "name": "x", "uid": 0, "cores": 3.0}], "quota": 2.0}
        state.health |= {"gpu": {"cards": 1, "gpus": [], "users": []}}
        state.health |= {"memory": {"total_mib": 4000, "available_mib": 1000}}
    states[1] = dataclasses.replace(states[1], host=dataclasses.replace(states[1].host, data_dir="/other"))
    found = [(finding.check, finding.host) for finding in findings(states)]
    assert found == [("cpu", "node1"), ("gpu", "node1"), ("load", "node1"), ("memory", "node1")]


def test_ollamas_port_is_reported_with_its_remedy() -> None:
    states = healthy_hosts()
    states[1] = dataclasses.replace(states[1], host=dataclasses.replace(states[1].host, ollama_port=11434))
    for place, error in ((0, "no answer"), (2, "")):
        mesh(states[place])["services"] = {"node2": error}
    (finding,) = findings(states)
    assert (finding.check, finding.host, finding.level) == ("ollama", "node2", "warning")
    assert (
        finding.text == "node1 cannot reach TCP port 11434 of its Ollama (no answer)"
        and "firewall_allow" in finding.remedy
    )
    (finding,) = check(states[1:2], [], 29500, {"node2": "timed out"})
    assert finding.text == "the controller cannot reach TCP port 11434 of its Ollama (timed out)"


def test_the_controller_connects_to_ollama_on_other_machines() -> None:
    with socket.create_server(("127.0.13.1", 0)) as server:
        port = server.getsockname()[1]
        about = {"ollama_port": port, "login": Login("127.0.13.1")}
        hosts = [Host(f"node{n}", f"127.0.13.{n}", "/d", "/p", **about) for n in (1, 2)]  # node2 refuses
        local = Host("local", "192.0.2.1", "/d", "/p", ollama_port=port)
        away = Host("away", "not-an-address", "/d", "/p", **about)
        found = controller_connections([HostState(host) for host in [*hosts, local, away]])
    assert list(found) == ["away"]


def test_the_hardware_of_all_hosts_is_one_table() -> None:
    states = healthy_hosts()
    card = {"name": "Stand-in GPU", "memory_mib": 24576, "links": ""}
    states[0].health["hardware"] = {
        "gpus": [card, card], "cpu": "Ten Cores", "cores": 20, "memory_mib": 65536, "free_bytes": 10**12,
        "models": [f"model{n:02d}:1b" for n in range(30)], "model_count": 130,
    }  # fmt: skip
    states[1].health["hardware"] = {
        "gpus": [], "cpu": "\x1b[2J" + "x" * 500, "cores": 2, "memory_mib": 2048, "free_bytes": 0, "models": [],
        "model_count": 0,
    }  # fmt: skip
    lines = host_table(states, [])
    table = lines[lines.index("") + 1 :]
    assert table[0].split("  ")[0] == "host" and "2 x Stand-in GPU  2 x 24 GiB  -          Ten Cores" in table[1]
    assert table[1].endswith("model05:1b, 124 more") and table[2].endswith("none") and table[3].split()[1:] == ["-"] * 8
    assert all(line.isprintable() and len(line) < 250 for line in lines)


def test_a_data_dir_that_takes_no_file_has_one_finding() -> None:
    states = healthy_hosts()
    mesh(states[1])["write_error"] = "Disk quota exceeded"
    (finding,) = findings(states)
    assert (finding.check, finding.level, finding.host) == ("disk", "failure", "node2")
    assert finding.text == "cannot write to /srv/trainyard: Disk quota exceeded"
    states[1].facts["may_write"] = False
    assert len(findings(states)) == 1


def test_hosts_of_different_distributions_have_different_pythons() -> None:
    states = healthy_hosts()
    states[1].facts["versions"] = {"python": "3.13.5", "torch": "2.13.0"}
    assert findings(states) == []


def test_a_slow_answer_is_not_a_clock_error() -> None:
    """A host that takes a minute to answer may still have a correct clock."""
    states = healthy_hosts()
    states[1].asked = (1000.0, 1060.0)
    states[1].health["clock"] = [1001.0, 1059.0]
    assert findings(states) == []


@pytest.mark.parametrize(("ports", "word"), table("preflight_checks")["firewalls"])
def test_firewalls(ports: dict[str, str], word: str) -> None:
    states = healthy_hosts()
    for source in states[:2]:
        mesh(source)["reached"]["node3"] |= ports
    [finding] = findings(states)
    assert finding.host == "node3" and "node1, node2 cannot reach" in finding.text and word in finding.text


def test_a_port_in_use_is_not_a_firewall() -> None:
    states = healthy_hosts()
    mesh(states[2])["taken"] = [29500]
    for source in states[:2]:
        mesh(source)["reached"]["node3"] |= {"29500": "another program answers"}
    [finding] = findings(states)
    assert (finding.check, finding.host) == ("port", "node3")


def test_dropped_large_packets() -> None:
    states = healthy_hosts()
    mesh(states[0])["lines"]["node2"]["ping_large"] = False
    mesh(states[2])["lines"]["node1"]["stalled"] = "timed out"
    assert [(finding.check, finding.host) for finding in findings(states)] == [("mtu", "node1"), ("mtu", "node3")]


def test_without_ping_there_is_no_finding_about_large_packets() -> None:
    states = healthy_hosts()
    mesh(states[0])["lines"]["node2"] |= {"ping_small": False, "ping_large": False}
    assert findings(states) == []


def test_the_head_is_slow_if_all_links_are() -> None:
    states = healthy_hosts()
    slow = copy.deepcopy(states)
    mesh(slow[1])["lines"]["node1"]["mbit"] = 94.0
    assert [finding.host for finding in findings(slow)] == ["node2"]
    mesh(slow[2])["lines"]["node1"]["mbit"] = 95.0
    assert [finding.host for finding in findings(slow)] == ["node1"]


@pytest.mark.parametrize(("word", "remedy"), table("preflight_checks")["hosts_that_do_not_answer"])
def test_hosts_that_do_not_answer(word: str, remedy: str) -> None:
    states = healthy_hosts()
    states[1] = HostState(Host("node2", "10.0.0.2", "/x", "/y"), error=word)
    [finding] = findings(states)
    assert finding.check == "ssh" and word in finding.text and remedy in finding.remedy
    assert "ssh" in host_table(states, [finding])[2]


def test_the_report_has_an_exit_code_and_names_the_first_failure() -> None:
    warning = Finding("cpu", "node1", "warning", "slow", "look")
    failure = Finding("disk", "node2", "failure", "full", "make room")
    assert Report([], []).exit_code == Report([Finding("names", "", "note", "x", "y")], []).exit_code == 0
    assert (Report([warning], []).exit_code, Report([warning], []).error) == (1, "")
    assert Report([failure, warning], []).error == "node2: full: make room [disk]"
    several = Report([failure, failure, warning], ["table", failure.line, failure.line, warning.line])
    assert several.error == "node2: full: make room [disk] (and 1 more failure, listed below)"
    assert several.other_lines == ["table", failure.line, warning.line], "the error is printed above them"
    assert Report([warning], [warning.line]).other_lines == [warning.line]
    report = Report([failure], [], healthy_hosts()).as_dict()
    assert report["exit"] == 2 and report["findings"] == [dataclasses.asdict(failure)]
    assert set(report["hosts"]["node1"]) == {"address", "data_dir", "python", "facts", "health", "mesh"}
