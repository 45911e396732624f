#!/usr/bin/python
"""Create and remove folders of a user as root, without acting as root where the user could redirect the path."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: user_folder
short_description: Create and remove folders that belong to a user
description:
  - M(ansible.builtin.file) as root follows symbolic links that a user places in folders of this user, and changes the owner
    and mode of their targets. This module acts as root only in folders that belong to root, and as the user elsewhere.
options:
  paths:
    description: Absolute paths of the folders.
    type: list
    elements: path
    required: true
  owner:
    description: The user to whom the folders belong.
    type: str
    required: true
  mode:
    description: Mode of a folder with O(state=present).
    type: str
    default: "0755"
  state:
    description:
      - C(present) creates the folder and missing folders above it.
      - C(absent) removes the folder with everything in it.
      - C(pruned) removes its empty subfolders, and then the folder if it is empty.
    type: str
    choices: [present, absent, pruned]
    default: present
extends_documentation_fragment: [trainyard]
attributes:
  check_mode: {support: full, description: "Reports whether folders would change."}
"""

EXAMPLES = r"""
- name: Create the data directory
  user_folder:
    paths: [/srv/trainyard]
    owner: ubuntu
  become: true
"""

RETURN = r"""
"""

import contextlib
import errno
import os
import pwd
import stat
import subprocess
from pathlib import Path

from ansible.module_utils.acting_as import acting_as
from ansible.module_utils.argument_spec import argument_spec
from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.safe_path import UnsafePathError, check_path, user_name


def owned_by_root(path: Path) -> bool:
    """Return whether this process is root, and only root can redirect the path."""
    try:
        check_path(path)
    except UnsafePathError:
        return False
    return os.geteuid() == 0


def make(path: Path, user: pwd.struct_passwd, mode: int, check: bool) -> bool:
    """Create a folder and return whether it changed. Raises OSError.

    Where only root can redirect the path, missing parents belong to root, and an existing folder becomes the user's.
    """
    as_root = owned_by_root(path)
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    if missing and check:
        return True
    for folder in reversed(missing):
        folder.mkdir()
        folder.chmod(mode if folder == path else 0o755)
    # The target of a link of root, or of one that the user may follow.
    handle = os.open(path.resolve(), os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        status = os.fstat(handle)
        if status.st_uid != user.pw_uid and not as_root:
            if user.pw_uid == 0:
                return bool(missing)
            raise PermissionError(0, f"the folder belongs to the user {user_name(status.st_uid)}, not {user.pw_name}")
        changed = bool(missing)
        if status.st_uid != user.pw_uid and not check:
            os.fchown(handle, user.pw_uid, -1)
        if stat.S_IMODE(status.st_mode) != mode and not check:
            os.fchmod(handle, mode)
        return changed or status.st_uid != user.pw_uid or stat.S_IMODE(status.st_mode) != mode
    finally:
        os.close(handle)


def remove(path: Path, check: bool) -> bool:
    """Remove a folder with its content, or a link, and return whether it existed. Raises OSError."""
    if not os.path.lexists(path):
        return False
    if not check:
        # Follows no link, and has no limit of the depth, unlike shutil.rmtree.
        command = ["rm", "-rf", "--", str(path)]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
        if done.returncode:  # a run may have closed a folder to its user, who this process then is
            opened = ["find", str(path), "-type", "d", "!", "-perm", "-700", "-exec", "chmod", "u+rwx", "{}", ";"]
            subprocess.run(opened, capture_output=True, check=False)
            done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
        if done.returncode:
            raise OSError(errno.EIO, done.stderr.strip().rpartition(": ")[2])
    return True


def prune(path: Path, user: pwd.struct_passwd, check: bool) -> bool:
    """Remove the empty subfolders of a folder, and the folder if it is empty; return whether anything was removed."""
    if path.is_symlink() or not path.is_dir():
        return False
    with contextlib.nullcontext() if owned_by_root(path / "-") else acting_as(user):
        entries = list(path.iterdir())
        empty = [entry for entry in entries if is_empty_folder(entry)]
        removed = [entry for entry in empty if check or removed_folder(entry)]
    last = len(removed) == len(entries) and (check or removed_folder(path))
    return bool(removed) or last


def is_empty_folder(path: Path) -> bool:
    """Return whether the path is a folder without entries that this process may list; a link is not a folder."""
    try:
        return path.is_dir() and not path.is_symlink() and not any(path.iterdir())
    except OSError:
        return False


def removed_folder(path: Path) -> bool:
    """Remove an empty folder; return False if it is in use, such as a mount point."""
    try:
        path.rmdir()
    except OSError:
        return False
    return True


def change(path: Path, user: pwd.struct_passwd, mode: int, state: str, check: bool) -> bool:
    """Bring one folder into its state, as root or as the user; return whether it changed. Raises OSError."""
    with contextlib.nullcontext() if owned_by_root(path) else acting_as(user):
        if state == "present":
            return make(path, user, mode, check)
        return remove(path, check) if state == "absent" else prune(path, user, check)


def main() -> None:
    module = AnsibleModule(argument_spec=argument_spec(DOCUMENTATION), supports_check_mode=True)
    params = module.params
    verb = "create" if params["state"] == "present" else "remove"
    changed = False
    for name in params["paths"]:
        try:
            user = pwd.getpwnam(params["owner"])
            changed |= change(Path(name), user, int(params["mode"], 8), params["state"], module.check_mode)
        except KeyError:
            module.fail_json(msg=f"the user {params['owner']} does not exist on this host", plain=True)
        except OSError as error:
            remedy = "; a file system without owners, as exFAT or NTFS, holds no data directory" * (
                error.errno == errno.EPERM
            )
            module.fail_json(msg=f"cannot {verb} {name} for {params['owner']}: {error.strerror}{remedy}", plain=True)
    module.exit_json(changed=changed)


if __name__ == "__main__":
    main()
