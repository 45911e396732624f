"""This machine: what a lab needs of it, and what the hosts of a lab take over from it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import threading
import time
from pathlib import Path

CACHE = Path(os.environ.get("TRAINYARD_CACHE", "/var/cache/trainyard"))
LABS = CACHE / "labs"

# program -> the package that brings it
NEEDS = {
    "light": {
        "ip": "iproute2",
        "mke2fs": "e2fsprogs",
        "mmdebstrap": "mmdebstrap",
        "nft": "nftables",
        "nsenter": "util-linux",
        "slirp4netns": "slirp4netns",
        "ssh-keygen": "openssh-client",
    }
}
NEEDS["metal"] = NEEDS["light"] | {"qemu-system-x86_64": "qemu-system-x86"}


class LabError(Exception):
    """One plain line: what is wrong, where, and what to do."""


def run(*argv: str | Path, text: str | None = None, check: bool = True) -> str:
    """The output of a command.

    Raises LabError with the command and the last lines of its stderr when it fails and `check` is set.
    """
    pipe = subprocess.PIPE
    with subprocess.Popen([str(arg) for arg in argv], stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        threading.Thread(target=_keep_going, args=(process.pid,), daemon=True).start()
        out, err = process.communicate(text)
    if check and process.returncode:
        raise LabError(f"{' '.join(str(arg) for arg in argv)[:200]} failed: {err.strip()[-800:]}")
    return out


def _keep_going(pid: int) -> None:
    """Wake a child whenever it stops, until it ends.

    A host that shuts down stops all its processes before it kills them; nsenter then stops itself like the one that it
    has inside, and nobody would ever wake it.
    """
    while True:
        try:
            # WNOWAIT: the end is for `communicate` to take.
            seen = os.waitid(os.P_PID, pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        except ChildProcessError:
            return
        if seen is None or seen.si_code != os.CLD_STOPPED:
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
        time.sleep(0.05)


def why_not() -> str | None:
    """The reason why no lab can be had on this machine, or None."""
    if os.geteuid() != 0:
        return "a lab needs root: it makes namespaces and mounts (run it with sudo)"
    release = os_release()
    if not {"debian", "ubuntu"} & {release.get("ID", ""), *release.get("ID_LIKE", "").split()}:
        return f"a lab needs Debian or Ubuntu, this is {release.get('PRETTY_NAME', 'something else')}"
    if not shutil.which("apt-get") or "VERSION_CODENAME" not in release:
        return "a lab needs a released Debian or Ubuntu with apt-get"
    if not any(kind == "cgroup2" for _, kind, _ in cgroup_mounts()):
        return "a lab needs cgroup2, and none is mounted here (mount -t cgroup2 none /sys/fs/cgroup)"
    if subprocess.run(["unshare", "--mount", "--net", "--pid", "--fork", "true"], capture_output=True).returncode:
        return "a lab needs namespaces, and this machine refuses them (a container without privileges?)"
    return None


def require(kind: str) -> None:
    """Install what a lab of this kind lacks. Raises LabError where no lab can be had."""
    os.environ["PATH"] = f"{os.environ.get('PATH', '')}:/usr/local/sbin:/usr/sbin:/sbin"
    if reason := why_not():
        raise LabError(reason)
    missing = sorted({package for program, package in NEEDS[kind].items() if not shutil.which(program)})
    if missing:
        print(f"installing what the lab needs: {' '.join(missing)}", flush=True)
        os.environ["DEBIAN_FRONTEND"] = "noninteractive"
        run("apt-get", "update", "-qq")
        run("apt-get", "install", "-y", "-qq", "--no-install-recommends", *missing)


def os_release() -> dict[str, str]:
    """The fields of /etc/os-release."""
    lines = Path("/etc/os-release").read_text().splitlines() if Path("/etc/os-release").exists() else []
    return {key: value.strip('"') for key, _, value in (line.partition("=") for line in lines) if value}


def cgroup_mounts() -> list[tuple[Path, str, set[str]]]:
    """(mount point, "cgroup" or "cgroup2", options) of every cgroup hierarchy that is mounted."""
    rows = (line.split() for line in Path("/proc/mounts").read_text().splitlines())
    return [(Path(row[1]), row[2], set(row[3].split(","))) for row in rows if row[2] in ("cgroup", "cgroup2")]


def cgroup2() -> Path:
    """Where the unified hierarchy is mounted."""
    return next(path for path, kind, _ in cgroup_mounts() if kind == "cgroup2")


def cgroup_of(controller: str) -> tuple[Path, bool]:
    """The hierarchy that has `controller` ("cpu", "memory"), and whether it is cgroup2.

    Raises LabError when neither version offers it.
    """
    for path, kind, options in cgroup_mounts():
        if kind == "cgroup" and controller in options:
            return path, False
    if controller in (cgroup2() / "cgroup.controllers").read_text().split():
        return cgroup2(), True
    raise LabError(f"this machine's kernel offers no {controller} cgroup: the faults that limit it cannot be had here")


def routes() -> set[str]:
    """Every destination that this machine has a route to, but the default one."""
    return {row["dst"] for row in json.loads(run("ip", "-j", "-4", "route", "show", "table", "all"))} - {"default"}


def resolvers() -> list[str]:
    """IPv4 addresses of the name servers that this machine really asks."""
    # systemd-resolved's stub is 127.0.0.53: a host of the lab needs what stands behind it.
    for file in ("/run/systemd/resolve/resolv.conf", "/etc/resolv.conf"):
        if Path(file).exists():
            found = re.findall(r"^nameserver\s+(\d+\.\d+\.\d+\.\d+)", Path(file).read_text(), re.M)
            if found := [address for address in found if not address.startswith("127.")]:
                return found
    return []


def apt_sources(codename: str) -> str:
    """The distribution's own entries of this machine's apt sources, in whatever format they have."""
    folder = Path("/etc/apt/sources.list.d")
    kept = []
    for file in [Path("/etc/apt/sources.list"), *sorted(folder.glob("*.list")), *sorted(folder.glob("*.sources"))]:
        if not file.exists():
            continue
        text = "\n".join(line for line in file.read_text().splitlines() if not line.lstrip().startswith("#"))
        entries = text.split("\n\n") if file.suffix == ".sources" else text.splitlines()
        for entry in entries:
            signer = re.search(r"signed-by[:=]\s*(\S+)", entry, re.I)
            # A third party's repository is not what a stock server has, and its key would be missing.
            if re.search(rf"\s{codename}\b", entry) and (not signer or "archive-keyring" in signer[1]):
                kept.append(entry.strip())
    if not kept:
        raise LabError(f"/etc/apt has no sources for {codename}: the lab's hosts are built from them")
    return "\n\n".join(kept) + "\n"


def apt_options() -> list[str]:
    """How this machine fetches packages: proxies, certificates, what it overlooks."""
    wanted = r"Acquire::(https?::|ftp::|Check-|Retries|ForceIPv|Allow)"
    return [
        line for line in run("apt-config", "dump").splitlines() if re.match(wanted, line) and not line.endswith('"";')
    ]


def pip_settings(python: Path) -> tuple[str, list[Path]]:
    """pip's settings here, its environment's included, as a pip.conf; and the local folders that they name."""
    if not python.exists():
        raise LabError(f"{python.parent.parent} is no Python environment: make one, or name another with --venv")
    values: dict[str, str] = {}
    for line in run(python, "-m", "pip", "config", "list", check=False).splitlines():
        key, _, value = line.partition("=")
        values.setdefault(key.rsplit(".", 1)[-1], value.strip("'\""))
    words = " ".join(values.values()).replace("file://", "").split()
    folders = [Path(word) for word in words if word.startswith("/") and Path(word).is_dir()]
    # An index is served from its "simple" folder but points at files beside it.
    folders = [folder.parent if folder.name == "simple" else folder for folder in folders]
    return "[global]\n" + "".join(f"{key} = {value}\n" for key, value in values.items()), folders


def proxy_ports() -> list[int]:
    """Ports of the proxies that this machine's apt or pip go through."""
    return sorted({int(port) for port in re.findall(r"proxy.*?:(\d+)", "\n".join(apt_options()), re.I)})


