"""Run `uv pip install` with its arguments in the environment of this Python, with the package indexes that pip is configured for.

Usage: python tools/uv_install.py ARGUMENT...
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

# Settings of pip, with the variables of uv that mean the same. uv reads no setting of pip.
VARIABLES = {
    "cert": "SSL_CERT_FILE",
    "constraint": "UV_CONSTRAINT",
    "default-timeout": "UV_HTTP_TIMEOUT",
    "extra-index-url": "UV_INDEX",
    "find-links": "UV_FIND_LINKS",
    "index-url": "UV_DEFAULT_INDEX",
    "no-index": "UV_NO_INDEX",
    "proxy": "ALL_PROXY",
    "timeout": "UV_HTTP_TIMEOUT",
    "trusted-host": "UV_INSECURE_HOST",
}
# No index comes first, as with pip: the newest version wins, and torch's CPU build, where one index has it.
FIXED = {"UV_INDEX_STRATEGY": "unsafe-best-match"}


def variables_of_pip(lines: Iterable[str]) -> dict[str, str]:
    """Return the variables of uv for the output of `pip config list`, which has lines such as global.cert='/etc/ca.pem'."""
    found = {}
    for section in ("global.", "install.", ":env:."):
        for name, _, value in (line.partition("=") for line in lines if line.startswith(section)):
            if variable := VARIABLES.get(name.removeprefix(section)):
                separator = "," if variable == "UV_FIND_LINKS" else " "
                found[variable] = separator.join(ast.literal_eval(value).split())
    return found


def main() -> int:
    """Install; see the module."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "config", "list"]
    settings = subprocess.run(pip, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()
    uv = [str(Path(sys.executable).with_name("uv")), "pip", "install", "--python", sys.executable, *sys.argv[1:]]
    return subprocess.run(uv, env=FIXED | variables_of_pip(settings) | os.environ, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
