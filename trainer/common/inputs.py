"""Paths and files that a user names. They may be anything: a FIFO, a device, a name that is too long, an unknown user.

Standard library only: the controller also uses this module.
"""

import errno
import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO, Literal

from trainer.common.errors import UserError
from trainer.common.formats import printable, quoted
from trainer.supervise import run_files as files

HOST_PREFIX = "host:"
RUN_FILES = ("*.yml", "*.json", "adapter/*", "model/*", "merged/*", "deploy/*")  # of a run, which later programs read
_LFS = b"version https://git-lfs.github.com/"


def user_path(text: str, what: str) -> Path:
    """Return the path that a user wrote, with ``~`` and ``~user`` expanded.

    `what`: the name of the setting; it begins the error message. Raises UserError: the user does not exist, or the text
    has a NUL character.
    """
    if "\0" in text:
        raise UserError(f"{what}: {quoted(text)} has a NUL character: give a path")
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise UserError(f"{what}: {quoted(text)} begins with '~' and an unknown user: give a full path") from None


def host_path(text: str, what: str) -> str:
    """Return the absolute path in ``host:/path``, which names a file or folder of the hosts; empty for any other text.

    `what`: the name of the setting; it begins the error message. Raises UserError: the path is not absolute, or not
    valid.
    """
    if not text.startswith(HOST_PREFIX):
        return ""
    path = text.removeprefix(HOST_PREFIX)
    if not path.startswith("/") or "\0" in path or ".." in path.split("/"):
        raise UserError(f"{what}: {quoted(text)}: give the absolute path on the hosts, as host:/path")
    return os.path.normpath(path)


def path_kind(path: Path) -> Literal["file", "folder", "other", ""]:
    """Return the kind of a path; an empty string if it does not exist or cannot exist, as with a name that is too long."""
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError):
        return ""
    return "file" if stat.S_ISREG(mode) else "folder" if stat.S_ISDIR(mode) else "other"


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading. Anything else is refused: to read a FIFO or a device may never end.

    Raises OSError: the file cannot be opened, or is not a regular file.
    """
    try:
        mode = path.stat().st_mode  # before the file is opened: opening a device can have side effects
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "it is not a regular file", str(path))
        return os.fdopen(files.open_regular(path), "rb")
    except ValueError:  # NUL, or a lone surrogate
        raise OSError(errno.EINVAL, "not a valid path", str(path)) from None


def read_regular(path: Path, limit: int) -> bytes:
    """Return the contents of a regular file of at most `limit` bytes.

    Raises OSError: the file cannot be read, is not a regular file, or is larger.
    """
    with open_regular(path) as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise OSError(errno.EFBIG, f"it is larger than {limit // 1024} KiB", str(path))
    return data


def refuse_special_files(folder: Path, what: str, patterns: Sequence[str] = ("*", "*/*")) -> None:
    """Check that a folder has no FIFO, for which a library would wait for ever, nor other special files. `what`: see below. Raises UserError."""
    for path in [path for pattern in patterns for path in folder.glob(pattern) if path_kind(path) == "other"]:
        raise UserError(f"{what}: {printable(path, 4096)} is not a regular file: remove it")


def refuse_lfs_pointer(path: Path, what: str) -> None:
    """Check that a file is not what Git leaves in its place without Git LFS. `what`: the name of the setting. Raises UserError."""
    try:
        pointer = path.stat().st_size < 1024 and read_regular(path, 1024).startswith(_LFS)
    except (OSError, ValueError):  # the reader of the file reports it
        return
    if pointer:
        shown = printable(path, 4096)
        raise UserError(
            f"{what}: {shown} is a pointer of Git LFS, not the file: run git lfs pull in its folder, or download it again"
        )
