"""The rules of the role firewall, and the address of the controller that a host takes from its SSH connection."""

from pathlib import Path
from typing import Any

import pytest
from module_runs import run_module
from tables import table

from plugins.filter.firewall import firewall_problems, firewall_rules
from plugins.module_utils.ssh_session import SshSession
from plugins.modules import ufw_rules

PEERS = {"node1": "10.0.0.1", "node2": "10.0.0.2"}


def test_peers_may_connect_and_the_controller_to_its_ports() -> None:
    openings = [{"port": 123, "proto": "udp", "why": "time"}]
    assert (
        firewall_rules(PEERS, "node1", openings, [{"port": "80"}], [11434])
        == table("firewall_rules")["peers_may_connect"]
    )
    assert firewall_problems(PEERS, openings, [], [11434]) == []
    named = {"port": "5000", "proto": "tcp", "source": "192.168.1.20", "why": "dashboard"}
    assert firewall_rules(PEERS, "node1", [named], [])[1:] == [named]
    (problem,) = firewall_problems(PEERS, [named | {"source": "my laptop"}], [])
    assert problem.startswith("firewall_openings: ") and "my laptop" in problem
    (problem,) = firewall_problems(PEERS, [], [], ["ollama"])
    assert problem.startswith("firewall_controller_ports: port is 'ollama'")


@pytest.fixture
def ufw(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Files of an enabled ufw without rules, and the output of iptables; returns the commands that the module ran."""
    (tmp_path / "ufw.conf").write_text("ENABLED=yes\n")
    (tmp_path / "defaults").write_text('IPV6=no\nDEFAULT_INPUT_POLICY="DROP"\n')
    (tmp_path / "iptables").write_text("-P INPUT DROP\n-A INPUT -j ufw-before-input\n")
    monkeypatch.setattr(ufw_rules, "FILES", {4: tmp_path / "user.rules", 6: tmp_path / "user6.rules"})
    monkeypatch.setattr(ufw_rules, "CONFIG", tmp_path / "ufw.conf")
    monkeypatch.setattr(ufw_rules, "DEFAULTS", tmp_path / "defaults")
    monkeypatch.setattr(ufw_rules, "ssh_ports", lambda module: [22])
    monkeypatch.setattr(ufw_rules, "BACKUP", tmp_path / "firewall/before.json")
    monkeypatch.setattr(ufw_rules, "Path", lambda *words: tmp_path / "missing")
    commands: list[str] = []

    def run_command(self: Any, argv: list[str], **options: Any) -> tuple[int, str, str]:
        commands.append(" ".join(argv))
        if argv[0] == "ufw" and "allow" in argv:
            words = dict(zip(argv[argv.index("allow") + 1 :: 2], argv[argv.index("allow") + 2 :: 2], strict=False))
            port = words.get("port", "any")
            with (tmp_path / "user.rules").open("a") as file:
                rule = f"allow {words.get('proto', 'any')} {port} {words['to']} any {words['from']} in"
                file.write(f"### tuple ### {rule} comment={words['comment'].encode().hex()}\n")
        if argv[0] == "systemctl":
            return 3, "", ""
        return 0, (tmp_path / "iptables").read_text() if argv[0] == "iptables" else "", ""

    monkeypatch.setattr(ufw_rules.AnsibleModule, "run_command", run_command)
    return commands


@pytest.mark.parametrize(
    ("session", "source"),
    [(SshSession("10.0.0.1", 22, "192.168.7.5"), "192.168.7.5"), (None, ""), (SshSession("10.0.0.1", 22, "evil"), "")],
)
def test_the_controller_is_the_peer_of_the_connection(
    session: SshSession | None,
    source: str,
    ufw: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(ufw_rules, "ssh_session", lambda: session)
    rules = [{"port": "11434", "source": "controller", "why": "controller"}]
    result = run_module(ufw_rules, capsys, rules=rules)
    added = [command for command in ufw if "11434" in command]
    if source:
        rule = f"ufw allow proto tcp from {source} to 0.0.0.0/0 port 11434 comment trainyard: controller"
        assert added == [rule]
    else:
        assert not added and ("failed" in result) is (session is not None)


def test_rules_that_the_kernel_lost_are_loaded_again(
    ufw: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_module(ufw_rules, capsys)
    assert "ufw --force enable" not in ufw
    (tmp_path / "iptables").write_text("-P INPUT ACCEPT\n")
    ufw.clear()
    # ufw cannot add a rule to chains that the kernel does not have.
    result = run_module(ufw_rules, capsys, rules=[{"source": "10.0.0.2", "why": "peer"}])
    changes = [command.split()[1] for command in ufw if command.startswith("ufw ")]
    assert changes == ["--force", "allow"] and result["changed"]


def test_the_former_state_is_restored(ufw: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "ufw.conf").write_text("ENABLED=no\n")
    (tmp_path / "user.rules").write_text("### RULES ###\n")
    assert run_module(ufw_rules, capsys)["changed"] and (tmp_path / "firewall/before.json").exists()
    (tmp_path / "ufw.conf").write_text("ENABLED=yes\n")
    (tmp_path / "user.rules").write_text("### RULES ###\n# added by ufw\n")
    ufw.clear()
    assert run_module(ufw_rules, capsys, state="absent")["changed"] and "ufw disable" in ufw
    assert (tmp_path / "user.rules").read_text() == "### RULES ###\n" and not (tmp_path / "firewall").exists()
