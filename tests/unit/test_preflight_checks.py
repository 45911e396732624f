"""Findings of preflight for conditions that lab hosts cannot have: clocks, GPUs, stalled paths, slow name resolution."""

import copy
import dataclasses
import socket
from pathlib import Path
from typing import Any

import lying_host
import pytest
from tables import table

from plugins.modules.nvidia_info import find_cards
from trainer.supervise import nvidia_smi
from trainyard.preflight.cluster_checks import HYPER_V
from trainyard.preflight.findings import Finding, PreflightReport, host_table
from trainyard.preflight.host_state import HostState
from trainyard.preflight.runner import check, controller_connections
from trainyard.remote import wsl
from trainyard.wire.connection import Host, Login
from trainyard.wire.replies import ReplyError, checked_reply

GB = 1 << 30


def healthy_host(place: int) -> HostState:
    """The answers of a healthy host."""
    name, address = f"node{place}", f"10.0.0.{place}"
    peers = [f"node{other}" for other in (1, 2, 3) if other != place]
    return HostState(
        Host(name, address, "/srv/trainyard", "/srv/trainyard/venv/bin/python"),
        asked=(1000.0, 1001.5),
        facts=table("preflight_checks")["facts"]
        | {
            "boot_id": f"boot{place}",
            "machine_id": f"machine{place}",
            "addresses": [address],
            "source": address,
            "free_bytes": 100 * GB,
        },
        health=table("preflight_checks")["health"]
        | {
            "hostname": name,
            "devices": [
                {"name": "eth0", "address": address, "mask": "255.255.255.0", "mtu": 1500, "mbit": 1000}
                | {"wireless": False, "virtual": False}
            ],
            "names": {"addresses": {peer: [f"10.0.0.{peer[4:]}"] for peer in peers}, "seconds": 0.1},
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
        *table("preflight_checks")["a_single_problem_has_one_finding"],
        ("health", clock(3600), "clock", "failure", "3600 s"),
        ("health", clock(200), "clock", "warning", "200 s"),
        ("health", clock(-5), "clock", "warning", "differs by 5 s"),
        ("facts", {"free_bytes": 5 * GB}, "disk", "warning", "5.4 GB"),
    ],
)
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
        state.health |= {"gpu": {"cards": 1, "gpus": [], "users": [], "exclusive": []}}
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
    assert finding.text == "node1 cannot reach TCP port 11434 of its Ollama (no answer)"
    assert "firewall_allow" in finding.remedy
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
    note = Finding("names", "", "note", "x", "y")
    assert PreflightReport([], []).exit_code == PreflightReport([note], []).exit_code == 0
    assert (PreflightReport([warning], []).exit_code, PreflightReport([warning], []).error) == (1, "")
    assert PreflightReport([failure, warning], []).error == "node2: full: make room [disk]"
    several = PreflightReport([failure, failure, warning], ["table", failure.line, failure.line, warning.line])
    assert several.error == "node2: full: make room [disk] (and 1 more failure, listed below)"
    assert several.other_lines == ["table", failure.line, warning.line], "the error is printed above them"
    assert PreflightReport([warning], [warning.line]).other_lines == [warning.line]
    report = PreflightReport([failure], [], healthy_hosts()).as_dict()
    assert report["exit"] == 2 and report["findings"] == [{"id": "disk"} | dataclasses.asdict(failure)]
    assert set(report["hosts"]["node1"]) == {"address", "data_dir", "python", "facts", "health", "mesh"}


# A host in WSL2 ------------------------------------------------------------------------------------------------------

KERNEL = "5.15.153.1-microsoft-standard-WSL2\n"
HEADER = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
# A resolver of systemd, and a connection from port 22 that is established: no server listens there.
TCP = f"""{HEADER}   0: 3500007F:0035 00000000:0000 0A 00000000:00000000 00:00000000 00000000   102        0 19205 1 0 100 0 0 10 5
   1: 0B01A8C0:0016 0A01A8C0:D2F6 01 00000000:00000000 02:000A8D4C 00000000     0        0 28210 4 0 20 4 31 10 -1
"""
SSHD = "   0: 00000000000000000000000000000000:0016 00000000000000000000000000000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 23101 1 0 100 0 0 10 0\n"
PACKAGES = table("wsl")["packages"]
MIRRORED = {"networking": "mirrored", "sshd": True, "driver": [], "memory_set": True}


def program(folder: Path, name: str, text: str, code: int = 0) -> None:
    path = folder / name
    (folder / f"{name}.txt").write_text(text)
    path.write_text(f"#!/bin/sh\n/bin/cat {path}.txt\nexit {code}\n")
    path.chmod(0o755)


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The files of WSL2 with its default settings; the programs on PATH are those of the folder bin."""
    for folder in ("bin", "proc/sys/kernel", "proc/net", "sys/class/net/eth0", "mnt/c/Users/Ada", "mnt/c/Users/Public"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "proc/sys/kernel/osrelease").write_text(KERNEL)
    (tmp_path / "proc/net/tcp").write_text(TCP)
    (tmp_path / "proc/net/tcp6").write_text(HEADER)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    program(tmp_path / "bin", "wslinfo", "nat\n")
    return tmp_path


def health_reply(facts: dict[str, Any] | None) -> dict[str, Any]:
    """Return what the controller takes of a host's health."""
    answer = lying_host.honest("health", {}, Host("node2", "10.0.0.2", "/d", "/p"), 1)
    return checked_reply("health", answer | {"wsl": facts})


def test_the_facts_of_wsl_with_its_default_settings(root: Path) -> None:
    facts = {"networking": "nat", "sshd": False, "driver": [], "memory_set": False}
    assert wsl.gather(22, root) == facts, "without dpkg-query, as on Fedora"
    assert health_reply(facts)["wsl"] == facts


