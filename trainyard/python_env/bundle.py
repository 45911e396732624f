"""Files that the controller builds once for all hosts: pip as one archive, and the trainer as a wheel."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from trainer.common.files import write_atomic
from trainyard.python_env.resolve import EnvironmentBuildError

PIP_WHEEL = (sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation")


def trainer_version(top: Path) -> str:
    """Return the trainer's version with the digest of its sources as local version: 0.1.0+3f2a91c0d1e2."""
    match = re.search(r'^version = "([^"]+)"$', (top / "pyproject.toml").read_text(encoding="utf-8"), re.M)
    total = hashlib.sha256()
    for path in sorted((top / "trainer").rglob("*.py")):
        total.update(f"{path.relative_to(top)}\0{path.read_text(encoding='utf-8')}\0".encode())
    return f"{match[1] if match else '0'}+{total.hexdigest()[:12]}"


def trainer_wheel(top: Path, work: Path) -> Path:
    """Return the path of the trainer's wheel in `work`; build it with setuptools if it is missing. Raises EnvironmentBuildError."""
    version = trainer_version(top)
    target = work / f"trainyard-{version}-py3-none-any.whl"
    work.mkdir(parents=True, exist_ok=True)
    with (work / ".lock").open("w", encoding="utf-8") as lock, tempfile.TemporaryDirectory() as folder:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if target.exists():
            return target
        source = Path(folder) / "source"
        shutil.copytree(top / "trainer", source / "trainer", ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("README.md", "LICENSE"):
            shutil.copy(top / name, source)
        text = (top / "pyproject.toml").read_text(encoding="utf-8")
        (source / "pyproject.toml").write_text(
            re.sub(r'^version = ".*"$', f'version = "{version}"', text, flags=re.M), encoding="utf-8"
        )
        done = subprocess.run(
            [*PIP_WHEEL, "-w", folder, source],
            # The same sources result in the same bytes.
            env=os.environ | {"SOURCE_DATE_EPOCH": "315532800"},
            capture_output=True,
            text=True,
            check=False,
        )
        built = list(Path(folder).glob("*.whl"))
        if done.returncode or not built:
            last = (done.stderr.strip().splitlines() or ["pip printed no message"])[-1]
            raise EnvironmentBuildError(f"cannot build the trainer's wheel on the controller (run make setup): {last}")
        write_atomic(target, built[0].read_bytes())
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
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(pip.files or [], key=str):
            if path.parts[0].startswith("pip") and path.suffix != ".pyc" and path.name != "RECORD":
                archive.writestr(zipfile.ZipInfo(str(path)), path.read_binary(), zipfile.ZIP_DEFLATED)
    write_atomic(target, content.getvalue())
    return target
