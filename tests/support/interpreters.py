"""Interpreters of other Python versions on this machine."""

import os
import shutil
import subprocess
from pathlib import Path


def interpreter(version: str) -> str:
    """Return the path of an interpreter that runs, or an empty string. pyenv's shims exist without running."""
    for path in [shutil.which(f"python{version}") or "", *of_pyenv(version)]:
        if path and runs(path):
            return path
    return ""


def of_pyenv(version: str) -> list[str]:
    """Return the interpreters of pyenv; none where its folder is that of another user."""
    pyenv = Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser() / "versions"
    try:
        return [str(path) for path in sorted(pyenv.glob(f"{version}.*/bin/python3"))]
    except OSError:
        return []


def runs(path: str) -> bool:
    try:
        return subprocess.run([path, "-c", ""], capture_output=True, check=False).returncode == 0
    except OSError:
        return False
