#!/usr/bin/python
"""Reload a service whose configuration changed since it last read it."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: service_reload
short_description: Reload a systemd unit whose configuration files changed
description:
  - Does what a handler does, but also works after a play that was killed between the change of a file and the handler. A digest
    of the configuration that was read last is stored under C(/var/lib/trainyard/read), which C(playbooks/reset.yml) removes.
  - A unit that is not running stays stopped.
  - If a file is a unit file, systemd reloads its units first.
options:
  name:
    description: The unit or, with O(command), a name for the stored digest.
    type: str
    required: true
  files:
    description: The configuration files. They may be missing; a file that appears or disappears is a change.
    type: list
    elements: path
    required: true
  method:
    description: How the unit reads its configuration.
    type: str
    choices: [reload, restart]
    default: reload
  command:
    description: Command that reads the configuration, instead of the unit.
    type: list
    elements: str
    default: []
  validate:
    description: Command that checks the configuration. If it fails, the unit is not reloaded and the task fails.
    type: list
    elements: str
    default: []
extends_documentation_fragment: [trainyard]
attributes:
  check_mode: {support: full, description: "Reports whether the unit would be reloaded."}
"""

EXAMPLES = r"""
- name: Reload sshd
  service_reload:
    name: ssh
    files: [/etc/ssh/sshd_config.d/10-trainyard.conf]
    validate: [/usr/sbin/sshd, -t]

- name: Export the folders
  service_reload:
    name: exports
    files: [/etc/exports.d/trainyard.exports]
    command: [exportfs, -ra]
"""

RETURN = r"""
"""

from pathlib import Path

from ansible.module_utils.argument_spec import argument_spec
from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.config_digest import digest, read_digest, record_digest

UNITS = Path("/etc/systemd/system")


def run(module: AnsibleModule, argv: list[str], error: str) -> None:
    """Run a command; if it fails, end the module with `error` and the output of the command."""
    code, out, err = module.run_command(argv)
    if code:
        module.fail_json(msg=f"{error}: {' '.join((err or out).split())[-300:]}", plain=True)


def reload_unit(module: AnsibleModule) -> None:
    """Validate the configuration and make the unit, or the command, read it."""
    params = module.params
    name = params["name"]
    if params["validate"]:
        run(module, params["validate"], f"the configuration of {name} is not valid")
    if params["command"]:
        run(module, params["command"], f"cannot apply the configuration of {name}")
        return
    if any(Path(path).is_relative_to(UNITS) for path in params["files"]):
        run(module, ["systemctl", "daemon-reload"], "systemd cannot reload its units")
    action = "try-restart" if params["method"] == "restart" else "try-reload-or-restart"
    run(module, ["systemctl", action, name], f"cannot {params['method']} {name}, see journalctl -u {name}")


def main() -> None:
    module = AnsibleModule(argument_spec=argument_spec(DOCUMENTATION), supports_check_mode=True)
    name, current = module.params["name"], digest(module.params["files"])
    if current == read_digest(name):
        module.exit_json(changed=False)
    if not module.check_mode:
        reload_unit(module)
        record_digest(name, current)
    module.exit_json(changed=True)


if __name__ == "__main__":
    main()
