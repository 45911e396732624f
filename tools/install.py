"""Install this checkout with extras into the environment of this Python: uv resolves within the pins and digests of constraints.txt.

    python tools/install.py EXTRA...

torch is the build for this machine: of its own index, as `uv --torch-backend=auto` chooses; of the configured index where that does not answer.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

TOP = Path(__file__).resolve().parents[1]
LOCK = TOP / "constraints.txt"
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


def uv_install(*words: str | Path, quiet: bool = True, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run `uv pip install` for this environment."""
    uv = [Path(sys.executable).with_name("uv"), "pip", "install", "--python", sys.executable, *words]
    return subprocess.run(
        uv, env=environment_of_uv() | variables, stderr=None if quiet else subprocess.PIPE, text=True, check=False
    )


def torch_backend() -> tuple[str, str]:
    """Return the build of torch that uv chooses for this machine, and what there is to tell; no build: the configured index has one."""
    trial = uv_install(
        *("--dry-run", "--no-deps", "--reinstall-package=torch", "--torch-backend=auto", "--constraint", LOCK, "torch"),
        quiet=False,
        UV_HTTP_RETRIES="1",
    )
    if trial.returncode == 0:
        chosen = re.search(r"\+ torch==[\d.]+\+(\w+)", trial.stderr)
        return (chosen[1] if chosen else ""), ""
    if TORCH_INDEX not in trial.stderr:
        raise SystemExit(trial.stderr)
    return "", f"{TORCH_INDEX} does not answer: torch comes from the configured package index"


def constraints(build: str, folder: Path) -> tuple[Path, str]:
    """Return the pins for a build of torch, and what there is to tell: those of a build without digests in the lock have none for torch."""
    text = LOCK.read_text(encoding="utf-8")
    builds = re.search(r"^# Builds of torch: (.*)\.$", text, re.MULTILINE)
    if not build or (builds and build in builds[1].split()):
        return LOCK, ""
    file = folder / "constraints.txt"
    file.write_text(re.sub(r"^(torch==\S+) .*$", r"\1", text, flags=re.MULTILINE), encoding="utf-8")
    return file, f"{LOCK.name} has no digests of torch for {build}: it is not verified"


def main() -> int:
    """Install; see the module."""
    build, told = torch_backend()
    with tempfile.TemporaryDirectory() as folder:
        pins, unverified = constraints(build, Path(folder))
        for line in filter(None, (told, unverified)):
            print(f"note: {line}", flush=True)
        backend = [f"--torch-backend={build}"] if build else []
        steps = [
            ["torch", "setuptools", "wheel"],
            ["--no-build-isolation", "--editable", f"{TOP}[{','.join(sys.argv[1:])}]"],
        ]
        return next(
            (
                done.returncode
                for step in steps
                if (done := uv_install("--quiet", "--constraint", pins, *backend, *step)).returncode
            ),
            0,
        )


if __name__ == "__main__":
    sys.exit(main())
