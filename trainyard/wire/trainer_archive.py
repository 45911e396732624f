"""Packages of this program as zip files, from which hosts run them: the trainer, and what drives a queued run."""

from __future__ import annotations

import hashlib
import io
import zipfile
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

import trainer
from trainer.common.files import write_atomic
from trainyard.project_folder import SHARE


def trainer_archive(work: Path) -> Path:
    """Write the trainer as one zip file, which is staged only when it changed, and return its path."""
    content = zip_packages(trainer)
    target = work / "stage" / f"trainer-{hashlib.sha256(content).hexdigest()[:16]}.zip"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(target, content)
    return target


def zip_packages(*packages: ModuleType) -> bytes:
    """Return the Python files of packages as one zip file. Equal files give equal bytes."""
    files: dict[str, bytes] = {}
    for package in packages:
        files |= package_files(package)
    return zip_files(files)


def package_files(package: ModuleType) -> dict[str, bytes]:
    """Return {path from the parent of the package: content} of its Python files."""
    folder = Path(package.__path__[0])
    paths = sorted(path for path in folder.rglob("*.py") if folder / SHARE not in path.parents)
    return {str(path.relative_to(folder.parent)): path.read_bytes() for path in paths}


def zip_files(files: Mapping[str, bytes]) -> bytes:
    """Return a zip file of {path in it: content}. Equal files give equal bytes."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            entry = zipfile.ZipInfo(name, date_time=(1980, 1, 1, 0, 0, 0))
            entry.external_attr = 0o644 << 16
            archive.writestr(entry, content, zipfile.ZIP_DEFLATED)
    return buffer.getvalue()
