#!/usr/bin/python
"""The firewall's rules that are ours: added, and withdrawn."""

from __future__ import annotations

DOCUMENTATION = r"""
module: ufw_rules
short_description: Rules of ufw that are ours, added and withdrawn, and everybody else's left alone
description:
  - Rules whose comment begins with C(mark) are ours. Those that are not in C(rules) any more are withdrawn; all others
    are left as they are, and one that somebody else made already stays theirs.
  - Before ufw is switched on, the port that this very SSH connection came in by, and every port that sshd listens on,
    is open to anywhere; these rules come before all others. Incoming connections are then denied unless a rule says
    otherwise.
  - What ufw was like before is kept under C(keep), and C(state=absent) brings that back.
options:
  rules:
    description: What to let in, besides SSH.
    type: list
    elements: dict
    default: []
    suboptions:
      port: {description: "A port, a range such as C(6000:6010), or C(any).", type: str, default: any}
      proto: {description: "tcp, udp or any.", type: str, default: tcp}
      source: {description: "An address, a network, or C(any).", type: str, default: any}
      why: {description: "What it is for; goes into the rule's comment.", type: str, default: ""}
  state:
    description: C(absent) withdraws our rules and makes ufw what it was.
    type: str
    choices: [present, absent]
    default: present
  mark:
    description: How the comments of our rules begin.
    type: str
    default: trainyard
  keep:
    description: Folder for what ufw was like before.
    type: path
    default: /var/lib/trainyard/firewall
  fuse:
    description: >-
      Seconds after which ufw is switched off again, unless the unit C(trainyard-firewall-fuse.timer) is stopped before;
      counts only when this call switched it on. 0 for never.
    type: int
    default: 0
attributes:
  check_mode:
    support: full
  diff_mode:
    support: full
author: trainyard
"""

EXAMPLES = r"""
- name: Let the peers in
  ufw_rules:
    rules:
      - {source: 192.168.1.12, why: peer node2}
      - {port: "123", proto: udp, source: 192.168.1.12, why: time}
"""

RETURN = r"""
fuse_lit:
  description: Whether ufw is switched off again unless the fuse is put out, lit by this call or by one of a play that was killed.
  returned: success
  type: bool
"""

import json
import re
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.ssh_session import ssh_session
from ansible.module_utils.ufw import ANYWHERE, changes, line, parse, wanted, words

FILES = {4: Path("/etc/ufw/user.rules"), 6: Path("/etc/ufw/user6.rules")}
SETTINGS = Path("/etc/default/ufw")
SWITCH = Path("/etc/ufw/ufw.conf")
POLICIES = {"DROP": "deny", "REJECT": "reject", "ACCEPT": "allow"}
FUSE = "trainyard-firewall-fuse"


def setting(path, name, default):
    """The value of NAME=value in a file of shell assignments; the last one counts."""
    found = re.findall(rf"^\s*{name}=[\"']?(\w*)", path.read_text(), re.M) if path.exists() else []
    return found[-1] if found else default


def status():
    """What ufw is like, whether or not its rules are loaded."""
    return {
        "enabled": setting(SWITCH, "ENABLED", "no") == "yes",
        "incoming": POLICIES.get(setting(SETTINGS, "DEFAULT_INPUT_POLICY", "DROP"), "deny"),
        "ipv6": setting(SETTINGS, "IPV6", "yes") == "yes",
    }


def rules():
    return [rule for family, path in FILES.items() if path.exists() for rule in parse(path.read_text(), family)]


def ssh_ports(module):
    """The port that this connection came in by, and those of sshd's settings."""
    way = ssh_session()
    _, out, _ = module.run_command(["/usr/sbin/sshd", "-T"], handle_exceptions=False) if sshd() else (0, "", "")
    configured = [int(port) for port in re.findall(r"^port (\d+)$", out, re.M)]
    return sorted({*([way[1]] if way else []), *configured}) or [22]


def sshd():
    return Path("/usr/sbin/sshd").exists()


def show(state, some):
    """ufw as the lines of a diff: how it is, and our rules."""
    lines = [f"ufw is {'on' if state['enabled'] else 'off'}", f"incoming: {state['incoming']}"]
    lines += [f"IPv6: {'yes' if state['ipv6'] else 'no'}", *sorted(line(rule) for rule in some)]
    return "".join(f"{text}\n" for text in lines)


class Firewall:
    """ufw's own commands; with `check` none is run."""

    def __init__(self, module):
        self.module = module

    def ufw(self, *argv):
        if self.module.check_mode:
            return
        code, out, err = self.module.run_command(["ufw", *argv])
        if code:
            said = " ".join((err or out).split())
            self.module.fail_json(msg=f"ufw {' '.join(argv)}: {said}", plain=True)

    def withdraw(self, rule):
        self.ufw("delete", *words(rule))

    def add(self, rule, first):
        self.ufw(*(["prepend"] if first else []), *words(rule), "comment", rule.comment)

    def set_ipv6(self, value):
        if not self.module.check_mode:
            text = SETTINGS.read_text()
            changed = re.sub(r"^\s*IPV6=.*$", f"IPV6={value}", text, flags=re.M)
            SETTINGS.write_text(changed if changed != text else f"{text}\nIPV6={value}\n")


