"""Install this checkout with extras into the environment of this Python: uv resolves within the pins and digests of constraints.txt.

    PYTHONPATH=. python tools/install.py EXTRA...

torch is the build for this machine: of its own index, as `uv --torch-backend=auto` chooses; of the configured index where that does not answer.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

from trainyard.python_env.uv_settings import TORCH_INDEX, environment_of_uv

TOP = Path(__file__).resolve().parents[1]
LOCK = TOP / "constraints.txt"


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
