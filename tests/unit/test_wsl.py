"""A host in WSL2, from recorded facts: the kernel's name, /proc/net/tcp, and what wslinfo and dpkg-query print."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lying_host
import pytest
from test_preflight_checks import findings, healthy_hosts, mesh

from plugins.modules.nvidia_info import find_cards
from trainer.supervise import nvidia_smi
from trainyard.preflight.cluster_checks import HYPER_V
from trainyard.remote import wsl
from trainyard.wire.connection import Host
from trainyard.wire.replies import ReplyError, checked_reply

KERNEL = "5.15.153.1-microsoft-standard-WSL2\n"
HEADER = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
# A resolver of systemd, and a connection from port 22 that is established: no server listens there.
TCP = f"""{HEADER}   0: 3500007F:0035 00000000:0000 0A 00000000:00000000 00:00000000 00000000   102        0 19205 1 0 100 0 0 10 5
   1: 0B01A8C0:0016 0A01A8C0:D2F6 01 00000000:00000000 02:000A8D4C 00000000     0        0 28210 4 0 20 4 31 10 -1
"""
SSHD = "   0: 00000000000000000000000000000000:0016 00000000000000000000000000000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 23101 1 0 100 0 0 10 0\n"
PACKAGES = """installed libnvidia-compute-580
installed libnvidia-container1
installed libc6
config-files nvidia-driver-550
installed nvidia-driver-580
installed nvidia-container-toolkit
"""
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


@pytest.mark.parametrize("mode", ["nat", "consomme", "none"])
def test_a_networking_mode_in_which_peers_do_not_reach_the_host(mode: str) -> None:
    ((level, text, remedy),) = problems({"networking": mode})
    assert level == "failure" and f"networking mode {mode}" in text
    assert "networkingMode=mirrored under [wsl2] in %UserProfile%\\.wslconfig" in remedy and "wsl --shutdown" in remedy


def test_no_ssh_server() -> None:
    ((level, text, remedy),) = problems({"sshd": False})
    assert level == "warning" and "no SSH server listens on port 22" in text and "systemd=true" in remedy


def test_this_machine_as_several_hosts_needs_neither_peers_nor_sshd() -> None:
    """The default inventory on a controller in WSL2."""
    assert problems({"networking": "nat", "sshd": False}, interface="lo") == []


def test_a_driver_for_linux() -> None:
    ((level, text, remedy),) = problems({"driver": ["libnvidia-compute-580", "nvidia-driver-580"]})
    assert level == "failure" and "driver of Windows must be the only one" in text
    assert "apt-get purge libnvidia-compute-580 nvidia-driver-580" in remedy


def test_the_default_limit_of_the_memory_is_a_note() -> None:
    ((level, text, remedy),) = problems({"memory_set": False})
    assert (
        level == "note"
        and "31.2 GiB" in text
        and "half of that of Windows" in text
        and "set memory under [wsl2]" in remedy
    )


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
