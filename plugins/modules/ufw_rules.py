#!/usr/bin/python
"""Add and delete the ufw rules of the cluster."""

from __future__ import annotations

DOCUMENTATION = r"""
module: ufw_rules
short_description: Manage the ufw rules of the cluster and leave other rules unchanged
description:
  - Rules whose comment starts with C(trainyard) are managed. Managed rules that are not in O(rules) are deleted. All other rules
    stay unchanged; a rule that exists without the mark is not marked.
  - Before ufw is enabled, the port of the current SSH connection and every port of sshd's configuration are opened to
    any address. These rules come first. Incoming connections that no rule allows are then denied.
  - If ufw denies outgoing connections by default, those to the sources of O(rules) without a port are allowed.
  - If ufw is enabled, but the kernel does not have its rules, ufw is enabled again.
  - The former state of ufw is stored in C(/var/lib/trainyard/firewall), and O(state=absent) restores it.
options:
  rules:
    description: Connections to allow, in addition to SSH.
    type: list
    elements: dict
    default: []
    suboptions:
      port:
        description: A port, a range such as C(6000:6010), or C(any).
        type: str
        default: any
      proto:
        description: Protocol, which is tcp, udp or any.
        type: str
        default: tcp
      source:
        description: >-
          An address, a network, C(any), or C(controller) for the peer of the current SSH connection as this host sees it. Without
          an SSH connection, the rule for the controller is left out.
        type: str
        default: any
      why:
        description: Purpose of the rule; becomes part of its comment.
        type: str
        default: ""
  state:
    description: With C(absent), delete the managed rules and restore the former state of ufw.
    type: str
    choices: [present, absent]
    default: present
  rollback_timeout:
    description: >-
      Seconds after which ufw is disabled again, unless the unit C(trainyard-firewall-rollback.timer) is stopped first.
      Applies only if this call enables ufw. 0 disables the timer.
    type: int
    default: 0
extends_documentation_fragment: [trainyard, trainyard.files]
"""

EXAMPLES = r"""
- name: Allow connections from the peers
  ufw_rules:
    rules:
      - {source: 192.168.1.12, why: peer node2}
      - {port: "123", proto: udp, source: 192.168.1.12, why: time}
"""

RETURN = r"""
rollback_pending: {description: "Whether a rollback timer runs, started by this call or by a play that was killed.", returned: success, type: bool}
"""

import json
import re
from pathlib import Path
from typing import Any

from ansible.module_utils.argument_spec import argument_spec
from ansible.module_utils.atomic_file import write_atomic
from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.ssh_session import ssh_session
from ansible.module_utils.ufw import ANYWHERE, Rule, allow_rules, command_words, describe, parse_rules, plan_changes

FILES = {4: Path("/etc/ufw/user.rules"), 6: Path("/etc/ufw/user6.rules")}
DEFAULTS = Path("/etc/default/ufw")
CONFIG = Path("/etc/ufw/ufw.conf")
SSHD = Path("/usr/sbin/sshd")
POLICIES = {"DROP": "deny", "REJECT": "reject", "ACCEPT": "allow"}
ROLLBACK = "trainyard-firewall-rollback"
BACKUP = Path("/var/lib/trainyard/firewall/before.json")
MARK = "trainyard"  # prefix of the comments of managed rules


def setting(path: Path, name: str, default: str) -> str:
    """Return the last value of NAME=value in a file of shell assignments."""
    found = re.findall(rf"^\s*{name}=[\"']?(\w*)", path.read_text(encoding="utf-8"), re.M) if path.exists() else []
    return found[-1] if found else default


