"""Files that the controller builds once for all hosts: pip as one archive, and the trainer as a wheel."""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
from pathlib import Path

import trainer
from trainer.common.files import write_atomic
from trainyard.project_folder import package_version, shared_folder
from trainyard.wire.trainer_archive import package_files, zip_files


def trainer_version() -> str:
    """Return the trainer's version with the digest of its sources as local version: 0.1.0+3f2a91c0d1e2."""
    total = hashlib.sha256()
    for name, content in package_files(trainer).items():
        total.update(f"{name}\0{content.decode()}\0".encode())
    return f"{package_version()}+{total.hexdigest()[:12]}"


def trainer_wheel(work: Path) -> Path:
    """Return the path of the trainer's wheel in `work`; write it if it is missing. The same sources result in the same bytes."""
    version = trainer_version()
    target = work / f"trainyard_cluster-{version}-py3-none-any.whl"
    if target.exists():
        return target
    info = f"trainyard_cluster-{version}.dist-info"
    files = package_files(trainer) | {
        f"{info}/licenses/LICENSE": (shared_folder() / "LICENSE").read_bytes(),
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: trainyard-cluster\nVersion: {version}\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: trainyard\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    digests = {name: base64.urlsafe_b64encode(hashlib.sha256(content).digest()) for name, content in files.items()}
    record = [f"{name},sha256={digest.decode().rstrip('=')},{len(files[name])}" for name, digest in digests.items()]
    files[f"{info}/RECORD"] = "\n".join([*record, f"{info}/RECORD,,", ""]).encode()
    work.mkdir(parents=True, exist_ok=True)
    write_atomic(target, zip_files(files))
    return target


def pip_archive(work: Path) -> Path:
    """Return the path of a zip file in `work` with the controller's pip, which a host unpacks into an environment.

    Debian and Ubuntu have neither pip nor ensurepip by default. With the archive, a host needs no package, no root and
    no network.
    """
    pip = importlib.metadata.distribution("pip")
    target = work / f"pip-{pip.version}.zip"
    if target.exists():
        return target
    work.mkdir(parents=True, exist_ok=True)
    files = {
        str(path): path.read_binary()
        for path in sorted(pip.files or [], key=str)
        if path.parts[0].startswith("pip") and path.suffix != ".pyc" and path.name != "RECORD"
    }
    write_atomic(target, zip_files(files))
    return target