def test_the_facts_of_wsl_as_a_host_of_a_cluster(root: Path) -> None:
    program(root / "bin", "wslinfo", "mirrored\n")
    program(root / "bin", "dpkg-query", PACKAGES)
    (root / "proc/net/tcp6").write_text(HEADER + SSHD)
    (root / "mnt/c/Users/Ada/.wslconfig").write_bytes(b"[wsl2]\r\nnetworkingMode=mirrored\r\nMemory = 48GB\r\n")
    driver = ["libnvidia-compute-580", "nvidia-driver-580"]
    assert wsl.gather(22, root) == {"networking": "mirrored", "sshd": True, "driver": driver, "memory_set": True}
    assert wsl.gather(2222, root) == {"networking": "mirrored", "sshd": False, "driver": driver, "memory_set": True}
    (root / "mnt/c/Users/Ada/.wslconfig").write_text("[wsl2]\n#memory=48GB\nswap=0\n")
    assert not (wsl.gather(22, root) or {})["memory_set"]


def test_without_wslinfo_the_devices_show_the_mode(root: Path) -> None:
    program(root / "bin", "wslinfo", "Failed to query the networking mode\n", code=1)
    assert (wsl.gather(22, root) or {})["networking"] == "nat"
    (root / "sys/class/net/loopback0").mkdir()
    assert (wsl.gather(22, root) or {})["networking"] == "mirrored"


@pytest.mark.parametrize("release", ["6.1.0-37-amd64", "6.8.0-1021-azure", "5.15.0-1.cm2", "4.4.0-19041-Microsoft", ""])
def test_another_kernel_is_not_wsl2(root: Path, release: str) -> None:
    (root / "proc/sys/kernel/osrelease").write_text(release)
    assert wsl.gather(22, root) is None and health_reply(None)["wsl"] is None


def problems(change: dict[str, Any], **facts: Any) -> list[tuple[str, str, str]]:
    """Return level, text and remedy of every finding about a host in WSL2, in a cluster without other findings."""
    states = healthy_hosts()
    states[1].health["wsl"] = MIRRORED | change
    states[1].facts |= facts
    found = findings(states)
    assert {(finding.host, finding.check) for finding in found} <= {("node2", "wsl")}
    assert all(finding.line.isprintable() for finding in found)
    return [(finding.level, finding.text, finding.remedy) for finding in found]


def test_a_host_in_wsl_that_is_set_up_has_no_findings() -> None:
    assert problems({}) == [] and problems({"networking": "bridged"}) == []


@pytest.mark.parametrize(("change", "level", "said", "advised"), table("wsl")["problems"])
def test_what_a_host_in_wsl_lacks_is_said_with_the_remedy(
    change: dict[str, Any], level: str, said: list[str], advised: list[str]
) -> None:
    (found,) = problems(change)
    assert (
        found[0] == level and all(words in found[1] for words in said) and all(words in found[2] for words in advised)
    )


def test_this_machine_as_several_hosts_needs_neither_peers_nor_sshd() -> None:
    """The default inventory on a controller in WSL2."""
    assert problems({"networking": "nat", "sshd": False}, interface="lo") == []


@pytest.mark.parametrize(
    "memory", [{"memory": {"total_mib": 4000, "available_mib": 1000}}, {"memory_allocated": False}]
)
def test_a_lack_of_memory_has_the_remedy_of_windows_in_wsl_only(memory: dict[str, Any]) -> None:
    states = healthy_hosts()
    states[0].health |= memory
    states[1].health |= {**memory, "wsl": MIRRORED}
    first, second = (finding for finding in findings(states) if finding.check == "memory")
    assert ".wslconfig" not in first.remedy and "set memory under [wsl2]" in second.remedy


def test_the_firewall_of_windows_has_its_own_remedy() -> None:
    states = healthy_hosts()
    states[2].health["wsl"] = MIRRORED
    for source, target in ((0, "node3"), (2, "node1")):
        mesh(states[source])["reached"][target] |= {"40000": "no answer"}
    remedies = {finding.host: finding.remedy for finding in findings(states) if finding.check == "firewall"}
    assert HYPER_V in remedies["node3"] and "site.yml" in remedies["node1"] and HYPER_V not in remedies["node1"]


@pytest.mark.parametrize(
    "wrong", [{"networking": "nat\x1b[2J"}, {"driver": ["x; rm -rf /"]}, {"driver": ["a"] * 101}, {"sshd": "yes"}]
)
def test_a_reply_that_is_not_of_wsl_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ReplyError):
        health_reply(MIRRORED | wrong)


def test_the_role_nvidia_finds_no_card_in_wsl(tmp_path: Path) -> None:
    """WSL2 shows a GPU as a device of Microsoft, 1414:008e, so that the role installs no driver."""
    card = tmp_path / "bus/pci/devices/5582:00:00.0"
    card.mkdir(parents=True)
    for name, value in (("vendor", "0x1414"), ("device", "0x008e"), ("class", "0x030200")):
        (card / name).write_text(f"{value}\n")
    assert find_cards(tmp_path) == []


def test_the_gpus_of_wsl_are_found_in_an_ssh_session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The PATH of such a session lacks the folder of nvidia-smi."""
    (tmp_path / "wsl").mkdir()
    program(tmp_path / "wsl", "nvidia-smi", "NVIDIA GeForce RTX 4090, 24564\n")
    monkeypatch.setenv("PATH", "/nonexistent")
    assert nvidia_smi.query("name", "memory.total") == []
    monkeypatch.setattr(nvidia_smi, "WSL", str(tmp_path / "wsl/nvidia-smi"))
    assert nvidia_smi.query("name", "memory.total") == [["NVIDIA GeForce RTX 4090", "24564"]]
