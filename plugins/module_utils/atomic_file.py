"""Write a file atomically. Standard library only: modules import it on the managed host."""

from __future__ import annotations

import os
import pwd
import tempfile
from pathlib import Path


def write_atomic(path: Path, text: str, mode: int, owner: str | None = None, keep: bool = False) -> None:
    """Replace the content of `path` in one step, and flush it to disk first.

    A missing parent folder is created. `owner` (a user name) owns the file and a folder that this call creates; by
    default both belong to the current user. With `keep`, an existing file keeps its mode and owner.
    Raises OSError if the file cannot be written, and KeyError if the user `owner` does not exist.
    """
    user = pwd.getpwnam(owner) if owner else None
    if not path.parent.is_dir():
        path.parent.mkdir(parents=True, mode=0o700 if owner else 0o755)
        if user:
            os.chown(path.parent, user.pw_uid, user.pw_gid)
    status = path.stat() if keep and path.exists() else None
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".trainyard-")
    temporary = Path(name)
    try:
        with os.fdopen(handle, "w", encoding="utf-8", errors="surrogateescape", newline="") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        if status:
            os.chown(temporary, status.st_uid, status.st_gid)
        elif user:
            os.chown(temporary, user.pw_uid, user.pw_gid)
        temporary.chmod(status.st_mode & 0o7777 if status else mode)
        temporary.replace(path)
    except BaseException:
        temporary.unlink()
        raise
