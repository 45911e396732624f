"""Detects that hosts share a folder: every host creates a marker in it and looks for those of its peers. Standard library only."""

from __future__ import annotations

import contextlib
import hashlib
import os
from pathlib import Path

PREFIX = ".trainyard-preflight-"
STALE = 600.0  # s after which a marker is left over from a killed preflight; a measurement takes about a minute at most


class FolderMarker:
    """An empty file of this host in its folder of runs, or in the nearest folder above that exists.

    Hosts that share the folder see each other's markers. The name is a digest of a secret, of the host's name, and of the
    path below the existing folder, so that hosts that share a home but not the path below it see no marker of each other.

    Args:
        data_dir: the host's `cluster_data_dir`.
        secret: a random value that all hosts know, different in every measurement.
    """

    def __init__(self, data_dir: str, secret: str) -> None:
        runs = Path(data_dir, "runs")
        self.folder = next(folder for folder in (runs, *runs.parents) if folder.is_dir())
        self.below = str(runs.relative_to(self.folder))
        self.secret = secret
        self.path: Path | None = None

    def create(self, name: str) -> str:
        """Create the marker of the host `name`, and remove those of killed measurements; return an error, or an empty string."""
        path = self._path(name)
        try:
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_WRONLY, 0o600))
            self.path = path
            # Both times come from the clock of the file system, which may be another host's.
            now = path.lstat().st_mtime
            for other in self.folder.glob(f"{PREFIX}*"):
                with contextlib.suppress(OSError):  # another host removes it
                    if now - other.lstat().st_mtime > STALE:
                        other.unlink()
        except OSError as error:
            return error.strerror or str(error)
        return ""

    def sees(self, name: str) -> bool:
        """Return whether the marker of the host `name` is in the folder of this host."""
        # A lookup of a name that was never looked up: NFS answers a listing from its cache.
        return os.path.lexists(self._path(name))

    def remove(self) -> None:
        """Remove the marker of this host."""
        if self.path:
            with contextlib.suppress(OSError):
                self.path.unlink()

    def _path(self, name: str) -> Path:
        digest = hashlib.sha256("\0".join((self.secret, name, self.below)).encode()).hexdigest()
        return self.folder / f"{PREFIX}{digest[:32]}"
