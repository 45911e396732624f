"""Copy files of a host to the controller, or to another host, when the host may be compromised.

A file's name, size and content come from the host. A name must match the request and stay inside the target folder, a
file must not exceed the size that the host reported, and a host that sends slowly does not block the controller.
"""

from __future__ import annotations

import contextlib
import re
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Any

from trainer.common.files import sha256_file
from trainer.common.formats import mib, quoted
from trainyard.remote.exchange import FOLDER
from trainyard.wire.connection import FanOut, HostConnection, RemoteError

PATIENCE = 60.0  # s for a copy, in addition to the time that its size takes
MIN_RATE = 100_000  # bytes per second; a slower host is given up
REPLY_LIMIT = 600.0  # s for a host to compute digests
EDIT_LIMIT = 1 << 20  # bytes of a file that is read to edit it
FREE_SPACE = 256 << 20  # bytes that a copy leaves free on the controller
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._@+=,~ -]{0,254}")


def in_time(connection: HostConnection, work: Callable[[], Any], limit: float) -> Any:
    """Return the result of work on a connection. Raises RemoteError if it fails, or takes more than `limit` seconds."""
    name = connection.host.name
    done = FanOut({name: lambda: {"result": work()}}).wait(limit)
    if name in done.errors:
        connection.transport.abort()
        raise RemoteError(done.errors[name])
    return done.answers[name]["result"]


class Exchange:
    """Copies between the controller and folders of a host that code of a rank may write, through a private folder of the host.

    What copies the files follows links, so it gets only paths in that folder.
    """

    def __init__(self, connection: HostConnection, root: str) -> None:
        """Take the folder of all runs, or the store: `root`."""
        self.connection, self.root, self.token = connection, root, secrets.token_hex(8)

    def call(self, **request: Any) -> None:
        """Have the host carry out a request, see trainyard/remote/exchange.py. Raises RemoteError."""
        full = {"root": self.root, "token": self.token, **request}
        in_time(self.connection, lambda: self.connection.call("exchange", full), REPLY_LIMIT)

    def path(self, name: str) -> str:
        """Return the path of a file in the private folder."""
        return f"{self.root}/{FOLDER}/{self.token}/{name}"

    def put(self, source: Path, name: str) -> None:
        """Copy a file of the controller to the private folder. Raises RemoteError if that fails or takes too long."""
        limit = PATIENCE + source.stat().st_size / MIN_RATE
        in_time(self.connection, lambda: self.connection.put(str(source), self.path(name)), limit)


@contextlib.contextmanager
def lent_files(connection: HostConnection, root: str, names: Sequence[str], end: int = 0) -> Iterator[dict[str, str]]:
    """Yield the paths at which files of a host can be fetched, by name. Raises RemoteError.

    `root`: the folder of all runs, or the store. `names`: of the files, below `root`. One that is reached through a
    link is refused. `end`: bytes of which larger files have only the last; 0: no limit.
    """
    if not names:
        yield {}
        return
    exchange = Exchange(connection, root)
    try:
        exchange.call(lend=list(names), **({"size": end} if end else {}))
        yield {name: exchange.path(str(number)) for number, name in enumerate(names)}
    finally:
        with contextlib.suppress(RemoteError):  # the host removes it after a day
            exchange.call(end=True)


def split_run(run_dir: str) -> tuple[str, str]:
    """Return the folder of all runs, and the name of a run's folder in it."""
    root, _, run = run_dir.rpartition("/")
    return root, run


def fetch_file(connection: HostConnection, source: str, target: Path, size: int) -> None:
    """Copy a file of the host to the controller.

    `size`: bytes that the host says the file has. Raises RemoteError: the copy fails, is larger than `size`, or takes
    too long.
    """
    name = connection.host.name

    done = FanOut({name: lambda: connection.fetch(source, str(target))})
    deadline = time.monotonic() + PATIENCE + size / MIN_RATE
    while done.threads[name].is_alive():
        done.threads[name].join(0.05)
        found = target.stat().st_size if target.exists() else 0
        if found > size or time.monotonic() > deadline:
            connection.transport.abort()
            done.wait(5.0)
            how = "is larger than the host said" if found > size else "arrives too slowly"
            raise RemoteError(f"cannot fetch {source}: it {how}")
    if name in done.errors:
        raise RemoteError(done.errors[name])
    if target.stat().st_size > size:
        raise RemoteError(f"cannot fetch {source}: it is larger than the host said")


