"""A private folder through which the controller copies files from and to folders that code of a rank may write.

The programs that copy files (sftp, cat) follow links. So they only see this folder, which ranks cannot write. Standard library only.
"""

from __future__ import annotations

import contextlib
import os
import stat
import sys
import time
from pathlib import Path
from typing import Any

from trainer.supervise.link_free import LinkFreePath, remove_tree
from trainyard.remote.receive import STALE
from trainyard.remote.trees import matching, path_below

BLOCK = 1 << 20  # bytes
FOLDER = ".exchange"  # in the folder of all runs, or in the store: a move stays on one file system


def exchange(request: dict[str, Any]) -> dict[str, Any]:
    """Prepare copies from or to this host, or complete them. What is left of copies that were killed is removed after a day.

    `request`: `root`, the folder of all runs, or the store; `token` of these copies, which names their folder; `lend`,
    paths below `root` that get the names 0, 1, ... in that folder; `size`, the bytes of which larger ones have only the
    last; `remove`, paths below `root`; `aside`, [pattern, folder]: move what matches to that folder; `take`, {path
    below `root`: name in the folder of these copies}, in this order; `end`, remove the folder. Raises OSError:
    a path is no regular file, or has a link in it.
    """
    root = Path(request["root"])
    folder = LinkFreePath(root, FOLDER, request["token"])
    root.mkdir(parents=True, exist_ok=True)
    folder.make_folder(0o700)
    _remove_old(folder.parent)
    for number, path in enumerate(request.get("lend", [])):
        _lend(path_below(root, f"{root}/{path}"), folder / str(number), request.get("size", sys.maxsize))
    for path in request.get("remove", []):
        remove_tree(path_below(root, f"{root}/{path}"))
    if "aside" in request:
        pattern, name = request["aside"]
        for path in matching(LinkFreePath(root), pattern):
            target = path_below(root, f"{root}/{name}") / path.name
            target.parent.make_folder()
            path.move_to(target)
    for path, name in request.get("take", {}).items():
        target = path_below(root, f"{root}/{path}")
        target.parent.make_folder()
        (folder / name).move_to(target)
    if request.get("end"):
        remove_tree(folder)
    return {}


def _lend(source: LinkFreePath, name: LinkFreePath, size: int) -> None:
    """Give a regular file a second name; copy the last `size` bytes of a larger one. Raises OSError."""
    if source.stat().st_size <= size:
        try:
            with source.in_folder() as here, name.in_folder() as there:
                os.link(source.name, name.name, src_dir_fd=here, dst_dir_fd=there, follow_symlinks=False)
            if stat.S_ISREG(name.stat().st_mode):
                return
            name.remove()  # the second name of a link, which `open` refuses
        except OSError:  # a file system without such names, or a file of another user
            pass
    with source.open_read() as content, name.create(0o600) as copy:
        content.seek(max(0, content.seek(0, os.SEEK_END) - size))
        while size and (block := content.read(min(size, BLOCK))):
            size -= copy.write(block)


def _remove_old(parent: LinkFreePath) -> None:
    for name in parent.entries():
        with contextlib.suppress(OSError):  # another controller ends its copies
            if time.time() - (parent / name).stat().st_mtime > STALE:
                remove_tree(parent / name)
