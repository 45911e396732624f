"""Detects that hosts share a folder: every host creates markers and looks for those of its peers. Standard library only."""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

PREFIX = ".trainyard-preflight-"
STALE = 600.0  # s after which a marker is left over from a killed preflight; a measurement takes about a minute at most


class FolderMarkers:
    """Links of this host in its data directory and in its folder of runs, of which a mount or a link may share one only.

    Args:
        data_dir: the host's `cluster_data_dir`.
        secret: a random value that all hosts know, different in every measurement.
    """

    def __init__(self, data_dir: str, secret: str) -> None:
        folders = {"data_dir": Path(data_dir), "runs": Path(data_dir, "runs")}
        self.markers = {name: FolderMarker.of(folder, secret) for name, folder in folders.items()}
        self.created: list[Path] = []

    def create(self, name: str) -> str:
        """Create the markers of the host `name`, and remove those of killed measurements; return an error, or an empty string."""
        try:
            for marker in self.markers.values():
                path = marker.path(name)
                path.symlink_to("trainyard")  # exFAT has no links, which an environment needs, and NTFS no modes
                self.created.append(path)
                with tempfile.TemporaryDirectory(dir=path.parent, prefix=".trainyard-") as folder:
                    if Path(folder).stat().st_mode & 0o077:
                        return "files have no modes of their own"
                # Both times come from the clock of the file system, which may be another host's.
                now = path.lstat().st_mtime
                for other in path.parent.glob(f"{PREFIX}*"):
                    with contextlib.suppress(OSError):  # another host removes it
                        if now - other.lstat().st_mtime > STALE:
                            other.unlink()
        except OSError as error:
            return error.strerror or str(error)
        return ""

    def shared_with(self, name: str) -> str:
        """Return which folder of this host the host `name` has marked: "data_dir", "runs" (that one alone), or an empty string."""
        # A lookup of a name that was never looked up: NFS answers a listing from its cache.
        return next((folder for folder, marker in self.markers.items() if os.path.lexists(marker.path(name))), "")

    def remove(self) -> None:
        """Remove the markers of this host."""
        for path in self.created:
            with contextlib.suppress(OSError):
                path.unlink()


@dataclass(frozen=True)
class FolderMarker:
    """Where hosts mark a folder: in it, or in the nearest folder above that exists.

    The name is a digest of a secret, of the host's name, and of the path below the existing folder, so that hosts that share
    a home but not the path below it see no marker of each other.
    """

    existing: Path
    below: str
    secret: str

    @classmethod
    def of(cls, folder: Path, secret: str) -> FolderMarker:
        """Return the marker of a folder, which need not exist; links are followed, also to a folder that does not exist yet."""
        real = Path(os.path.realpath(folder))
        existing = next(path for path in (real, *real.parents) if path.is_dir())
        return cls(existing, str(real.relative_to(existing)), secret)

    def path(self, name: str) -> Path:
        """Return the path of the marker of the host `name`."""
        digest = hashlib.sha256("\0".join((self.secret, name, self.below)).encode()).hexdigest()
        return self.existing / f"{PREFIX}{digest[:32]}"