def loaded(module: AnsibleModule, state: dict[str, Any]) -> bool:
    """Return whether the kernel applies ufw's rules: another program may have flushed them (`nft flush ruleset`)."""
    tables = [("iptables", "ufw-before-input"), *([("ip6tables", "ufw6-before-input")] if state["ipv6"] else [])]
    for command, chain in tables:
        rules = module.run_command([command, "-S", "INPUT"], handle_exceptions=False)[1].splitlines()
        denies = "-P INPUT DROP" in rules or state["incoming"] == "allow"
        if not denies or f"-A INPUT -j {chain}" not in rules:
            return False
    return True


def current_state() -> dict[str, Any]:
    """Return ufw's settings: `enabled`, `incoming` (the default policy) and `ipv6` from its files."""
    return {
        "enabled": setting(CONFIG, "ENABLED", "no") == "yes",
        "incoming": POLICIES.get(setting(DEFAULTS, "DEFAULT_INPUT_POLICY", "DROP"), "deny"),
        "ipv6": setting(DEFAULTS, "IPV6", "yes") == "yes",
    }


def current_rules() -> list[Rule]:
    """Return the rules of both address families from ufw's files."""
    texts = [(path.read_text(encoding="utf-8"), family) for family, path in FILES.items() if path.exists()]
    return [rule for text, family in texts for rule in parse_rules(text, family)]


def ssh_ports(module: AnsibleModule) -> list[int]:
    """Return the port of the current SSH connection and the ports of sshd's configuration."""
    session = ssh_session()
    out = module.run_command([str(SSHD), "-T"], handle_exceptions=False)[1] if SSHD.exists() else ""
    configured = [int(port) for port in re.findall(r"^port (\d+)$", out, re.M)]
    return sorted({*([session.port] if session else []), *configured}) or [22]


def show(state: dict[str, Any], managed: list[Rule]) -> str:
    """Return settings and managed rules as the text of a diff."""
    lines = [f"ufw is {'on' if state['enabled'] else 'off'}", f"incoming: {state['incoming']}"]
    lines += [f"IPv6: {'yes' if state['ipv6'] else 'no'}", *sorted(describe(rule) for rule in managed)]
    return "".join(f"{text}\n" for text in lines)


class Firewall:
    """Changes ufw; changes nothing in check mode."""

    def __init__(self, module: AnsibleModule) -> None:
        self.module = module

    def ufw(self, *argv: str) -> None:
        """Run a ufw command; if it fails, end the module."""
        if self.module.check_mode:
            return
        code, out, err = self.module.run_command(["ufw", *argv])
        if code:
            self.module.fail_json(msg=f"ufw {' '.join(argv)}: {' '.join((err or out).split())}", plain=True)

    def delete(self, rule: Rule) -> None:
        self.ufw("delete", *command_words(rule))

    def add(self, rule: Rule, first: bool) -> None:
        """Add a rule, with `first` before all other rules."""
        self.ufw(*(["prepend"] if first else []), *command_words(rule), "comment", rule.comment)

    def enable(self) -> None:
        """Enable ufw and load its rules, with a rollback timer."""
        if self.module.params["rollback_timeout"] and not self.module.check_mode:
            start_rollback_timer(self.module)
        self.ufw("--force", "enable")

    def set_ipv6(self, value: str) -> None:
        """Write IPV6=yes or IPV6=no to ufw's settings."""
        if not self.module.check_mode:
            text = DEFAULTS.read_text(encoding="utf-8")
            changed = re.sub(r"^\s*IPV6=.*$", f"IPV6={value}", text, flags=re.M)
            DEFAULTS.write_text(changed if changed != text else f"{text}\nIPV6={value}\n", encoding="utf-8")


