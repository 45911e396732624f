"""lock_conda.py CHANNEL [OPTIONS]: write an explicit lock of a Python for linux-64, with digests, for python_env=conda.

CHANNEL is the URL of a conda channel: https://conda.anaconda.org/conda-forge, a mirror, or file:///folder. The solver is
rattler, which a temporary environment receives from the package index. Packages are not downloaded.
"""

import argparse
import asyncio
import hashlib
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
import urllib.request
import venv
from pathlib import Path
from typing import Any

TOP = Path(__file__).resolve().parents[1]
RATTLER = "py-rattler==0.28.0"
MINIFORGE = "https://github.com/conda-forge/miniforge/releases/latest/download/Miniforge3-Linux-x86_64.sh"
# What the hosts offer: Debian 12, Ubuntu 22.04 or newer.
VIRTUAL = {"__unix": "0", "__linux": "5.15", "__glibc": "2.35", "__archspec": "1"}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("channel", help="URL of the channel")
    parser.add_argument("--python", default="3.12", help="version of Python, 3.11 to 3.13 (default: %(default)s)")
    parser.add_argument(
        "--installer", default=MINIFORGE, help="URL or path of the installer of conda (default: Miniforge)"
    )
    parser.add_argument("--lock", type=Path, default=TOP / "conda.lock", help="file to write (default: conda.lock)")
    return parser.parse_args()


def solve(channel: str, python: str) -> list[Any]:
    """Return the packages of an environment with this Python: records with `url` and `sha256`."""
    import rattler

    virtual = [
        rattler.GenericVirtualPackage(
            rattler.PackageName(name), rattler.Version(version), rattler.package.BuildString("0")
        )
        for name, version in VIRTUAL.items()
    ]
    platforms: Any = ["linux-64", "noarch"]
    return list(
        asyncio.run(
            rattler.solve(
                [rattler.Channel(channel)], [f"python {python}.*"], platforms=platforms, virtual_packages=virtual
            )
        )
    )


def lock_lines(records: list[Any]) -> list[str]:
    """Return URL#sha256 of every package, Python's dependencies first. Raises SystemExit if one has no digest."""
    lines = []
    for record in sorted(records, key=lambda record: record.file_name):
        digest = record.sha256.hex() if record.sha256 else ""
        if not digest:
            sys.exit(f"error: the channel has no SHA-256 of {record.file_name}: use another channel")
        lines.append(f"{record.url}#{digest}")
    return lines


def installer_line(installer: str) -> str:
    """Return the comment of a lock that names the installer and its digest. Raises SystemExit if it is unavailable."""
    source = installer if "://" in installer else Path(installer).resolve().as_uri()
    digest = hashlib.sha256()
    try:
        with urllib.request.urlopen(source, timeout=60) as response:
            while block := response.read(1 << 20):
                digest.update(block)
            found = response.geturl() if "://" in installer else str(Path(installer).resolve())
    except OSError as error:
        sys.exit(f"error: cannot read the installer {installer} ({error}): set ARGS=--installer=URL_OR_FILE")
    # The address of a release instead of `latest`, whose contents change; not a signed address that expires.
    return f"# installer: {installer if '?' in found else found}#{digest.hexdigest()}"


def main() -> int:
    """Write the lock."""
    options = arguments()
    if not re.fullmatch(r"3\.(11|12|13)", options.python):
        sys.exit(f"error: --python: expected 3.11, 3.12 or 3.13, got {options.python!r}")
    if importlib.util.find_spec("rattler") is None:
        with tempfile.TemporaryDirectory() as folder:
            venv.create(folder, with_pip=True)
            python = Path(folder) / "bin" / "python"
            subprocess.run([python, "-m", "pip", "install", "--quiet", RATTLER], check=True)
            return subprocess.run([python, __file__, *sys.argv[1:]], check=False).returncode
    try:
        records = solve(options.channel, options.python)
    except Exception as error:  # of rattler, which has its own types
        lines = str(error).strip().splitlines() or [type(error).__name__]
        sys.exit(f"error: {options.channel}: cannot solve python {options.python}: {lines[0]}")
    head = ["# Explicit lock for linux-64. 'make lock-conda' writes this file.", installer_line(options.installer)]
    options.lock.write_text("\n".join([*head, "@EXPLICIT", *lock_lines(records)]) + "\n", encoding="utf-8")
    print(f"wrote {options.lock}: {len(records)} packages")
    return 0


if __name__ == "__main__":
    code: object = 1
    try:
        code = main()
    except SystemExit as end:
        code = end.code
        if isinstance(code, str):
            print(code, file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    # Without the interpreter's own end: threads of rattler still run, and sometimes crash during it.
    os._exit(code if isinstance(code, int) else 1)
