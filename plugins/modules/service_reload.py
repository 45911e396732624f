#!/usr/bin/python
"""Module: a unit that has read its settings."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: service_reload
short_description: Have a systemd unit, or a command, read settings that it has not read yet
description:
  - What a handler does, but right after a play that was killed between the file and the handler, too. What was read last is
    kept as a digest under C(/var/lib/trainyard/read), which reset.yml takes away.
  - A unit that is not running is left alone, it will read them when it starts.
  - Where a file is a unit's own, systemd reads it first.
options:
  name:
    description: The unit; or, with C(by), a name for what reads.
    type: str
    required: true
  files:
    description: The settings. One that is not there counts as that; if it never was, there is nothing to read.
    type: list
    elements: path
    required: true
  how:
    description: What makes the unit read.
    type: str
    choices: [reload, restart]
    default: reload
  by:
    description: A command that reads them, in place of the unit.
    type: list
    elements: str
    default: []
  test:
    description: A command that fails if the settings are not sound; nothing is done to the unit then.
    type: list
    elements: str
    default: []
author: trainyard
"""

EXAMPLES = r"""
- name: Have sshd read it
  service_reload:
    name: ssh
    files: [/etc/ssh/sshd_config.d/10-trainyard.conf]
    test: [/usr/sbin/sshd, -t]

- name: Export what the file says
  service_reload:
    name: exports
    files: [/etc/exports.d/trainyard.exports]
    by: [exportfs, -ra]
"""

RETURN = r"""
"""

import hashlib
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule

KEPT = Path("/var/lib/trainyard/read")
UNITS = Path("/etc/systemd/system")


def digest(files: list[str]) -> str:
    """Return a digest of the files that are there; empty if there is none."""
    there = [path for path in map(Path, files) if path.is_file()]
    if not there:
        return ""
    total = hashlib.sha256()
    for path in there:
        total.update(f"{path}\0".encode() + path.read_bytes() + b"\0")
    return total.hexdigest()


def run(module: AnsibleModule, argv: list[str], words: str) -> None:
    """Run a command; fail with `words` and what it said if it fails."""
    code, out, err = module.run_command(argv)
    if code:
        module.fail_json(msg=f"{words}: {' '.join((err or out).split())[-300:]}")


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "name": {"type": "str", "required": True},
            "files": {"type": "list", "elements": "path", "required": True},
            "how": {"type": "str", "choices": ["reload", "restart"], "default": "reload"},
            "by": {"type": "list", "elements": "str", "default": []},
            "test": {"type": "list", "elements": "str", "default": []},
        },
        supports_check_mode=True,
    )
    name, how, by = module.params["name"], module.params["how"], module.params["by"]
    kept = KEPT / name
    now = digest(module.params["files"])
    if now == (kept.read_text() if kept.exists() else ""):
        module.exit_json(changed=False)
    if not module.check_mode:
        if module.params["test"]:
            run(module, module.params["test"], f"{name} would not take its settings")
        if by:
            run(module, by, f"{name} could not be read")
        else:
            if any(Path(path).is_relative_to(UNITS) for path in module.params["files"]):
                run(module, ["systemctl", "daemon-reload"], "systemd did not read its units")
            do = "try-restart" if how == "restart" else "try-reload-or-restart"
            run(module, ["systemctl", do, name], f"{name} did not {how} (journalctl -u {name} says why)")
        if now:
            kept.parent.mkdir(parents=True, exist_ok=True)
            kept.write_text(now)
        else:
            kept.unlink(missing_ok=True)
    module.exit_json(changed=True)


if __name__ == "__main__":
    main()
