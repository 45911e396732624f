"""Files that are there whole or not at all, whatever ends the writer. Standard library only."""

from __future__ import annotations

import os
import pwd
import tempfile
from pathlib import Path


def write_atomic(path: Path, text: str, mode: int, owner: str | None = None, keep: bool = False) -> None:
    """Replace a file at once, and make its folder where it is lacking, which is `owner`'s then as the file is.

    `keep` leaves mode and owner of a file that is there as they are. Raises OSError, and KeyError for an unknown owner.
    """
    person = pwd.getpwnam(owner) if owner else None
    if not path.parent.is_dir():
        path.parent.mkdir(parents=True, mode=0o700 if owner else 0o755)
        if person:
            os.chown(path.parent, person.pw_uid, person.pw_gid)
    status = path.stat() if keep and path.exists() else None
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".trainyard-")
    aside = Path(name)
    try:
        with os.fdopen(handle, "w", encoding="utf-8", errors="surrogateescape", newline="") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        if status:
            os.chown(aside, status.st_uid, status.st_gid)
        elif person:
            os.chown(aside, person.pw_uid, person.pw_gid)
        aside.chmod(status.st_mode & 0o7777 if status else mode)
        aside.replace(path)
    except BaseException:
        aside.unlink()
        raise