def present(module, firewall):
    mark = module.params["mark"]
    desired, ssh = [], []
    try:
        for port in ssh_ports(module):
            ssh += wanted(str(port), "tcp", "any", f"{mark}: SSH")
        for entry in module.params["rules"]:
            comment = f"{mark}: {entry['why']}".replace("'", "")
            desired += wanted(entry["port"], entry["proto"], entry["source"], comment)
    except ValueError as error:
        module.fail_json(msg=f"firewall: {error}", plain=True)
    if module.run_command(["systemctl", "is-active", "--quiet", "firewalld"], handle_exceptions=False)[0] == 0:
        module.fail_json(
            msg="firewalld runs here, and two firewalls know nothing of each other: disable it, or set "
            "firewall_enabled: false and open all TCP between the cluster's addresses there",
            plain=True,
        )
    state, there = status(), rules()
    target = {**state, "enabled": True, "ipv6": state["ipv6"] or Path("/proc/net/if_inet6").exists()}
    if state["incoming"] == "allow":
        target["incoming"] = "deny"
    # The last of a list wins, where two entries say the same; a family that ufw does not do has no rules.
    desired = list({rule.what: rule for rule in [*desired, *ssh] if rule.family == 4 or target["ipv6"]}.values())
    withdraw, add = changes(there, mark, desired)
    kept = Path(module.params["keep"], "before.json")
    if (withdraw or add or target != state) and not kept.exists() and not module.check_mode:
        texts = {path.name: path.read_text() for path in FILES.values() if path.exists()}
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.with_suffix(".new").write_text(json.dumps({"state": state, "files": texts}))
        kept.with_suffix(".new").rename(kept)
    if target["ipv6"] != state["ipv6"]:
        firewall.set_ipv6("yes")
    # A rule that is there gets another comment in its place: ufw would not move it.
    first = {rule.what for rule in ssh} - {rule.what for rule in there}
    # SSH before anything else: whatever ends this half-way, nobody is locked out.
    for rule in sorted(add, key=lambda rule: rule.what not in first):
        firewall.add(rule, rule.what in first)
    for rule in withdraw:
        firewall.withdraw(rule)
    if target["incoming"] != state["incoming"]:
        firewall.ufw("default", target["incoming"], "incoming")
    switched_on = target["enabled"] != state["enabled"]
    if switched_on:
        if module.params["fuse"] and not module.check_mode:
            light_fuse(module)
        firewall.ufw("--force", "enable")
    elif target["ipv6"] != state["ipv6"]:
        firewall.ufw("reload")
    ours = [rule for rule in there if rule.comment.startswith(mark)]
    after = [rule for rule in ours if rule not in withdraw and rule.what not in {one.what for one in add}] + add
    return {
        "changed": bool(withdraw or add or target != state),
        "fuse_lit": fuse_lit(module),
        "diff": {"before": show(state, ours), "after": show(target, after)},
    }


def light_fuse(module):
    """Let ufw be switched off again in a while."""
    module.run_command(["systemctl", "stop", f"{FUSE}.timer"], handle_exceptions=False)
    argv = ["systemd-run", "--quiet", "--collect", f"--unit={FUSE}", f"--on-active={module.params['fuse']}"]
    code, _, err = module.run_command([*argv, "--timer-property=AccuracySec=1s", "ufw", "disable"])
    if code:
        module.fail_json(msg=f"firewall: no fuse could be lit, so ufw was not switched on: {err.strip()}", plain=True)


def fuse_lit(module):
    code, _, _ = module.run_command(["systemctl", "is-active", "--quiet", f"{FUSE}.timer"], handle_exceptions=False)
    return code == 0


def absent(module, firewall):
    mark = module.params["mark"]
    kept = Path(module.params["keep"], "before.json")
    state, there = status(), rules()
    known = json.loads(kept.read_text()) if kept.exists() else {"state": state, "files": {}}
    before = known["state"]
    ours = [rule for rule in there if rule.comment.startswith(mark)]
    changed = bool(ours) or state != before or kept.exists()
    # Off first: with our rules gone and the door shut, this very connection would be the last.
    if state["enabled"] and not before["enabled"]:
        firewall.ufw("disable")
    if state["incoming"] != before["incoming"]:
        firewall.ufw("default", before["incoming"], "incoming")
    for rule in sorted(ours, key=lambda rule: rule.source in ANYWHERE.values()):
        firewall.withdraw(rule)
    if state["ipv6"] != before["ipv6"]:
        firewall.set_ipv6("yes" if before["ipv6"] else "no")
    if kept.exists() and not module.check_mode:
        for family, path in FILES.items():
            text = known["files"].get(path.name)
            # The same rules in ufw's other words: it also writes down how it logs, once it was on.
            if text and not before["enabled"] and parse(text, family) == parse(path.read_text(), family):
                path.write_text(text)
        kept.unlink()
        if not any(kept.parent.iterdir()):
            kept.parent.rmdir()
    return {
        "changed": changed,
        "fuse_lit": False,
        "diff": {"before": show(state, ours), "after": show(before, [])},
    }


def main():
    one = {
        "port": {"default": "any"},
        "proto": {"default": "tcp"},
        "source": {"default": "any"},
        "why": {"default": ""},
    }
    module = AnsibleModule(
        argument_spec={
            "rules": {"type": "list", "elements": "dict", "default": [], "options": one},
            "state": {"choices": ["present", "absent"], "default": "present"},
            "mark": {"default": "trainyard"},
            "keep": {"type": "path", "default": "/var/lib/trainyard/firewall"},
            "fuse": {"type": "int", "default": 0},
        },
        supports_check_mode=True,
    )
    work = present if module.params["state"] == "present" else absent
    module.exit_json(**work(module, Firewall(module)))


if __name__ == "__main__":
    main()
