#!/usr/bin/python
"""Write and remove several small files, and lines for the hosts of the cluster in shared files, in one task."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: managed_files
short_description: Write several small files, and lines for the hosts of the cluster in shared files
description:
  - M(ansible.builtin.template) and M(ansible.builtin.copy) need two round trips per file and M(ansible.builtin.file) needs one.
    This module needs one for all files (C(make bench NAME=site)).
  - With O(files[].lines), the module manages one block between two marker lines of the file. Everything outside of the block
    stays unchanged. Every line ends with a comment that names its host. A play that covers only some hosts (C(--limit), or an
    unreachable host) keeps the lines of the remaining hosts. M(ansible.builtin.blockinfile) replaces a block as a unit, so it
    would drop these lines.
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
        description: Content of the file. If it is empty, the file is removed. Without effect with O(files[].lines).
        type: str
        default: ""
      lines:
        description:
          - The lines of every host, without the comment that names it. A new block is inserted at the beginning of the file.
        type: dict
      keep_prefix:
        description: Lines of hosts without an entry in O(files[].lines) stay only if they start with this text.
        type: str
        default: ""
      mode:
        description: Mode of the file; with O(files[].lines) only if this module creates the file.
        type: str
        default: "0644"
  members:
    description:
      - All hosts of the cluster, in the play or not, for O(files[].lines). The lines of other hosts are removed. An empty list
        removes the block, and the file if this module created it.
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

- name: Add the hosts of the cluster to /etc/hosts
  managed_files:
    files:
      - path: /etc/hosts
        lines:
          node1: [192.168.1.11 node1]
    members: [node1, node2]
"""

RETURN = r"""
"""

import os
from pathlib import Path
from typing import Any

from ansible.module_utils.argument_spec import argument_spec
from ansible.module_utils.atomic_file import write_atomic
from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.host_lines import update_text
from ansible.module_utils.safe_path import check_path

Diff = dict[str, str]


def file_diff(path: Path, before: str, after: str) -> Diff:
    """Return the change of one file for C(--diff)."""
    return {"before_header": str(path), "after_header": str(path), "before": before, "after": after}


def is_current(path: Path, content: str, mode: int) -> bool:
    """Tell whether a file exists with this content and mode, and belongs to the current user."""
    if path.is_symlink() or not path.is_file():
        return False
    status = path.stat()
    return (
        path.read_text(encoding="utf-8") == content
        and status.st_mode & 0o7777 == mode
        and status.st_uid == os.geteuid()
    )


def difference(path: Path, content: str, mode: int) -> Diff:
    """Return the change of a file for C(--diff), without the content of files that not every user may read."""
    private = not mode & 0o044 or (os.path.lexists(path) and not path.lstat().st_mode & 0o044)
    before = path.read_text(encoding="utf-8") if path.is_file() and not private else ""
    return file_diff(path, before, "" if private else content)


def update_file(module: AnsibleModule, entry: dict[str, Any]) -> Diff | None:
    """Write or remove one file, unless in check mode; return its diff, or None if it is up to date. Raises OSError."""
    path, content, mode = Path(entry["path"]), entry["content"], int(entry["mode"], 8)
    check_path(path.parent / "-")
    if is_current(path, content, mode) if content else not os.path.lexists(path):
        return None
    diff = difference(path, content, mode)
    if not module.check_mode:
        if content:
            write_atomic(path, content, mode)
        else:
            path.unlink()
    return diff


def update_block(module: AnsibleModule, entry: dict[str, Any]) -> Diff | None:
    """Update the block of one file, unless in check mode; return its diff, or None if it is up to date. Raises OSError."""
    check_path(Path(entry["path"]))
    # If the path is a symbolic link, write the file that it points to.
    path = Path(entry["path"]).resolve()
    new = not path.exists()
    text = "" if new else path.read_bytes().decode("utf-8", "surrogateescape")
    lines = {member: [str(line) for line in given] for member, given in entry["lines"].items()}
    bad = [line for given in lines.values() for line in given if "\n" in line or "\r" in line]
    if bad:
        module.fail_json(msg=f"{path}: a line contains a line break: {bad[0]!r}")
    after = update_text(text, lines, module.params["members"], new, entry["keep_prefix"])
    if after == text or (after is None and new):
        return None
    if not module.check_mode:
        if after is None:
            path.unlink()
        else:
            write_atomic(path, after, int(entry["mode"], 8), keep=True)
    return file_diff(path, text, after or "")


def main() -> None:
    module = AnsibleModule(argument_spec=argument_spec(DOCUMENTATION), supports_check_mode=True)
    diffs = []
    for entry in module.params["files"]:
        try:
            diffs.append((update_file if entry["lines"] is None else update_block)(module, entry))
        except OSError as error:
            module.fail_json(msg=f"cannot write {entry['path']}: {error.strerror}", plain=True)
    changed = [diff for diff in diffs if diff]
    module.exit_json(changed=bool(changed), diff=changed)


if __name__ == "__main__":
    main()
