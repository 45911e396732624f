#!/usr/bin/python
"""Module: small files that are ours alone, several in one task."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: managed_files
short_description: Write and remove small files of root's that are ours alone
description:
  - What M(ansible.builtin.template) does in two round trips a file, and M(ansible.builtin.file) in one, is one for all of them here.
  - A file is there whole or not at all. Its folder is made where it is lacking.
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
      text:
        description: All that the file holds; empty for a file that is not to be there.
        type: str
        default: ""
      mode:
        description: Its mode.
        type: str
        default: "0644"
      test:
        description: A command that fails if the text is not sound; C(%s) is a file that holds it. Nothing is written then.
        type: list
        elements: str
        default: []
attributes:
  check_mode:
    support: full
  diff_mode:
    support: full
author: trainyard
"""

EXAMPLES = r"""
- name: Stay awake
  managed_files:
    files:
      - path: /etc/systemd/sleep.conf.d/trainyard.conf
        text: "{{ lookup('ansible.builtin.template', 'sleep.conf.j2') }}"
"""

RETURN = r"""
"""

import os
import tempfile
from pathlib import Path
from typing import Any

from ansible.module_utils.atomic_file import write_atomic
from ansible.module_utils.basic import AnsibleModule


def sound(module: AnsibleModule, entry: dict[str, Any]) -> None:
    """Fail where the file's own test does not take its text."""
    with tempfile.NamedTemporaryFile("w", suffix=".trainyard") as file:
        file.write(entry["text"])
        file.flush()
        code, out, err = module.run_command([word.replace("%s", file.name) for word in entry["test"]])
    if code:
        said = " ".join((err or out).split())[-300:]
        module.fail_json(msg=f"{entry['path']} was not written, its test failed: {said}")


def main() -> None:
    one = {
        "path": {"type": "path", "required": True},
        "text": {"type": "str", "default": ""},
        "mode": {"type": "str", "default": "0644"},
        "test": {"type": "list", "elements": "str", "default": []},
    }
    module = AnsibleModule(
        argument_spec={"files": {"type": "list", "elements": "dict", "required": True, "options": one}},
        supports_check_mode=True,
    )
    diffs: list[dict[str, Any]] = []
    for entry in module.params["files"]:
        path, text, mode = Path(entry["path"]), entry["text"], int(entry["mode"], 8)
        there = os.path.lexists(path)
        status = path.lstat() if there else None
        before = path.read_text() if path.is_file() else ""
        same = status and not path.is_symlink() and before == text and status.st_mode & 0o7777 == mode
        if (same and status and status.st_uid == 0) if text else not there:
            continue
        # What others may not read is not shown either.
        shown = (before, text) if mode & 0o044 and not (status and not status.st_mode & 0o044) else ("", "")
        diffs.append({"before_header": str(path), "after_header": str(path), "before": shown[0], "after": shown[1]})
        if text and entry["test"]:
            sound(module, entry)
        if module.check_mode:
            continue
        try:
            if text:
                write_atomic(path, text, mode)
            else:
                path.unlink()
        except OSError as error:
            module.fail_json(msg=f"{path}: cannot be written: {error.strerror}")
    module.exit_json(changed=bool(diffs), diff=diffs)


if __name__ == "__main__":
    main()
