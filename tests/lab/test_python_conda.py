"""python_env: conda, from a channel in a folder: the solver, the lock, the transfer and the installer are real.

Simulated: the only package of the channel, a relocatable copy of a Python.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
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
ABOUT = {"name": "python", "version": VERSION, "build": "h0_0", "build_number": 0, "depends": [], "subdir": "linux-64"}


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
        entry = {"_path": name, "path_type": "hardlink", "size_in_bytes": len(data)}
        paths.append(entry | {"sha256": hashlib.sha256(data).hexdigest()})
    files["info/index.json"] = json.dumps(ABOUT).encode()
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


def channel(folder: Path) -> str:
    """Write a channel with this Python to a folder; return its URL."""
    package = python_package(folder / "linux-64")
    digest = hashlib.sha256(package.read_bytes()).hexdigest()
    for subdir, packages in (
        ("linux-64", {package.name: ABOUT | {"sha256": digest, "size": package.stat().st_size}}),
        ("noarch", {}),
    ):
        (folder / subdir).mkdir(exist_ok=True)
        document = {"info": {"subdir": subdir}, "packages": packages, "packages.conda": {}}
        (folder / subdir / "repodata.json").write_text(json.dumps(document))
    return folder.as_uri()


@pytest.mark.skipif(Path("/usr") == BASE, reason="the distribution's Python is not relocatable")
def test_conda_in_one_word(tmp_path: Path) -> None:
    variables = {"python_torch": False, "python_env": "conda", "python_conda_channel": channel(tmp_path / "channel")}
    variables["python_conda_python"] = SHORT
    lab = Lab(f"conda-{os.getpid()}")
    lab.up(hosts=2, persistent=False)
    try:
        inventory = inventory_with(lab, tmp_path / "inventory", **variables)
        lock = inventory.parent / "conda.lock"
        checked = run_playbook("site.yml", inventory, None, "--tags", "storage,python", "--check")
        assert checked.rc == 0 and not lock.exists(), checked.stdout
        for least in (1, 0):
            played = run_playbook("site.yml", inventory, None, "--tags", "storage,python")
            assert played.rc == 0, played.stdout
            assert (played.count("changed") > 0) == (least > 0), played.stdout
        assert f"/linux-64/python-{VERSION}-h0_0.tar.bz2#" in lock.read_text()
        for host in lab.hosts:
            code = "import sys, yaml, trainer.config.run_spec; print(sys.version.split()[0], sys.base_prefix)"
            output = lab.inside(host, f"runuser -u tester -- {DATA}/venv/bin/python -I -c '{code}'").split()
            assert output[0] == VERSION and output[1].startswith(DATA), output
        reset = run_playbook("playbooks/reset.yml", inventory, None, "--tags", "python")
        for host in lab.hosts:
            assert lab.inside(host, f"ls -d {DATA}/python {DATA}/venv 2>/dev/null || echo none").strip() == "none", (
                reset.stdout
            )
    finally:
        lab.down()