def python_binds(venv: Path) -> list[Path]:
    """The folders that `venv`'s interpreter needs to run: itself and the Python it was made from."""
    base = Path(run(venv / "bin/python", "-c", "import sys; print(sys.base_prefix)").strip())
    return [venv] if base == Path("/usr") else [venv, base]


def remove_cgroups(top: Path, timeout: float = 10.0) -> None:
    """Remove the cgroup `top` and all below it. Raises OSError if processes are still there after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while top.exists():
        try:
            for folder, _, _ in os.walk(top, topdown=False):
                Path(folder).rmdir()
        except OSError:
            # A killed process leaves its cgroup some milliseconds after its parent was told.
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)


# Each systemd takes half a dozen inotify instances of the 128 that root has by default: from the fifth host on some hang.
INOTIFY = Path("/proc/sys/fs/inotify/max_user_instances")
INOTIFY_BEFORE = LABS / "inotify.before"


def raise_limits() -> None:
    """Let this machine have as many inotify instances as 200 hosts want; what it was is written down first."""
    if int(INOTIFY.read_text()) < 8192:
        if not INOTIFY_BEFORE.exists():
            INOTIFY_BEFORE.write_text(INOTIFY.read_text())
        INOTIFY.write_text("8192")


def restore_limits() -> None:
    """Set back what `raise_limits` changed, if no lab is left that needs it."""
    if INOTIFY_BEFORE.exists() and not any(path.is_dir() for path in LABS.iterdir()):
        INOTIFY.write_text(INOTIFY_BEFORE.read_text())
        INOTIFY_BEFORE.unlink()
