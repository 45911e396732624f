"""Trees of folders below one that code of a rank may write: no link is followed. Standard library only."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path

from trainer.supervise.link_free import DEPTH, ENTRIES, LinkFreePath


def path_below(root: Path, path: str) -> LinkFreePath:
    """Return a path below a trusted folder. Raises ValueError for any other path."""
    return LinkFreePath(root, *Path(path).relative_to(root).parts)


def files_below(folder: LinkFreePath, below: str = "", depth: int = 0) -> Iterator[str]:
    """Yield the names, relative to `folder`, of what is in it and in the folders below: files, and what is neither.

    Raises OSError, also for folders that are nested too deeply.
    """
    if depth > DEPTH:
        raise OSError(errno.ELOOP, "its folders are nested too deeply", str(folder))
    for name in folder.entries():
        path = folder / name
        if path.is_folder():
            yield from files_below(path, f"{below}{name}/", depth + 1)
        else:
            yield f"{below}{name}"


def matching(folder: LinkFreePath, pattern: str, limit: int = ENTRIES) -> list[LinkFreePath]:
    """Return the paths below a folder that match a pattern such as ``logs/*.log``, in their order; a link is one, too.

    At most `limit` names of all folders together are read.
    """
    found = [folder]
    for part in pattern.split("/"):
        inside: list[LinkFreePath] = []
        for path in found:
            names = path.entries(limit) if limit and path.is_folder() else []
            limit -= len(names)
            inside += [path / name for name in names if fnmatchcase(name, part)]
        found = inside
    return found
