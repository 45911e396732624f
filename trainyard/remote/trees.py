"""Trees of folders below one that code of a rank may write: no link is followed. Standard library only."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path

from trainer.supervise.link_free import LinkFreePath

DEPTH = 16  # folders in folders


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


def matching(folder: LinkFreePath, pattern: str) -> list[LinkFreePath]:
    """Return the paths below a folder that match a pattern such as ``logs/*.log``, in their order; a link is one, too."""
    found = [folder]
    for part in pattern.split("/"):
        found = [
            path / name for path in found if path.is_folder() for name in path.entries() if fnmatchcase(name, part)
        ]
    return found


def remove_tree(path: LinkFreePath, depth: int = 0) -> None:
    """Remove a file, a link, or a folder with its contents, if it exists. Raises OSError."""
    if not path.is_folder():
        path.remove(missing_ok=True)
        return
    if depth > DEPTH:
        raise OSError(errno.ELOOP, "its folders are nested too deeply: remove it", str(path))
    while names := path.entries():
        for name in names:
            remove_tree(path / name, depth + 1)
    path.remove_folder()
