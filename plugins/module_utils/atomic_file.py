"""Write a file atomically. Standard library only: modules import it on the managed host."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from ansible.module_utils.safe_path import check_path


def write_atomic(path: Path, text: str, mode: int) -> None:
    """Replace the content of `path` in one step, and flush it to disk first.

    A missing parent folder is created; for a private file it is private too. Files and folders belong to the current user.
    Raises OSError if the file cannot be written, and its subclass UnsafePathError if this process runs as root and a user can
    redirect the path: write files in a user's home as that user.
    """
    check_path(path)
    os.umask(0o022)
    if not path.parent.is_dir():
        path.parent.mkdir(parents=True, mode=0o755 if mode & 0o077 else 0o700)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".trainyard-")
    temporary = Path(name)
    try:
        with os.fdopen(handle, "w", encoding="utf-8", errors="surrogateescape", newline="") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
            os.fchmod(file.fileno(), mode)
        temporary.replace(path)
    except BaseException:
        temporary.unlink()
        raise
