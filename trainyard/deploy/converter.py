"""llama.cpp's converter of models to GGUF, out of the source package of llama-cpp-python on the package index.

The package is pinned by its SHA-256. Only the converter is unpacked, into the user's cache: 2 MB of Python, MIT licence.
It needs torch and transformers, so it runs on a host of the cluster, not on the controller.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tarfile
import tempfile
from pathlib import Path, PurePosixPath
from urllib.parse import urljoin

from trainer.common.errors import UserError, first_line
from trainer.common.files import cache_folder, write_atomic
from trainyard.wire.trainer_archive import zip_files

VERSION = "0.3.36"
FILE = f"llama_cpp_python-{VERSION}.tar.gz"
SHA256 = "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"
SIZE_LIMIT = 128 << 20  # bytes of the package
_TOP = PurePosixPath(f"llama_cpp_python-{VERSION}/vendor/llama.cpp")
_FILES = ("convert_hf_to_gguf.py", "convert_lora_to_gguf.py", "LICENSE")
_FOLDERS = ("conversion", "gguf-py/gguf")
_INDEX = "https://pypi.org/simple"
_JSON = "application/vnd.pypi.simple.v1+json"
_TIMEOUT = 60.0  # s without a byte


def converter_folder() -> Path:
    """Return the folder of the unpacked converter; download it if it is missing.

    Raises UserError: the package cannot be downloaded, or it is not the pinned one.
    """
    cache = cache_folder()
    folder = cache / f"llama.cpp-{SHA256[:16]}"
    if folder.is_dir():
        return folder
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache, prefix=".tmp-") as aside:
            archive = Path(aside) / FILE
            download(archive)
            unpacked = Path(aside) / "unpacked"
            unpack(archive, unpacked)
            if not folder.is_dir():
                unpacked.rename(folder)
    except OSError as error:
        if not folder.is_dir():  # no other process has unpacked it
            raise UserError(f"cannot write the model converter to {cache}: {first_line(error)}") from None
    return folder


def converter_archive(folder: Path) -> Path:
    """Return the converter as one zip file in `folder`, with equal bytes for equal contents. Raises UserError."""
    target = folder / f"converter-{SHA256[:16]}.zip"
    if not target.exists():
        source = converter_folder()
        folder.mkdir(parents=True, exist_ok=True)
        write_atomic(
            target,
            zip_files({str(path.relative_to(source)): path.read_bytes() for path in sorted(source.rglob("*.py"))}),
        )
    return target


def download(target: Path) -> None:
    """Download the pinned package. Raises UserError."""
    import requests  # takes a third of a second, and the package is downloaded once

    index = os.environ.get("PIP_INDEX_URL") or _INDEX
    page = f"{index.rstrip('/')}/llama-cpp-python/"
    digest, size = hashlib.sha256(), 0
    try:
        listing = requests.get(page, headers={"Accept": _JSON}, timeout=_TIMEOUT)
        listing.raise_for_status()
        urls = [file["url"] for file in listing.json()["files"] if file["filename"] == FILE]
        with requests.get(urljoin(page, urls[0]), stream=True, timeout=_TIMEOUT) as reply, target.open("wb") as file:
            reply.raise_for_status()
            for block in reply.iter_content(1 << 20):
                size += len(block)
                if size > SIZE_LIMIT:
                    break
                digest.update(block)
                file.write(block)
    except (requests.RequestException, ValueError, LookupError, TypeError) as error:
        raise UserError(
            f"cannot download the model converter, {FILE} of {page}: {first_line(error)}; set PIP_INDEX_URL to an index "
            "that has it"
        ) from None
    if digest.hexdigest() != SHA256:
        raise UserError(f"the model converter {FILE} of {page} has the SHA-256 {digest.hexdigest()}, expected {SHA256}")


def unpack(archive: Path, folder: Path) -> None:
    """Write the converter's files of the package into a new folder, flat names only. Raises OSError, tarfile.TarError."""
    with tarfile.open(archive) as package:
        for member in package:
            path = PurePosixPath(member.name)
            if not member.isfile() or not path.is_relative_to(_TOP):
                continue
            name = path.relative_to(_TOP)
            wanted = str(name) in _FILES or (str(name.parent) in _FOLDERS and name.suffix == ".py")
            source = package.extractfile(member) if wanted else None
            if source:
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                with (folder / name).open("wb") as file:
                    shutil.copyfileobj(source, file)