def desired_rules(module: AnsibleModule, current: list[Rule]) -> tuple[list[Rule], list[Rule]]:
    """Return the rules for SSH and the rules that the parameters ask for.

    If the user limits or denies SSH, that rule stays, and SSH is open to the controller and the sources of the parameters: ufw
    has one action for a port and a source.
    """
    ssh: list[Rule] = []
    rules: list[Rule] = []
    session = ssh_session()
    sources = {entry["source"] for entry in module.params["rules"]} - {"controller", "any"}
    sources |= {session.peer} if session else set()
    others = {rule.identity[2:] for rule in current if rule.action != "allow"}
    try:
        for port in ssh_ports(module):
            anywhere = allow_rules(str(port), "tcp", "any", f"{MARK}: SSH")
            ssh += [rule for rule in anywhere if rule.identity[2:] not in others]
            if any(rule.identity[2:] in others for rule in anywhere):
                ssh += [
                    rule for source in sorted(sources) for rule in allow_rules(str(port), "tcp", source, f"{MARK}: SSH")
                ]
        for entry in module.params["rules"]:
            comment = f"{MARK}: {entry['why']}".replace("'", "")
            source = session.peer if session and entry["source"] == "controller" else entry["source"]
            if source != "controller":
                rules += allow_rules(entry["port"], entry["proto"], source, comment)
    except ValueError as error:
        module.fail_json(msg=f"firewall: {error}", plain=True)
    if setting(DEFAULTS, "DEFAULT_OUTPUT_POLICY", "ACCEPT") != "ACCEPT":
        peers = [rule for rule in rules if rule.port == "any" and rule.source not in ANYWHERE.values()]
        rules += [r._replace(protocol="any", target=r.source, source=ANYWHERE[r.family], rest="out") for r in peers]
    return ssh, rules


def reject_firewalld(module: AnsibleModule) -> None:
    """End the module if firewalld runs on the host."""
    if module.run_command(["systemctl", "is-active", "--quiet", "firewalld"], handle_exceptions=False)[0] == 0:
        remedy = "set firewall_enabled: false and open all TCP ports between the addresses of the cluster in firewalld"
        what = "firewalld runs on this host and conflicts with ufw"
        module.fail_json(msg=f"{what}: disable firewalld, or {remedy}", plain=True)


def save_state(module: AnsibleModule, state: dict[str, Any]) -> None:
    """Store ufw's settings and rule files, unless an earlier call stored them."""
    if BACKUP.exists() or module.check_mode:
        return
    texts = {path.name: path.read_text(encoding="utf-8") for path in FILES.values() if path.exists()}
    write_atomic(BACKUP, json.dumps({"state": state, "files": texts}), 0o644)


def present(module: AnsibleModule, firewall: Firewall) -> dict[str, Any]:
    """Add and delete rules, enable ufw, and return the result of the module."""
    reject_firewalld(module)
    state, current = current_state(), current_rules()
    ssh, rules = desired_rules(module, current)
    target = {**state, "enabled": True, "ipv6": state["ipv6"] or Path("/proc/net/if_inet6").exists()}
    if state["incoming"] == "allow":
        target["incoming"] = "deny"
    # If two rules are equal, the last one applies. Without IPv6 in ufw there are no IPv6 rules.
    desired = list({rule.identity: rule for rule in [*rules, *ssh] if rule.family == 4 or target["ipv6"]}.values())
    delete, add = plan_changes(current, MARK, desired)
    start = not state["enabled"] or not loaded(module, state)
    changed = bool(delete or add or target != state or start)
    if changed:
        save_state(module, state)
    if target["ipv6"] != state["ipv6"]:
        firewall.set_ipv6("yes")
    if start and state["enabled"]:
        # ufw cannot change rules of chains that the kernel does not have.
        firewall.enable()
    # ufw does not move an existing rule that gets a new comment, so only new rules for SSH are prepended.
    first = {rule.identity for rule in ssh} - {rule.identity for rule in current}
    # SSH comes first, so that an interruption at any point leaves the host reachable.
    for rule in sorted(add, key=lambda rule: rule.identity not in first):
        firewall.add(rule, rule.identity in first)
    for rule in delete:
        firewall.delete(rule)
    # ufw answers "Skipping inserting existing rule" with exit code 0 if the same connections have another action.
    there = {rule.identity for rule in current_rules()}
    if not module.check_mode and (lost := [describe(rule) for rule in add if rule.identity not in there]):
        why = f"ufw does not add `{lost[0]}` beside a rule of its own: delete that rule"
        module.fail_json(msg=f"firewall: {why}", plain=True)
    if target["incoming"] != state["incoming"]:
        firewall.ufw("default", target["incoming"], "incoming")
    if not state["enabled"]:
        firewall.enable()
    elif target["ipv6"] != state["ipv6"]:
        firewall.ufw("reload")
    managed = [rule for rule in current if rule.comment.startswith(MARK)]
    added = {rule.identity for rule in add}
    after = [rule for rule in managed if rule not in delete and rule.identity not in added] + add
    return {
        "changed": changed,
        "rollback_pending": rollback_pending(module),
        "diff": {"before": show({**state, "enabled": not start}, managed), "after": show(target, after)},
    }


