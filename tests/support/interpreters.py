"""Interpreters of other Python versions on this machine."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path


def interpreter(version: str) -> str:
    """Return the path of an interpreter that runs, or an empty string. pyenv's shims exist without running."""
    pyenv = Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser() / "versions"
    for path in [shutil.which(f"python{version}") or "", *map(str, sorted(pyenv.glob(f"{version}.*/bin/python3")))]:
        if path and subprocess.run([path, "-c", ""], capture_output=True, check=False).returncode == 0:
            return path
    return ""
