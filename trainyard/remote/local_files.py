"""Describes files and folders that a host has already: names, sizes, digests and small texts. Standard library only."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from trainer.supervise.link_free import LinkFreePath
from trainyard.remote.digests import Digests, open_file
from trainyard.remote.trees import files_below

MAX_FILES = 20_000  # files of one folder; the controller accepts no more in a reply
MAX_TEXT = 1 << 20  # bytes of a text in a reply
THREADS = 4  # that compute digests: hashlib releases the interpreter's lock


def local_files(request: dict[str, Any]) -> dict[str, Any]:
    """Describe files and folders of this host.

    `request`: `paths`, absolute; `texts`, names of small files in a folder to return; `cache`, the file of known
    digests; `check`, do not write it. Returns `files`: for each path its `kind` (file, folder, or empty if there is
    none), `names`, {relative name: [bytes, SHA-256]} with an empty name for a file, `texts`, {name: content}, and
    `error`, why it cannot be read.
    """
    digests = Digests(Path(request["cache"]))
    files = {path: describe(Path(path), digests, request.get("texts", [])) for path in request["paths"]}
    if not request.get("check"):
        digests.keep()
    return {"files": files}


def describe(path: Path | LinkFreePath, digests: Digests, texts: Sequence[str] = ()) -> dict[str, Any]:
    """Return kind, names, texts and error of a path; see `local_files`. Of a Path, which the user has named, links are followed."""
    found: dict[str, Any] = {"kind": "", "names": {}, "texts": {}, "error": ""}
    try:
        mode = path.stat().st_mode
        if stat.S_ISREG(mode):
            found |= {"kind": "file", "names": {"": [path.stat().st_size, _readable(path, digests)]}}
        elif stat.S_ISDIR(mode):
            found |= {"kind": "folder", "names": _folder(path, digests)}
            found["texts"] = {name: text for name in texts if (text := _text(path / name)) is not None}
        else:
            found["error"] = "it is not a regular file"
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as error:
        beside = f"{error.filename}: " if error.filename not in (None, str(path)) else ""
        found["error"] = f"{beside}{error.strerror}"
    except ValueError as error:
        found["error"] = str(error)
    return found


def tree_digest(contents: Mapping[str, str]) -> str:
    """Return one SHA-256 for {relative name: SHA-256}; that of the file itself if the only name is empty."""
    if list(contents) == [""]:
        return contents[""]
    return hashlib.sha256(repr(sorted(contents.items())).encode()).hexdigest()


def content_digest(path: Path | LinkFreePath, digests: Digests) -> str:
    """Return the digest of a file or folder with its names, or an empty string if it cannot be read completely."""
    found = describe(path, digests)
    if found["error"] or not found["names"]:
        return ""
    return tree_digest({name: digest for name, (_, digest) in found["names"].items()})


def _folder(folder: Path | LinkFreePath, digests: Digests) -> dict[str, list[Any]]:
    """Return {relative name: [bytes, SHA-256]}. Raises OSError or ValueError."""
    names = list(_names(folder))
    with ThreadPoolExecutor(THREADS) as pool:
        found = list(pool.map(lambda name: _readable(folder / name, digests), names))
    return {name: [(folder / name).stat().st_size, digest] for name, digest in zip(names, found, strict=True)}


def _names(folder: Path | LinkFreePath) -> Iterator[str]:
    names = files_below(folder) if isinstance(folder, LinkFreePath) else _followed(folder)
    for count, name in enumerate(names, 1):
        if not stat.S_ISREG((folder / name).stat().st_mode):
            raise ValueError(f"{name} is not a regular file")
        if count > MAX_FILES:
            raise ValueError(f"it has more than {MAX_FILES} files")
        yield name


def _followed(folder: Path) -> Iterator[str]:
    def fail(error: OSError) -> None:
        raise error

    for top, _, files in os.walk(folder, onerror=fail, followlinks=True):
        yield from (str(Path(top, name).relative_to(folder)) for name in files)


def _readable(path: Path | LinkFreePath, digests: Digests) -> str:
    open_file(path).close()  # raises the reason, which `of` does not return
    if digest := digests.of(path):
        return digest
    raise ValueError(f"{path.name} cannot be read")


def _text(path: Path | LinkFreePath) -> str | None:
    try:
        with open_file(path) as file:
            data = file.read(MAX_TEXT + 1)
    except OSError:
        return None
    return data.decode(errors="replace") if len(data) <= MAX_TEXT else None
