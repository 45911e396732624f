#!/usr/bin/python
"""Keep lines for the hosts of the cluster in files that other programs and users also edit."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: managed_block
short_description: Keep lines for the hosts of the cluster in a shared file
description:
  - Manages one block between two marker lines. Everything outside of the block stays unchanged.
  - Every line ends with a comment that names its host. A play that covers only some hosts (C(--limit), or an unreachable
    host) keeps the lines of the remaining hosts. The lines of a host that is no longer a member are removed.
  - M(ansible.builtin.blockinfile) replaces a block as a unit, so it would drop the lines of hosts that are not in the play.
  - A file in a user's home must be written as that user (C(become) is false). As root, this module rejects a path that a user
    could redirect.
options:
  files:
    description: The files. A new block is inserted at the beginning of the file.
    type: list
    elements: dict
    required: true
    suboptions:
      path:
        description: Absolute path.
        type: path
        required: true
      lines:
        description: The lines of every host, without the comment that names it.
        type: dict
        default: {}
      mode:
        description: Mode of the file, if this module creates it.
        type: str
        default: "0644"
      keep_prefix:
        description: Lines of hosts without an entry in O(files[].lines) stay only if they start with this text.
        type: str
        default: ""
  members:
    description:
      - All hosts of the cluster, in the play or not. An empty list removes the block, and the file if this module created it.
    type: list
    elements: str
    default: []
extends_documentation_fragment: [trainyard, trainyard.files]
"""

EXAMPLES = r"""
- name: Add the hosts of the cluster to /etc/hosts
  managed_block:
    files:
      - path: /etc/hosts
        lines:
          node1: [192.168.1.11 node1]
    members: [node1, node2]
"""

RETURN = r"""
"""

from pathlib import Path
from typing import Any

from ansible.module_utils.argument_spec import argument_spec
from ansible.module_utils.atomic_file import write_atomic
from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.managed_files import file_diff, update_files
from ansible.module_utils.safe_path import check_path

# These lines are in files on hosts: a change of them would leave the blocks of earlier versions behind.
BEGIN = "# BEGIN trainyard: written by site.yml, taken away by playbooks/reset.yml"
END = "# END trainyard"
MARK = " # trainyard:"
# Records that this module created the file, so that the file is removed with its last line.
CREATED = "# trainyard made this file"


def split_block(text: str) -> tuple[str, list[str], str]:
    """Return the text before the block, the lines inside it, and the text after it."""
    lines = text.splitlines(keepends=True)
    plain = [line.rstrip("\n") for line in lines]
    if BEGIN not in plain:
        return text, [], ""
    first = plain.index(BEGIN)
    # A block without its end marker (an interrupted write) ends at its last line that has a mark.
    last = first
    for number in range(first + 1, len(plain)):
        if plain[number] == END:
            last = number
            break
        if MARK not in plain[number] and plain[number] != CREATED:
            break
        last = number
    inside = [line for line in plain[first + 1 : last + 1] if line != END]
    return "".join(lines[:first]), inside, "".join(lines[last + 1 :])


def block_lines(inside: list[str], lines: dict[str, list[str]], members: list[str], keep_prefix: str = "") -> list[str]:
    """Return the new lines of the block in the order of `members`.

    Hosts without new lines keep those of their current ones that start with `keep_prefix`.
    """
    current: dict[str, list[str]] = {}
    for line in inside:
        head, mark, member = line.rpartition(MARK)
        if mark and head.startswith(keep_prefix):
            current.setdefault(member, []).append(head)
    return [f"{line}{MARK}{member}" for member in members for line in lines.get(member, current.get(member, []))]


def update_text(
    text: str, lines: dict[str, list[str]], members: list[str], new: bool, keep_prefix: str = ""
) -> str | None:
    """Return the new text of a file, or None to remove the file; `new`: whether the file does not exist yet."""
    before, inside, after = split_block(text)
    created = new or CREATED in inside
    block = block_lines(inside, lines, members, keep_prefix)
    if not block:
        return None if created and not (before + after).strip() else before + after
    body = "\n".join([BEGIN, *([CREATED] if created else []), *block, END]) + "\n"
    return before + body + after if inside or BEGIN in text.splitlines() else body + text


def update_file(module: AnsibleModule, entry: dict[str, Any]) -> dict[str, str] | None:
    """Update one file, unless in check mode; return its diff, or None if it is up to date. Raises OSError."""
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
    update_files(AnsibleModule(argument_spec=argument_spec(DOCUMENTATION), supports_check_mode=True), update_file)


if __name__ == "__main__":
    main()
