"""The controller's part of an address change, against hosts that answer, hang, or are another machine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trainyard.provision import address_change
from trainyard.provision.address_change import AddressChange, AddressChangeError
from trainyard.wire.connection import RemoteError
from trainyard.wire.known_hosts import KnownHosts

OLD, NEW = "10.0.0.5", "10.0.0.9"
KEY = "ssh-ed25519 AAAA"
ARGUMENTS = {"address": f"{NEW}/24", "timeout": 2}


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(address_change, "PAUSE", 0.01)
    monkeypatch.setattr(address_change, "ROLLBACK_LIMIT", 0.3)


class FakeHost:
    """A host that has `address`; `answers` decides what each step returns or raises."""

    def __init__(self, answers: Callable[[FakeHost, str], dict[str, Any]]) -> None:
        self.address = self.target = OLD
        self.steps: list[tuple[str, str]] = []
        self.options = ""
        self.answers = answers

    def step(self, step: str) -> dict[str, Any]:
        self.steps.append((step, self.target))
        if step == "plan" and self.target == self.address:
            return {"changed": self.address != NEW, "diff": [], "nic": "eth0", "present": self.address, "target": NEW}
        return self.answers(self, step)

    def connect_to(self, address: str, options: str) -> None:
        self.target, self.options = address, options


def known(tmp_path: Path, lines: str) -> KnownHosts:
    file = tmp_path / "known_hosts"
    file.write_text(lines)
    return KnownHosts(OLD, 22, (file,))


def change(host: FakeHost, known_hosts: KnownHosts | None, check_mode: bool = False) -> dict[str, Any]:
    return AddressChange(host.step, host.connect_to, OLD, known_hosts).run(ARGUMENTS, check_mode)


def unreachable(host: FakeHost, step: str) -> dict[str, Any]:
    if step == "try":
        return {"changed": True}
    raise RemoteError("ssh: connect to host 10.0.0.9 port 22: No route to host")


def test_a_reached_address_is_confirmed_and_known(tmp_path: Path) -> None:
    def answers(host: FakeHost, step: str) -> dict[str, Any]:
        if step == "try":
            host.address = NEW
            return {"changed": True}
        if host.target == host.address:
            first = sum(name == "confirm" for name, _ in host.steps) == 1
            return {"waiting": True} if first else {"changed": True}
        return unreachable(host, step)

    host, hosts = FakeHost(answers), known(tmp_path, f"{OLD} {KEY}\n")
    assert change(host, hosts) == {"changed": True, "diff": [], "nic": "eth0", "address": NEW, "before": OLD}
    assert hosts.keys(NEW) == {KEY}
    assert "StrictHostKeyChecking=yes" in host.options and f"HostKeyAlias={OLD}" in host.options
    assert [name for name, _ in host.steps[-3:]] == ["try", "confirm", "confirm"]


def test_an_address_that_is_not_reached_is_rolled_back(tmp_path: Path) -> None:
    host = FakeHost(unreachable)
    with pytest.raises(AddressChangeError, match=r"^not reached at 10\.0\.0\.9 \(.*No route to host\), so it rolled"):
        change(host, known(tmp_path, f"{OLD} {KEY}\n"))
    assert host.target == OLD


@pytest.mark.slow
def test_a_lost_host_needs_a_reboot(tmp_path: Path) -> None:
    def answers(host: FakeHost, step: str) -> dict[str, Any]:
        if step == "try":
            host.address = ""
        return unreachable(host, step)

    with pytest.raises(AddressChangeError, match=r"does not answer at 10\.0\.0\.5: reboot the host"):
        change(FakeHost(answers), known(tmp_path, f"{OLD} {KEY}\n"))


def test_check_mode_changes_nothing(tmp_path: Path) -> None:
    host = FakeHost(unreachable)
    assert change(host, known(tmp_path, f"{OLD} {KEY}\n"), check_mode=True)["changed"]
    assert "try" not in [name for name, _ in host.steps]


def test_another_machine_at_the_new_address(tmp_path: Path) -> None:
    with pytest.raises(AddressChangeError, match=r"known_hosts has another SSH host key for 10\.0\.0\.9 than"):
        change(FakeHost(unreachable), known(tmp_path, f"{OLD} {KEY}\n{NEW} ssh-ed25519 BBBB\n"))

    def other_key(host: FakeHost, step: str) -> dict[str, Any]:
        raise RemoteError("Host key verification failed.")

    with pytest.raises(AddressChangeError, match=r"10\.0\.0\.9 is already in use by a machine with another SSH"):
        change(FakeHost(other_key), known(tmp_path, f"{OLD} {KEY}\n"))


def test_a_host_without_a_known_key_is_not_changed(tmp_path: Path) -> None:
    with pytest.raises(AddressChangeError, match=r"known_hosts has no SSH host key for 10\.0\.0\.5"):
        change(FakeHost(unreachable), known(tmp_path, ""))


def test_a_host_that_does_not_answer_is_unreachable() -> None:
    host = FakeHost(unreachable)
    host.address = ""
    assert change(host, None) == {"unreachable": True, "msg": "ssh: connect to host 10.0.0.9 port 22: No route to host"}


def test_only_keys_of_the_host_itself_are_copied_to_its_new_address(tmp_path: Path) -> None:
    """Not the keys of certificate authorities, revoked keys, or keys of other hosts and ports."""
    keys = {name: f"ssh-ed25519 AAAA{name}" for name in ("own", "ca", "gone", "port", "peer")}
    own, other = tmp_path / "known_hosts", tmp_path / "global"
    own.write_text(
        f"# a comment\n{OLD} {keys['own']} a comment\n@cert-authority {OLD} {keys['ca']}\n@revoked {OLD} {keys['gone']}\n"
        f"[{OLD}]:2222 {keys['port']}\n10.0.0.77 {keys['peer']}"
    )
    known = KnownHosts(OLD, 22, (own, other))
    assert known.keys(OLD) == {keys["own"]}
    assert known.add_address("10.0.0.9") and not known.add_address("10.0.0.9")
    assert own.read_text().splitlines()[-2:] == [f"10.0.0.77 {keys['peer']}", f"10.0.0.9 {keys['own']}"]
    assert not other.exists()
