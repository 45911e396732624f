"""Detect paths that a user can redirect while root uses them. Standard library only."""

from __future__ import annotations

import errno
import os
import pwd
import stat
from pathlib import Path

MAX_LINKS = 40  # as in the kernel


class UnsafePathError(OSError):
    """A user could redirect a path that root is about to use; `strerror` is the message."""

    def __init__(self, where: Path, status: os.stat_result) -> None:
        reason = f"belongs to the user {user_name(status.st_uid)}" if status.st_uid else "is writable for every user"
        super().__init__(0, f"{where} {reason}, who could redirect the path while root uses it")


def user_name(uid: int) -> str:
    """Return the name of a user, or its number if it has none."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def check_path(path: Path) -> None:
    """Raise UnsafePathError if a user other than root can replace a folder or symbolic link on the way to `path`.

    Symbolic links of root are followed. The last component may be missing, and may belong to anyone. Does nothing in a process
    that does not run as root: a user cannot gain anything from the user's own links. Raises OSError for a loop of links.
    """
    if os.geteuid() != 0:
        return
    todo = [*reversed(path.absolute().parts[1:])]
    current, links = Path("/"), 0
    while todo:
        name = todo.pop()
        if name == "..":
            current = current.parent
            continue
        _check_folder(current)
        entry = current / name
        try:
            status = entry.lstat()
        except FileNotFoundError:
            return
        if not stat.S_ISLNK(status.st_mode):
            current = entry
            continue
        links += 1
        if status.st_uid != 0:
            raise UnsafePathError(entry, status)
        if links > MAX_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
        target = entry.readlink()
        current = Path("/") if target.is_absolute() else current
        todo.extend(reversed(target.parts[1:] if target.is_absolute() else target.parts))


def _check_folder(folder: Path) -> None:
    """Raise UnsafePathError if a user other than root can rename entries of the folder."""
    status = folder.lstat()
    shared = status.st_mode & stat.S_IWOTH and not status.st_mode & stat.S_ISVTX
    if status.st_uid != 0 or shared:
        raise UnsafePathError(folder, status)
