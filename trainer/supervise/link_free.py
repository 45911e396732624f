"""Paths below a folder that code of a rank may write: no component of them may be a link. Standard library only."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

ENTRIES = 20_000  # entries of a folder that are read
DEPTH = 16  # folders in folders
_FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
# Never blocks, unlike the opening of a FIFO, and gets no terminal.
_OPEN = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_REASONS = {errno.ELOOP: "it is a symbolic link", errno.ENXIO: "not a regular file", errno.EISDIR: "it is a folder"}


class LinkFreePath:
    """A path below a trusted folder, the root: links are followed up to the root, and never below it.

    Every call opens the folders from the root on, each in the one before, so that none can be exchanged for a link in between.
    Only regular files are opened, and no opening blocks. This is no os.PathLike: no other function can open it by mistake.
    The methods raise OSError with the whole path.
    """

    __slots__ = ("names", "root")

    def __init__(self, root: Path, *names: str) -> None:
        """Take the names below `root`. Raises ValueError for what is not the name of an entry of a folder, such as `..`."""
        for name in names:
            if name in ("", ".", "..") or "/" in name or "\0" in name:
                raise ValueError(f"{name!r} is not the name of a file")
        self.root, self.names = root, names

    def __truediv__(self, below: str) -> LinkFreePath:
        """Return a path below this one; `below` may have several components."""
        return LinkFreePath(self.root, *self.names, *below.split("/"))

    def __str__(self) -> str:
        return str(self.path)

    def __repr__(self) -> str:
        return f"LinkFreePath({str(self.root)!r}, {', '.join(map(repr, self.names))})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LinkFreePath) and (self.root, self.names) == (other.root, other.names)

    def __hash__(self) -> int:
        return hash((self.root, self.names))

    @property
    def path(self) -> Path:
        """The path for processes of the run, and for messages. It must not be opened."""
        return self.root.joinpath(*self.names)

    @property
    def name(self) -> str:
        return self.names[-1] if self.names else self.root.name

    @property
    def parent(self) -> LinkFreePath:
        """The folder that contains this path. Raises ValueError for the root."""
        if not self.names:
            raise ValueError(f"{self.root} is the root")
        return LinkFreePath(self.root, *self.names[:-1])

    def resolved(self) -> LinkFreePath:
        """Return the same path with the links of the root resolved."""
        return LinkFreePath(self.root.resolve(), *self.names)

    # Files

    def open_read(self) -> BinaryIO:
        return self._open(os.O_RDONLY, "rb")

    def open_append(self) -> BinaryIO:
        """Open a regular file to append to it; it is created if there is none."""
        return self._open(os.O_WRONLY | os.O_APPEND | os.O_CREAT, "ab")

    def _open(self, flags: int, kind: str, mode: int = 0o666) -> BinaryIO:
        with self.in_folder() as folder:
            handle = os.open(self.name, flags | _OPEN, mode, dir_fd=folder)
            if not stat.S_ISREG(os.fstat(handle).st_mode):
                os.close(handle)
                raise OSError(errno.ENXIO, "")
        return os.fdopen(handle, kind)  # type: ignore[return-value]

    def read(self, limit: int) -> bytes:
        """Return the contents of a regular file of at most `limit` bytes; a larger one raises OSError."""
        with self.open_read() as file:
            content = file.read(limit + 1)
        if len(content) > limit:
            raise OSError(errno.EFBIG, f"it is larger than {limit >> 10} KiB", str(self))
        return content

    def write(self, content: bytes, mode: int = 0o644) -> None:
        """Replace the file in one step: a reader sees the old file or the new one.

        The new file has `mode` from its creation on, so that a secret is never readable by others. After an error, such as for
        a full disk, the old file remains.
        """
        aside = self.aside()
        try:
            with aside.create(mode) as file:
                os.fchmod(file.fileno(), mode)
                file.write(content)
            aside.move_to(self)
        except OSError:
            with contextlib.suppress(OSError):
                aside.remove()
            raise

    def aside(self) -> LinkFreePath:
        """Return a name beside this one that nobody can predict, for what replaces it."""
        return self.parent / f".tmp-{os.urandom(8).hex()}"

    def create(self, mode: int = 0o666) -> BinaryIO:
        return self._open(os.O_WRONLY | os.O_CREAT | os.O_EXCL, "wb", mode)

    def make_file(self) -> None:
        self.open_append().close()

    def remove(self, *, missing_ok: bool = False) -> None:
        """Remove a file, or a link itself."""
        with contextlib.suppress(*([FileNotFoundError] if missing_ok else [])), self.in_folder() as folder:
            os.unlink(self.name, dir_fd=folder)

    def move_to(self, target: LinkFreePath) -> None:
        """Move a file or folder to another place of the file system, in one step."""
        with self.in_folder() as folder, target.in_folder() as other:
            os.rename(self.name, target.name, src_dir_fd=folder, dst_dir_fd=other)

    def set_mode(self, mode: int) -> None:
        """Set the mode of a regular file or folder."""
        with self.in_folder() as folder:
            handle = os.open(self.name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
            try:
                kind = os.fstat(handle).st_mode
                if not stat.S_ISREG(kind) and not stat.S_ISDIR(kind):
                    raise OSError(errno.ELOOP if stat.S_ISLNK(kind) else errno.ENXIO, "")
                Path(f"/proc/self/fd/{handle}").chmod(mode)
            finally:
                os.close(handle)

    def stat(self) -> os.stat_result:
        """Return what stat(2) says; of a link, about the link itself."""
        if not self.names:
            return self.root.stat()
        with self.in_folder() as folder:
            return os.stat(self.name, dir_fd=folder, follow_symlinks=False)

    def exists(self) -> bool:
        return self._kind() != 0

    def is_file(self) -> bool:
        return stat.S_ISREG(self._kind())

    def is_folder(self) -> bool:
        return stat.S_ISDIR(self._kind())

    def _kind(self) -> int:
        try:
            return self.stat().st_mode
        except OSError:
            return 0

    # Folders

    def entries(self, limit: int = ENTRIES) -> list[str]:
        """Return the names in a folder in their order, at most `limit`; none for a missing folder."""
        try:
            with self._folder() as folder:
                handle = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=folder)
                try:
                    with os.scandir(handle) as found:
                        return sorted(entry.name for entry in itertools.islice(found, limit))
                finally:
                    os.close(handle)
        except FileNotFoundError:
            return []
        except PermissionError as error:
            raise self._error(error, str(self)) from None

    def make_folder(self, mode: int = 0o777) -> None:
        """Create a folder, and those above it, unless they exist."""
        with self._folder(mode):
            pass

    def remove_folder(self) -> None:
        with self.in_folder() as folder:
            os.rmdir(self.name, dir_fd=folder)

    @contextlib.contextmanager
    def in_folder(self) -> Iterator[int]:
        """Yield a descriptor of the folder that contains this path. Errors name this path."""
        with self.parent._folder() as folder:
            try:
                yield folder
            except OSError as error:
                raise self._error(error, str(self)) from None

    @contextlib.contextmanager
    def _folder(self, make: int | None = None) -> Iterator[int]:
        """Yield a descriptor of this folder; create it with the mode `make`."""
        handle = os.open(self.root, _FOLDER)
        try:
            for place, name in enumerate(self.names, 1):
                try:
                    with contextlib.suppress(*([FileExistsError] if make is not None else [])):
                        if make is not None:
                            os.mkdir(name, make, dir_fd=handle)
                    below = os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=handle)
                except OSError as error:
                    if error.errno == errno.ENOTDIR and stat.S_ISLNK(_kind(name, handle)):
                        error.errno = errno.ELOOP
                    raise self._error(error, str(self.root.joinpath(*self.names[:place]))) from None
                os.close(handle)
                handle = below
            yield handle
        finally:
            os.close(handle)

    @staticmethod
    def _error(error: OSError, path: str) -> OSError:
        reason = _REASONS.get(error.errno or 0)
        return OSError(error.errno, f"{reason}: remove it" if reason else error.strerror, path)


def _kind(name: str, folder: int) -> int:
    try:
        return os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode
    except OSError:
        return 0


def link_free(path: Path | LinkFreePath) -> LinkFreePath:
    """Return a file of a trusted folder as such a path: only the last component must be no link."""
    return path if isinstance(path, LinkFreePath) else LinkFreePath(path.parent, path.name)


def run_folder(path: str) -> LinkFreePath:
    """Return the folder of a run. The folder of all runs is trusted. Raises ValueError for a path without a name."""
    return link_free(Path(path))


def remove_tree(path: LinkFreePath, depth: int = 0) -> None:
    """Remove a file, a link, or a folder with its contents, if it exists. Raises OSError."""
    if not path.is_folder():
        path.remove(missing_ok=True)
        return
    if depth > DEPTH:
        raise OSError(errno.ELOOP, "its folders are nested too deeply: remove it", str(path))
    with contextlib.suppress(OSError):  # of another user
        path.set_mode(0o700)  # code of a rank may have closed it
    while names := path.entries():
        for name in names:
            remove_tree(path / name, depth + 1)
    path.remove_folder()
