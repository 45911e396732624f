"""Records the configuration files that a service has read. Standard library only: modules import it on the managed
host."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

DIGESTS = Path("/var/lib/trainyard/read")


def digest(files: Iterable[str | Path]) -> str:
    """Return a digest of the files that exist, or an empty string if none exists. Raises OSError."""
    existing = [path for path in map(Path, files) if path.is_file()]
    if not existing:
        return ""
    total = hashlib.sha256()
    for path in existing:
        total.update(f"{path}\0".encode() + path.read_bytes() + b"\0")
    return total.hexdigest()


def read_digest(name: str) -> str:
    """Return the digest of the files that the service `name` read last; empty if it read none. Raises OSError."""
    stored = DIGESTS / name
    return stored.read_text(encoding="utf-8") if stored.exists() else ""


def record_digest(name: str, value: str) -> None:
    """Record the digest of the files that the service `name` has read. Raises OSError."""
    stored = DIGESTS / name
    if value:
        os.umask(0o022)  # that of sudo may be stricter, but the login user reads other records in this folder
        stored.parent.mkdir(parents=True, exist_ok=True)
        stored.write_text(value, encoding="utf-8")
    else:
        stored.unlink(missing_ok=True)
