#!/usr/bin/python
"""Make the configuration of sshd stricter with a drop-in."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: sshd_hardening
short_description: Make the configuration of sshd stricter, never weaker
description:
  - Reads the effective settings of sshd (C(sshd -T)) without O(path), and writes to O(path) only the settings that are weaker
    than the ones that trainyard guarantees. A setting of the host that is as strict or stricter stays unchanged.
  - An authentication method that C(AuthenticationMethods) requires in addition to a key stays enabled.
  - Warns if another file that sshd reads first prevents a setting.
options:
  path:
    description: The drop-in. It is removed if the configuration is strict already.
    type: path
    required: true
  state:
    description: With C(absent), remove the drop-in.
    type: str
    choices: [present, absent]
    default: present
  config:
    description: The main configuration file of sshd.
    type: path
    default: /etc/ssh/sshd_config
  user:
    description: Login user; settings for this user (C(Match) blocks) are checked too.
    type: str
    default: ""
extends_documentation_fragment: [trainyard, trainyard.files]
"""

EXAMPLES = r"""
- name: Disable password authentication
  sshd_hardening:
    path: /etc/ssh/sshd_config.d/10-trainyard.conf
"""

RETURN = r"""
up_to_date:
  description: Whether O(path) was as O(state) asks before this task.
  type: bool
  returned: success
reload_is_due:
  description: Whether O(path) changed after M(service_reload) last reloaded sshd, also in an earlier play that was killed.
  type: bool
  returned: success
"""

import os
import tempfile
from pathlib import Path

from ansible.module_utils.argument_spec import argument_spec
from ansible.module_utils.atomic_file import write_atomic
from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.config_digest import digest, read_digest
from ansible.module_utils.ssh_session import ssh_session
from ansible.module_utils.sshd_config import hardening, ineffective, read_settings, with_drop_in

SSHD = "/usr/sbin/sshd"
SERVICE = "ssh"  # the name that M(service_reload) uses for sshd
HEADER = """\
# trainyard: settings that are stricter than those of this host; removed by playbooks/reset.yml
# sshd uses the first value of each setting, and reads this folder in the order of the file names.
"""


class Sshd:
    """Asks sshd for its settings, with temporary files in one folder."""

    def __init__(self, module: AnsibleModule, folder: Path) -> None:
        self.module = module
        self.folder = folder

    def settings(self, text: str, connection: str = "") -> dict[str, str]:
        """Return the effective settings of a configuration; `connection` selects its Match blocks (`sshd -C`).

        Ends the module if sshd rejects the configuration.
        """
        file = self.place(text, "sshd_config")
        argv = [SSHD, "-T", "-f", str(file), *(["-C", connection] if connection else [])]
        code, out, err = self.module.run_command(argv)
        if code:
            reason = " ".join((err or out).split())[-300:].replace(str(file), self.module.params["config"])
            self.module.fail_json(msg=f"sshd rejects its configuration, nothing was written: {reason}", plain=True)
        return read_settings(out)

    def place(self, text: str, name: str = "drop-in") -> Path:
        """Write a temporary file and return its path."""
        file = self.folder / name
        file.write_text(text, encoding="utf-8")
        return file


def harden(module: AnsibleModule, sshd: Sshd) -> str:
    """Return the text of the drop-in, and warn of settings that it cannot change for every user or the login user."""
    main, drop_in = Path(module.params["config"]), Path(module.params["path"])
    text, failed = hardening(main, drop_in, HEADER, sshd.settings, sshd.place)
    if text and module.params["user"]:
        session = ssh_session()
        peer = session.peer if session else "127.0.0.1"
        complete = with_drop_in(main, drop_in, sshd.place(text))[0]
        lines = [line for line in text.splitlines() if not line.startswith(("#", "ClientAlive"))]
        settings = sshd.settings(complete, f"user={module.params['user']},host={peer},addr={peer}")
        failed += [f"{word} for {module.params['user']}" for word in ineffective(lines, settings) if word not in failed]
    if failed:
        module.warn(
            f"{', '.join(failed)}: another file, or a Match block, sets it and precedes {drop_in}; remove that setting, or "
            f"include {drop_in.parent}/*.conf first in {main}"
        )
    return text


def main() -> None:
    module = AnsibleModule(argument_spec=argument_spec(DOCUMENTATION), supports_check_mode=True)
    path = Path(module.params["path"])
    before = path.read_text(encoding="utf-8") if path.is_file() else ""
    try:
        with tempfile.TemporaryDirectory(prefix="trainyard-") as folder:
            text = harden(module, Sshd(module, Path(folder))) if module.params["state"] == "present" else ""
        changed = text != before or (not text and os.path.lexists(path))
        if changed and not module.check_mode:
            if text:
                write_atomic(path, text, 0o644)
            else:
                path.unlink()
        reload_is_due = digest([path]) != read_digest(SERVICE)
    except OSError as error:
        module.fail_json(msg=f"cannot write {path}: {error.strerror}", plain=True)
    diff = {"before_header": str(path), "after_header": str(path), "before": before, "after": text}
    diffs = [diff] if changed else []
    module.exit_json(changed=changed, up_to_date=not changed, reload_is_due=reload_is_due, diff=diffs)


if __name__ == "__main__":
    main()
