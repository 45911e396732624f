#!/usr/bin/python
"""Module: lines of a file that belong to members of the cluster, one or more a member, in a block of ours."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: managed_block
short_description: Keep lines for the members of the cluster in a file that others write to as well
description:
  - Keeps a block between two marks in a file. What stands outside of it is nobody's business here and stays as it is.
  - Every line ends with a mark that names the member it is for. Lines of members that are not spoken of now (a play with
    C(--limit), a host that did not answer) stay; lines of who is a member no longer go.
options:
  files:
    description: The files. A new block goes to the beginning, where it changes no byte of what others wrote.
    type: list
    elements: dict
    required: true
    suboptions:
      path:
        description: Absolute path.
        type: path
        required: true
      lines:
        description: For every member the lines without their end mark.
        type: dict
        default: {}
      owner:
        description: Owner of the file if it is made here, and of its folder.
        type: str
      mode:
        description: Mode of the file if it is made here.
        type: str
        default: "0644"
  members:
    description: All members of the cluster, spoken of now or not. None takes the block away, and with it a file that was made for it.
    type: list
    elements: str
    default: []
author: trainyard
"""

EXAMPLES = r"""
- name: Know the peers by name
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

from ansible.module_utils.atomic_file import write_atomic
from ansible.module_utils.basic import AnsibleModule

BEGIN = "# BEGIN trainyard: written by site.yml, taken away by playbooks/reset.yml"
END = "# END trainyard"
MARK = " # trainyard:"
# A folder or file that was made for our lines is ours to take away; whose mark it bears is read off this line.
MADE = "# trainyard made this file"


def parted(text: str) -> tuple[str, list[str], str]:
    """Return what stands before the block, the block's lines without its marks, and what stands after it."""
    lines = text.splitlines(keepends=True)
    plain = [line.rstrip("\n") for line in lines]
    if BEGIN not in plain:
        return text, [], ""
    first = plain.index(BEGIN)
    # A block without its end, of a write that somebody cut short, ends with the last line that is ours.
    last = first
    for place in range(first + 1, len(plain)):
        if plain[place] == END:
            last = place
            break
        if MARK not in plain[place] and plain[place] != MADE:
            break
        last = place
    inside = [line for line in plain[first + 1 : last + 1] if line != END]
    return "".join(lines[:first]), inside, "".join(lines[last + 1 :])


def wanted(inside: list[str], lines: dict[str, list[str]], members: list[str]) -> list[str]:
    """Return the block's lines: in the members' order, as told now, else as they stand there."""
    kept: dict[str, list[str]] = {}
    for line in inside:
        head, mark, member = line.rpartition(MARK)
        if mark:
            kept.setdefault(member, []).append(head)
    return [f"{line}{MARK}{member}" for member in members for line in lines.get(member, kept.get(member, []))]


def settled(text: str, lines: dict[str, list[str]], members: list[str], new: bool) -> str | None:
    """Return the file's new text; None if the file is to go."""
    before, inside, after = parted(text)
    made = new or MADE in inside
    block = wanted(inside, lines, members)
    if not block:
        return None if made and not (before + after).strip() else before + after
    body = "\n".join([BEGIN, *([MADE] if made else []), *block, END]) + "\n"
    return before + body + after if inside or BEGIN in text.splitlines() else body + text


def main() -> None:
    one = {
        "path": {"type": "path", "required": True},
        "lines": {"type": "dict", "default": {}},
        "owner": {"type": "str"},
        "mode": {"type": "str", "default": "0644"},
    }
    module = AnsibleModule(
        argument_spec={
            "files": {"type": "list", "elements": "dict", "required": True, "options": one},
            "members": {"type": "list", "elements": "str", "default": []},
        },
        supports_check_mode=True,
    )
    diffs: list[dict[str, Any]] = []
    for entry in module.params["files"]:
        # A link (some keep /etc/hosts elsewhere) stays one: what it leads to is written.
        path = Path(entry["path"]).resolve()
        new = not path.exists()
        text = "" if new else path.read_bytes().decode("utf-8", "surrogateescape")
        lines = {member: [str(line) for line in given] for member, given in entry["lines"].items()}
        bad = [line for given in lines.values() for line in given if "\n" in line or "\r" in line]
        if bad:
            module.fail_json(msg=f"{path}: a line holds a line break: {bad[0]!r}")
        after = settled(text, lines, module.params["members"], new)
        if after == text or (after is None and new):
            continue
        diffs.append({"before_header": str(path), "after_header": str(path), "before": text, "after": after or ""})
        if module.check_mode:
            continue
        try:
            if after is None:
                path.unlink()
            else:
                write_atomic(path, after, int(entry["mode"], 8), entry["owner"], keep=True)
        except OSError as error:
            module.fail_json(msg=f"{path}: cannot be written: {error.strerror}")
    module.exit_json(changed=bool(diffs), diff=diffs)


if __name__ == "__main__":
    main()
