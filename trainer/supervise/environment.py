"""The environment of a run's processes, and the systemd-run command that can start them."""

from __future__ import annotations

import os
import pwd
import subprocess
import sys
from pathlib import Path

from trainer.supervise.link_free import LinkFreePath
from trainer.supervise.processes import RUN_VARIABLE
from trainer.supervise.run_files import SupervisorError

CACHE = "cache"  # of the run folder: compiled kernels and downloads
ENV_LIMIT = 4 << 20  # bytes of the variables of a run
IMPORT_ROOT = Path(__file__).parents[2]  # the archive or folder that holds the package `trainer`


def cache_variables(run_dir: Path) -> dict[str, str]:
    """Return the variables for which libraries keep compiled kernels and downloads in the run folder.

    The caches of the login user hold code that runs outside of the unit, and keys.
    """
    folder = run_dir / CACHE
    names = {
        "CUDA_CACHE_PATH": "nv",
        "TORCHINDUCTOR_CACHE_DIR": "inductor",
        "TRITON_CACHE_DIR": "triton",
        "XDG_CACHE_HOME": "",
    }
    return {name: str(folder / below) for name, below in names.items()}


KEPT = ("TMPDIR", "TZ", *cache_variables(Path()))


def clean_environment() -> dict[str, str]:
    """Return the user's identity and the search path; a run inherits nothing else from the login shell."""
    user = pwd.getpwuid(os.getuid())
    kept = {k: v for k, v in os.environ.items() if k in KEPT or k.startswith("XDG_")}
    path = f"{Path(sys.executable).parent}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    identity = {"HOME": user.pw_dir, "USER": user.pw_name, "LOGNAME": user.pw_name, "SHELL": "/bin/sh"}
    # PYTHONUTF8: names of files are UTF-8 also where the locale of the host says otherwise.
    return {**kept, **identity, "PATH": path, "LANG": os.environ.get("LANG", "C.UTF-8"), "PYTHONUTF8": "1"}


def import_environment(run_dir: LinkFreePath, trainer: Path = IMPORT_ROOT) -> dict[str, str]:
    """Return the variables that mark a process of the run and make the trainer importable."""
    return {RUN_VARIABLE: str(run_dir), "PYTHONPATH": str(trainer)}


def run_environment(run_dir: LinkFreePath) -> dict[str, str]:
    """Return the environment of torchrun: the clean one, and the lines of the file `env`, where secrets belong.

    Raises SupervisorError if other users can read `env`, or a line of it is not KEY=VALUE; OSError if it is no regular file.
    """
    values = {**clean_environment(), **import_environment(run_dir)}
    path = run_dir / "env"
    try:
        file = path.open_read()
    except FileNotFoundError:
        return values
    with file:
        if os.fstat(file.fileno()).st_mode & 0o077:
            raise SupervisorError(f"{path} may hold secrets, and other users can read it; run: chmod 600 {path}")
        content = file.read(ENV_LIMIT)
    # Only a line feed ends a line: a value may contain other characters at which Python's splitlines ends one.
    for number, line in enumerate(content.decode().split("\n"), 1):
        if line.strip() and not line.startswith("#"):
            key, equals, value = line.partition("=")
            if not equals or not key.isidentifier():
                raise SupervisorError(f"{path}:{number} is not KEY=VALUE")
            values[key] = value
    return values


def systemctl_environment() -> dict[str, str]:
    """Return the environment in which systemctl and systemd-run find the user's service manager."""
    return {**clean_environment(), "XDG_RUNTIME_DIR": f"/run/user/{os.getuid()}"}


def starts_system_unit() -> bool:
    """Return whether a run of this user gets a unit of the system's service manager, which alone can limit its connections."""
    found = choose_backend("auto")
    return found is not None and "--user" not in found


def choose_backend(wanted: str) -> list[str] | None:
    """Return the start of the systemd-run command that works on this host, or None for a detached process.

    A system unit needs root or sudo without a password. Only it protects what the ranks may not write or read. A user unit
    needs no rights, but it needs lingering: without it the unit ends with the last login.

    Raises SupervisorError if `wanted` is "systemd" and no unit can be started.
    """
    if wanted == "process":
        return None
    if Path("/run/systemd/system").is_dir():  # sd_booted(3)
        uid = os.getuid()
        user = pwd.getpwuid(uid).pw_name
        if uid == 0:
            return ["systemd-run"]
        if may_sudo():
            return ["sudo", "-n", "systemd-run", f"--uid={uid}", f"--gid={os.getgid()}"]
        if Path(f"/var/lib/systemd/linger/{user}").exists() and Path(f"/run/user/{uid}/systemd/private").exists():
            return ["systemd-run", "--user"]
    if wanted == "systemd":
        raise SupervisorError(
            "cannot start a systemd unit on this host: it needs root, sudo without a password, or lingering"
        )
    return None


def may_sudo() -> bool:
    try:
        return subprocess.run(["sudo", "-n", "true"], capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False