def copy_artifacts(
    head: HostConnection,
    run_dir: str,
    folder: Path,
    patterns: list[str],
    edits: Mapping[str, Callable[[bytes], bytes]] | None = None,
) -> list[str]:
    """Copy files of a run folder to the controller; return the names that differed.

    Args:
        folder: the target, which receives the files under their names in the run folder.
        patterns: the files to copy, such as ``adapter/*``.
        edits: by name, what makes the copy of a small file from the file. Such a file is always fetched, and has at most EDIT_LIMIT bytes.

    Raises:
        RemoteError: a name, size or content is not what the host may send, or a copy fails.
        OSError: a file cannot be written.
    """

    def ask(what: str) -> Any:
        request = {"run_dir": run_dir, what: patterns}
        answer = in_time(head, lambda: head.call("read_files", request), REPLY_LIMIT)[what]
        for name in answer:
            check_name(name, patterns)
        return answer

    sizes: dict[str, int] = ask("sizes")
    edits = edits or {}
    for name in edits:
        if sizes.get(name, 0) > EDIT_LIMIT:
            raise RemoteError(f"{run_dir}/{name} has more than {EDIT_LIMIT >> 20} MiB: it is none of peft's")
    folder.mkdir(parents=True, exist_ok=True)
    check_inside(folder, sizes)
    # Before the host reads what must be copied in any case: a sparse file can have any size.
    new = (name for name in sizes if not (folder / name).is_file() or (folder / name).stat().st_size != sizes[name])
    check_space(folder, sum(map(sizes.__getitem__, new)), "files")
    digests: dict[str, str] = ask("sha256")
    if missing := digests.keys() - sizes:
        raise RemoteError(f"sent no size of {min(missing)}")
    wanted = [name for name in sorted(digests) if name in edits or not is_copy(folder / name, digests[name])]
    if wanted:
        check_space(folder, sum(sizes[name] for name in wanted), "files")
    changed = []
    root, run = split_run(run_dir)
    with (
        tempfile.TemporaryDirectory(dir=folder, prefix=".tmp-") as aside,
        lent_files(head, root, [f"{run}/{name}" for name in wanted]) as lent,
    ):
        for name in wanted:
            arrived = Path(aside) / "file"
            fetch_file(head, lent[f"{run}/{name}"], arrived, sizes[name])
            if sha256_file(arrived) != digests[name]:
                raise RemoteError(f"{run_dir}/{name} arrived damaged: run the same command again")
            if name in edits:
                arrived.write_bytes(edits[name](arrived.read_bytes()))
                if is_copy(folder / name, sha256_file(arrived)):
                    continue
            (folder / name).parent.mkdir(exist_ok=True)
            arrived.replace(folder / name)
            changed.append(name)
    return changed


def check_space(folder: Path, total: int, what: str) -> None:
    """Check that a folder of the controller has room for `total` bytes. Raises RemoteError, which names `what` they are."""
    free = shutil.disk_usage(folder).free
    if total + FREE_SPACE > free:
        raise RemoteError(f"its {what} have {mib(total)} MiB, and {folder} has {mib(free)} MiB free: free disk space")


def is_copy(path: Path, digest: str) -> bool:
    """Return whether a regular file has this SHA-256."""
    return path.is_file() and not path.is_symlink() and sha256_file(path) == digest


def check_name(name: str, patterns: Iterable[str]) -> None:
    """Check that a host's name of a file is relative, without hidden parts, and matches a pattern. Raises RemoteError."""
    parts = name.split("/")
    for pattern in patterns:
        expected = PurePosixPath(pattern).parts
        if len(parts) == len(expected) and all(map(fnmatchcase, parts, expected)) and all(map(NAME.fullmatch, parts)):
            return
    raise RemoteError(f"sent a name that no artifact has: {quoted(name)}")


def check_inside(folder: Path, names: Iterable[str]) -> None:
    """Check that no part of a target below `folder` is a symbolic link that leads elsewhere. Raises RemoteError."""
    if folder.is_symlink():
        raise RemoteError(f"{folder} is a symbolic link: remove it, or choose another collect_to")
    top = folder.resolve()
    for parent in sorted({(folder / name).parent for name in names}):
        if parent.is_symlink() or not parent.resolve().is_relative_to(top):
            raise RemoteError(f"{parent} is a symbolic link: remove it, or choose another collect_to")
