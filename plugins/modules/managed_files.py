#!/usr/bin/python
"""Write and remove several small files in one task."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: managed_files
short_description: Write and remove several small files
description:
  - M(ansible.builtin.template) and M(ansible.builtin.copy) need two round trips per file and M(ansible.builtin.file) needs one.
    This module needs one for all files. With M(ansible.builtin.template) a repeated run of C(site.yml) took 1.5 to 1.7 times
    as long as a play with as many tasks that do nothing, with this module 1.05 times (C(make bench NAME=site)).
  - Every file is written atomically. A missing folder is created.
  - A file in a user's home must be written or removed as that user (C(become) is false). As root, this module rejects a path
    that a user could redirect.
options:
  files:
    description: The files, in the order in which they are written.
    type: list
    elements: dict
    required: true
    suboptions:
      path:
        description: Absolute path.
        type: path
        required: true
      content:
        description: Content of the file. If it is empty, the file is removed.
        type: str
        default: ""
      mode:
        description: Mode of the file.
        type: str
        default: "0644"
      validate:
        description: Command that checks the content before the file is written; C(%s) is replaced with a file that holds it.
        type: list
        elements: str
        default: []
extends_documentation_fragment: [trainyard, trainyard.files]
"""

EXAMPLES = r"""
- name: Disable suspend and hibernation
  managed_files:
    files:
      - path: /etc/systemd/sleep.conf.d/trainyard.conf
        content: "{{ lookup('ansible.builtin.template', 'sleep.conf.j2') }}"
"""

RETURN = r"""
"""

import os
import tempfile
from pathlib import Path
from typing import Any

from ansible.module_utils.argument_spec import argument_spec
from ansible.module_utils.atomic_file import write_atomic
from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.managed_files import file_diff, update_files
from ansible.module_utils.safe_path import check_path


def validate(module: AnsibleModule, entry: dict[str, Any]) -> None:
    """End the module with an error if the validation command of a file rejects its content."""
    with tempfile.NamedTemporaryFile("w", suffix=".trainyard") as file:
        file.write(entry["content"])
        file.flush()
        code, out, err = module.run_command([word.replace("%s", file.name) for word in entry["validate"]])
    if code:
        module.fail_json(
            msg=f"{entry['path']} was not written, validation failed: {' '.join((err or out).split())[-300:]}"
        )


def is_current(path: Path, content: str, mode: int) -> bool:
    """Tell whether a file exists with this content and mode, and belongs to the current user."""
    if path.is_symlink() or not path.is_file():
        return False
    status = path.stat()
    return path.read_text() == content and status.st_mode & 0o7777 == mode and status.st_uid == os.geteuid()


def difference(path: Path, content: str, mode: int) -> dict[str, str]:
    """Return the change of a file for C(--diff), without the content of files that not every user may read."""
    private = not mode & 0o044 or (os.path.lexists(path) and not path.lstat().st_mode & 0o044)
    before = path.read_text() if path.is_file() and not private else ""
    return file_diff(path, before, "" if private else content)


def update_file(module: AnsibleModule, entry: dict[str, Any]) -> dict[str, str] | None:
    """Write or remove one file, unless in check mode; return its diff, or None if it is up to date. Raises OSError."""
    path, content, mode = Path(entry["path"]), entry["content"], int(entry["mode"], 8)
    check_path(path.parent / "-")
    if is_current(path, content, mode) if content else not os.path.lexists(path):
        return None
    diff = difference(path, content, mode)
    if content and entry["validate"]:
        validate(module, entry)
    if not module.check_mode:
        if content:
            write_atomic(path, content, mode)
        else:
            path.unlink()
    return diff


def main() -> None:
    update_files(AnsibleModule(argument_spec=argument_spec(DOCUMENTATION), supports_check_mode=True), update_file)


if __name__ == "__main__":
    main()