def start_rollback_timer(module: AnsibleModule) -> None:
    """Schedule a command that disables ufw."""
    module.run_command(["systemctl", "stop", f"{ROLLBACK}.timer"], handle_exceptions=False)
    timeout = module.params["rollback_timeout"]
    argv = ["systemd-run", "--quiet", "--collect", f"--unit={ROLLBACK}", f"--on-active={timeout}"]
    code, _out, err = module.run_command([*argv, "--timer-property=AccuracySec=1s", "ufw", "disable"])
    if code:
        module.fail_json(msg=f"firewall: cannot start the rollback timer, ufw stays off: {err.strip()}", plain=True)


def rollback_pending(module: AnsibleModule) -> bool:
    """Tell whether a rollback timer runs."""
    argv = ["systemctl", "is-active", "--quiet", f"{ROLLBACK}.timer"]
    return bool(module.run_command(argv, handle_exceptions=False)[0] == 0)


def absent(module: AnsibleModule, firewall: Firewall) -> dict[str, Any]:
    """Delete the managed rules, restore ufw's former settings, and return the result of the module."""
    state, current = current_state(), current_rules()
    saved = json.loads(BACKUP.read_text(encoding="utf-8")) if BACKUP.exists() else {"state": state, "files": {}}
    before = saved["state"]
    managed = [rule for rule in current if rule.comment.startswith(MARK)]
    changed = bool(managed) or state != before or BACKUP.exists()
    # Disable ufw before its rules are deleted: the rule for SSH is one of them.
    if state["enabled"] and not before["enabled"]:
        firewall.ufw("disable")
    if state["incoming"] != before["incoming"]:
        firewall.ufw("default", before["incoming"], "incoming")
    for rule in sorted(managed, key=lambda rule: rule.source in ANYWHERE.values()):
        firewall.delete(rule)
    if state["ipv6"] != before["ipv6"]:
        firewall.set_ipv6("yes" if before["ipv6"] else "no")
    if BACKUP.exists() and not module.check_mode:
        restore_files(saved["files"], before["enabled"])
        BACKUP.unlink()
        if not any(BACKUP.parent.iterdir()):
            BACKUP.parent.rmdir()
    return {
        "changed": changed,
        "rollback_pending": False,
        "diff": {"before": show(state, managed), "after": show(before, [])},
    }


def restore_files(texts: dict[str, str], enabled: bool) -> None:
    """Restore the text of rule files with the same rules: ufw adds its logging rules to them once it was enabled."""
    for family, path in FILES.items():
        text = texts.get(path.name)
        if text and not enabled and parse_rules(text, family) == parse_rules(path.read_text(encoding="utf-8"), family):
            path.write_text(text, encoding="utf-8")


def main() -> None:
    module = AnsibleModule(argument_spec=argument_spec(DOCUMENTATION), supports_check_mode=True)
    apply = present if module.params["state"] == "present" else absent
    module.exit_json(**apply(module, Firewall(module)))


if __name__ == "__main__":
    main()
