"""Update the files of a module's option `files`, and end the module with their changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ansible.module_utils.basic import AnsibleModule

Diff = dict[str, str]


def file_diff(path: object, before: str, after: str) -> Diff:
    """Return the change of one file for C(--diff)."""
    return {"before_header": str(path), "after_header": str(path), "before": before, "after": after}


def update_files(module: AnsibleModule, update: Callable[[AnsibleModule, dict[str, Any]], Diff | None]) -> None:
    """Update every file and end the module. `update` returns the change of one file, or None; it may raise OSError."""
    diffs = []
    for entry in module.params["files"]:
        try:
            diffs.append(update(module, entry))
        except OSError as error:
            module.fail_json(msg=f"cannot write {entry['path']}: {error.strerror}", plain=True)
    changed = [diff for diff in diffs if diff]
    module.exit_json(changed=bool(changed), diff=changed)
