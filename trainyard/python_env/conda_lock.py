"""Solve a Python from a conda channel, and keep it as an explicit lock with digests. The solver is rattler, conda's in Rust.

The controller downloads one pinned wheel of rattler, which also installs the packages on the hosts. rattler itself runs in a
process of its own: its threads do not always survive the end of an interpreter.
"""

from __future__ import annotations

import asyncio
import os
import platform
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from trainer.common.files import sha256_file, write_atomic
from trainer.common.formats import printable
from trainyard.python_env.resolve import EnvironmentBuildError

RATTLER = "0.28.0"
# By machine: the platform of conda, and the SHA-256 of rattler's wheel.
MACHINES = {
    "x86_64": ("linux-64", "4f4ab1d34d5394e7ce130a86e59009c95ace4f5757d9c3af04de1351bcea47eb"),
    "aarch64": ("linux-aarch64", "61b24202374188e72130f1b3dc63b455befaafc3e49e5481a38b6a6c8828c1e0"),
}
# What the hosts offer: Debian 12, Ubuntu 22.04 or newer.
_VIRTUAL = {"__unix": "0", "__linux": "5.15", "__glibc": "2.35", "__archspec": "1"}
_LIMIT = 600.0  # s for a download, or for a solution


def about(machine: str) -> tuple[str, str]:
    """Return what `MACHINES` says of a machine. Raises EnvironmentBuildError."""
    if machine not in MACHINES:
        what = f"it has no packages for {printable(machine, 40)}"
        raise EnvironmentBuildError(f"python_env is conda: {what}: set python_env: venv")
    return MACHINES[machine]


def _run(command: list[Any], env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run a program with a limit of time. Raises EnvironmentBuildError."""
    try:
        return subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=_LIMIT)
    except subprocess.TimeoutExpired:
        why = f"no answer of the network within {_LIMIT:.0f} s"
        raise EnvironmentBuildError(f"python_env is conda: {why}: try again") from None


def rattler_wheel(work: Path, machine: str) -> Path:
    """Return the path of rattler's wheel for a machine in `work`; download it once. Raises EnvironmentBuildError."""
    digest = about(machine)[1]
    target = work / f"rattler-{RATTLER}-{machine}.whl"
    if target.exists() and sha256_file(target) == digest:
        return target
    with tempfile.TemporaryDirectory() as folder:
        wanted = Path(folder) / "requirements.txt"
        wanted.write_text(f"py-rattler=={RATTLER} --hash=sha256:{digest}\n", encoding="utf-8")
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        if machine != platform.machine():
            command += [f"--platform=manylinux_{version}_{machine}" for version in ("2_17", "2_28")]
        done = _run([*command, "--require-hashes", "-r", wanted, "-d", folder])
        found = list(Path(folder).glob("*.whl"))
        if done.returncode or not found:
            last = (done.stderr.strip().splitlines() or ["pip printed no message"])[-1]
            what = f"cannot download py-rattler=={RATTLER}"
            raise EnvironmentBuildError(f"python_env is conda: {what}: {printable(last, 300)}")
        work.mkdir(parents=True, exist_ok=True)
        write_atomic(target, found[0].read_bytes())
    return target


def solve_lock(channel: str, python: str, machine: str, work: Path) -> str:
    """Return the text of an explicit lock of a Python such as 3.12, as `conda list --explicit --sha256` writes it.

    `channel`: its URL. `work`: folder of the controller for rattler's wheel. Raises EnvironmentBuildError: there is no
    solution, or a package has no digest.
    """
    if re.search(r"//[^/]*@|/t/", channel):
        raise EnvironmentBuildError(
            "python_conda_channel has a password or a token, which a lock would keep: use a channel without one"
        )
    subdir = about(machine)[0]
    wheel = rattler_wheel(work, platform.machine())
    with tempfile.TemporaryDirectory() as folder:
        zipfile.ZipFile(wheel).extractall(folder)
        top = Path(__file__).resolve().parents[2]
        command = [sys.executable, "-m", __name__, channel, python, subdir]
        environment = os.environ | {"PYTHONPATH": f"{folder}:{top}"}
        done = _run(command, env=environment)
    if done.returncode:
        why = (done.stderr.strip().splitlines() or ["the solver printed no message"])[-1]
        what = f"{channel}: cannot solve python {python}"
        raise EnvironmentBuildError(f"python_conda_channel: {what}: {printable(why, 300)}")
    return done.stdout


def _solve(channel: str, python: str, subdir: str) -> str:
    import rattler

    build = rattler.package.BuildString("0")
    known = [(rattler.PackageName(name), rattler.Version(version)) for name, version in _VIRTUAL.items()]
    virtual = [rattler.GenericVirtualPackage(*package, build) for package in known]
    how: dict[str, Any] = {"platforms": [subdir, "noarch"], "virtual_packages": virtual}
    solution = rattler.solve([rattler.Channel(channel)], [f"python {python}.*"], **how)
    lines = [f"# Explicit lock of Python for {subdir} from {channel}. Remove it to solve again.", "@EXPLICIT"]
    for record in sorted(asyncio.run(solution), key=lambda record: str(record.file_name)):
        if not record.sha256:
            raise ValueError(f"the channel has no SHA-256 of {record.file_name}: use another channel")
        if record.noarch and record.noarch.python:
            raise ValueError(f"{record.file_name} is a Python package: pip installs those, from wheels")
        lines.append(f"{record.url}#{record.sha256.hex()}")
    return "\n".join(lines) + "\n"


def main(arguments: list[str]) -> None:
    """Print the lock of CHANNEL PYTHON SUBDIR."""
    code = 0
    try:
        sys.stdout.write(_solve(*arguments))
    except Exception as error:  # of rattler, which has its own types
        print((str(error).strip().splitlines() or [type(error).__name__])[0], file=sys.stderr)
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main(sys.argv[1:])
