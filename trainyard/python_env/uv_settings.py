"""How uv is called: with the package indexes that pip is configured for. Standard library only; tools/install.py imports it, too."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence

TORCH_INDEX = "https://download.pytorch.org/whl"
# Settings of pip, with the variables of uv that mean the same. uv reads no setting of pip.
VARIABLES = {
    "cert": "SSL_CERT_FILE",
    "default-timeout": "UV_HTTP_TIMEOUT",
    "extra-index-url": "UV_INDEX",
    "find-links": "UV_FIND_LINKS",
    "index-url": "UV_DEFAULT_INDEX",
    "no-index": "UV_NO_INDEX",
    "proxy": "ALL_PROXY",
    "timeout": "UV_HTTP_TIMEOUT",
    "trusted-host": "UV_INSECURE_HOST",
}
# No index comes first, as with pip: the newest version wins. Where the lock has digests, the index does not matter.
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


def environment_of_uv(only: Sequence[str] = ()) -> dict[str, str]:
    """Return the environment of uv, with the settings of pip; of these `only` some, by default all."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "config", "list"]
    lines = subprocess.run(pip, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()
    settings = FIXED | variables_of_pip(lines)
    return {name: value for name, value in settings.items() if not only or name in only} | os.environ
