"""python_env: conda, tested without Miniforge and conda-forge.

Real: the lock, fetching once, transfer to the other hosts, digests, packages linked into an environment by rattler (an
implementation of conda's installer), and the installation of wheels. Simulated: the installer (rattler behind the two commands
of conda that the role uses) and the only package of the channel (a relocatable copy of a Python).
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from lab_hosts import NEEDS_LAB, Lab, inventory_with, run_playbook

pytestmark = [*NEEDS_LAB, pytest.mark.slow, pytest.mark.long]
DATA = "/home/tester/trainyard"
BASE = Path(sys.base_prefix)
VERSION = ".".join(map(str, sys.version_info[:3]))
SHORT = ".".join(map(str, sys.version_info[:2]))
LEFT_OUT = {"test", "idlelib", "tkinter", "turtledemo", "ensurepip", "lib2to3", "site-packages", "__pycache__"}

CONDA = """#!/usr/bin/env python3
# Replaces conda: implements create --prefix P --file LOCK with rattler.
import asyncio, os, sys
sys.path.insert(0, "@PREFIX@/site")
from rattler import PackageRecord, RepoDataRecord, install
from rattler.package import BuildString
prefix, lock = (sys.argv[sys.argv.index(name) + 1] for name in ("--prefix", "--file"))
records = []
for line in open(lock).read().split("@EXPLICIT")[1].split():
    url, digest = line.split("#")
    channel, subdir, file = url.rsplit("/", 2)
    name, version, build = file.removesuffix(".tar.bz2").rsplit("-", 2)
    about = PackageRecord(name, version, BuildString(build), 0, subdir, sha256=bytes.fromhex(digest))
    records.append(RepoDataRecord(about, file, url, channel))
asyncio.run(install(records, prefix, cache_dir=os.environ["CONDA_PKGS_DIRS"], show_progress=False))
os._exit(0)  # its threads and the end of the interpreter do not always get along
"""
INSTALLER = """#!/bin/bash
# Replaces Miniforge's installer: -b -u -p PREFIX. A wheel of rattler follows the last line.
set -eu
mkdir -p "$4/bin"
python3 - "$0" "$4" <<'P'
import io, pathlib, sys, zipfile
wheel = pathlib.Path(sys.argv[1]).read_bytes().split(b"\\n#WHEEL\\n", 1)[1]
zipfile.ZipFile(io.BytesIO(wheel)).extractall(sys.argv[2] + "/site")
P
cat > "$4/bin/conda" <<'C'
@CONDA@
C
sed -i "s,@PREFIX@,$4," "$4/bin/conda"
chmod +x "$4/bin/conda"
exit 0
#WHEEL
"""


def python_package(folder: Path) -> Path:
    """Write this Python as a conda package to `folder`; return its path."""
    package = folder / f"python-{VERSION}-h0_0.tar.bz2"
    package.parent.mkdir(parents=True)
    files: dict[str, bytes] = {}
    for path in sorted((BASE / f"lib/python{SHORT}").rglob("*")):
        if path.is_file() and not LEFT_OUT & set(path.parts) and not any("config-" in part for part in path.parts):
            files[str(path.relative_to(BASE))] = path.read_bytes()
    for library in (BASE / "lib").glob("libpython*.so*"):
        files[f"lib/{library.name}"] = library.read_bytes()
    files[f"bin/python{SHORT}"] = relocated((BASE / f"bin/python{SHORT}").read_bytes())
    files["bin/python"] = files[f"bin/python{SHORT}"]
    paths = []
    for name, data in files.items():
        entry = {
            "_path": name,
            "path_type": "hardlink",
            "sha256": hashlib.sha256(data).hexdigest(),
            "size_in_bytes": len(data),
        }
        paths.append(entry)
    about = {
        "name": "python",
        "version": VERSION,
        "build": "h0_0",
        "build_number": 0,
        "depends": [],
        "subdir": "linux-64",
    }
    files["info/index.json"] = json.dumps(about).encode()
    files["info/paths.json"] = json.dumps({"paths": paths, "paths_version": 1}).encode()
    files["info/files"] = "\n".join(entry["_path"] for entry in paths).encode()
    with tarfile.open(package, "w:bz2", compresslevel=1) as archive:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(data), 0o755 if name.startswith("bin/") else 0o644
            archive.addfile(member, io.BytesIO(data))
    return package


def relocated(data: bytes) -> bytes:
    """Return the program with a relative path to its library in place of the absolute one."""
    old, new = f"{BASE}/lib".encode(), b"$ORIGIN/../lib"
    return data.replace(old + b"\0", new.ljust(len(old), b"\0") + b"\0")


@pytest.mark.skipif(Path("/usr") == BASE, reason="the distribution's Python is not relocatable")
def test_conda_environment_from_a_lock_and_a_private_channel(tmp_path: Path) -> None:
    download = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", tmp_path, "py-rattler==0.28.0"]
    subprocess.run(download, check=True)
    installer = tmp_path / "installer.sh"
    script = INSTALLER.replace("@CONDA@", CONDA.rstrip())
    installer.write_bytes(script.encode() + next(tmp_path.glob("*.whl")).read_bytes())
    folder = tmp_path / "site"
    package = python_package(folder / "conda")
    digest = hashlib.sha256(package.read_bytes()).hexdigest()
    lock = tmp_path / "conda.lock"
    named = f"# installer: {installer}#{hashlib.sha256(installer.read_bytes()).hexdigest()}"
    lock.write_text(f"{named}\n@EXPLICIT\nhttps://channel.invalid/linux-64/{package.name}#{digest}\n")

    lab = Lab(f"conda-{os.getpid()}")
    lab.up(hosts=2, persistent=False)
    try:
        variables = {
            "python_torch": False,
            "python_env": "conda",
            "python_conda_lock": str(lock),
        }
        wheels = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "-q",
            "-d",
            folder,
            "-c",
            "constraints.txt",
            "pydantic",
            "PyYAML",
        ]
        subprocess.run(wheels, check=True, cwd=Path(__file__).parents[2])
        inventory = inventory_with(lab, tmp_path / "inventory", **variables, python_wheelhouse=str(folder))
        for least in (1, 0):
            played = run_playbook("site.yml", inventory, None, "--tags", "storage,python")
            assert played.rc == 0, played.stdout
            assert (played.count("changed") > 0) == (least > 0), played.stdout
        for host in lab.hosts:
            code = "import sys, yaml, trainer.config.run_spec; print(sys.version.split()[0], sys.base_prefix)"
            output = lab.inside(host, f"runuser -u tester -- {DATA}/venv/bin/python -I -c '{code}'").split()
            assert output[0] == VERSION and output[1].startswith(DATA), output
    finally:
        lab.down()
