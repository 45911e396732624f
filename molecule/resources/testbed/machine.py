"""This machine: the requirements of a lab, and the settings that the hosts of a lab copy."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

CACHE = Path(os.environ.get("TRAINYARD_CACHE", "/var/cache/trainyard"))
LABS = CACHE / "labs"

# program -> the package that provides it
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
    """One line: what is wrong, where, and what to do."""


def run(*argv: str | Path, text: str | None = None, check: bool = True) -> str:
    """Return the output of a command.

    Raises LabError with the command and the last lines of its stderr if it fails and `check` is set.
    """
    pipe = subprocess.PIPE
    with subprocess.Popen([str(arg) for arg in argv], stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        threading.Thread(target=_resume_when_stopped, args=(process.pid,), daemon=True).start()
        out, err = process.communicate(text)
    if check and process.returncode:
        raise LabError(f"{' '.join(str(arg) for arg in argv)[:200]} failed: {err.strip()[-800:]}")
    return out


def _resume_when_stopped(pid: int) -> None:
    """Send SIGCONT to a child whenever it stops, until it ends.

    A host that shuts down stops all its processes before it kills them. nsenter then stops itself as its child did, and
    no other process resumes it.
    """
    while True:
        try:
            # WNOWAIT: `communicate` collects the exit status.
            seen = os.waitid(os.P_PID, pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        except ChildProcessError:
            return
        if seen is None or seen.si_code != os.CLD_STOPPED:
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
        time.sleep(0.05)


def why_not() -> str | None:
    """Return the reason why this machine cannot run a lab, or None."""
    if os.geteuid() != 0:
        return "a lab requires root to create namespaces and mounts: run it with sudo"
    release = os_release()
    if not {"debian", "ubuntu"} & {release.get("ID", ""), *release.get("ID_LIKE", "").split()}:
        return f"a lab requires Debian or Ubuntu, this machine runs {release.get('PRETTY_NAME', 'another system')}"
    if not shutil.which("apt-get") or "VERSION_CODENAME" not in release:
        return "a lab requires a Debian or Ubuntu release with apt-get"
    if not any(kind == "cgroup2" for _, kind, _ in cgroup_mounts()):
        return "a lab requires cgroup2, which is not mounted: run mount -t cgroup2 none /sys/fs/cgroup"
    if subprocess.run(["unshare", "--mount", "--net", "--pid", "--fork", "true"], capture_output=True).returncode:
        return "a lab requires namespaces, and this machine denies them: an unprivileged container cannot run a lab"
    return None


def require(kind: str) -> None:
    """Install the missing packages that a lab of this kind requires. Raises LabError if this machine cannot run a lab."""
    os.environ["PATH"] = f"{os.environ.get('PATH', '')}:/usr/local/sbin:/usr/sbin:/sbin"
    if reason := why_not():
        raise LabError(reason)
    if not _missing(kind):
        return
    CACHE.mkdir(parents=True, exist_ok=True)
    with locked(CACHE / "packages.lock"):  # of two labs that start at the same time, one installs
        if missing := _missing(kind):
            print(f"installing the packages that the lab requires: {' '.join(missing)}", flush=True)
            os.environ["DEBIAN_FRONTEND"] = "noninteractive"
            run("apt-get", "update", "-qq")
            run("apt-get", "install", "-y", "-qq", "--no-install-recommends", *missing)


def _missing(kind: str) -> list[str]:
    return sorted({package for program, package in NEEDS[kind].items() if not shutil.which(program)})


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on `path`, a file that exists only while the lock is held."""
    while True:
        with path.open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            # The previous holder removed the file: this lock excludes no process, and another process may hold a new file.
            if not path.exists() or path.stat().st_ino != os.fstat(file.fileno()).st_ino:
                continue
            try:
                yield
            finally:
                path.unlink()
            return


def os_release() -> dict[str, str]:
    """Return the fields of /etc/os-release."""
    lines = Path("/etc/os-release").read_text().splitlines() if Path("/etc/os-release").exists() else []
    return {key: value.strip('"') for key, _, value in (line.partition("=") for line in lines) if value}


def cgroup_mounts() -> list[tuple[Path, str, set[str]]]:
    """Return (mount point, "cgroup" or "cgroup2", options) of every mounted cgroup hierarchy."""
    rows = (line.split() for line in Path("/proc/mounts").read_text().splitlines())
    return [(Path(row[1]), row[2], set(row[3].split(","))) for row in rows if row[2] in ("cgroup", "cgroup2")]


def cgroup2() -> Path:
    """Return the mount point of the unified hierarchy."""
    return next(path for path, kind, _ in cgroup_mounts() if kind == "cgroup2")


def cgroup_of(controller: str) -> tuple[Path, bool]:
    """Return the hierarchy that has `controller` ("cpu", "memory"), and whether it is cgroup2.

    Raises LabError if neither version has it.
    """
    for path, kind, options in cgroup_mounts():
        if kind == "cgroup" and controller in options:
            return path, False
    if controller in (cgroup2() / "cgroup.controllers").read_text().split():
        return cgroup2(), True
    raise LabError(f"this machine's kernel has no {controller} cgroup: faults that limit it are unavailable")


def prefer(group: Path) -> None:
    """Give a cgroup four times the CPU time of others where the CPU is busy: emulated hosts miss time limits otherwise."""
    for name, value in (("cpu.shares", 4096), ("cpu.weight", 400)):  # of cgroup and of cgroup2
        if (group / name).exists():
            (group / name).write_text(str(value))


def routes() -> set[str]:
    """Return every destination that this machine has a route to, except the default route."""
    return {row["dst"] for row in json.loads(run("ip", "-j", "-4", "route", "show", "table", "all"))} - {"default"}


def resolvers() -> list[str]:
    """Return the IPv4 addresses of the name servers that this machine queries."""
    # systemd-resolved's stub 127.0.0.53 is unreachable from a lab host: use its upstream servers.
    for file in ("/run/systemd/resolve/resolv.conf", "/etc/resolv.conf"):
        if Path(file).exists():
            found = re.findall(r"^nameserver\s+(\d+\.\d+\.\d+\.\d+)", Path(file).read_text(), re.M)
            if found := [address for address in found if not address.startswith("127.")]:
                return found
    return []


def apt_sources(codename: str) -> str:
    """Return the distribution's own entries of this machine's apt sources, in their format, for the release `codename`.

    Raises LabError if there are none.
    """
    own = os_release()["VERSION_CODENAME"]
    folder = Path("/etc/apt/sources.list.d")
    kept = []
    for file in [Path("/etc/apt/sources.list"), *sorted(folder.glob("*.list")), *sorted(folder.glob("*.sources"))]:
        if not file.exists():
            continue
        text = "\n".join(line for line in file.read_text().splitlines() if not line.lstrip().startswith("#"))
        entries = text.split("\n\n") if file.suffix == ".sources" else text.splitlines()
        for entry in entries:
            signer = re.search(r"signed-by[:=]\s*(\S+)", entry, re.I)
            # A stock server has no third-party repository, and its key would be missing.
            if re.search(rf"\s{own}\b", entry) and (not signer or "archive-keyring" in signer[1]):
                # Another release of the same distribution: its suites have the same names.
                kept.append(re.sub(rf"\b{own}\b", codename, entry.strip()))
    if not kept:
        raise LabError(f"/etc/apt has no sources for {own}: add sources, from which the lab builds its hosts")
    return "\n\n".join(kept) + "\n"


def apt_options() -> list[str]:
    """Return this machine's apt options for downloads: proxies, certificates and skipped checks."""
    wanted = r"Acquire::(https?::|ftp::|Check-|Retries|ForceIPv|Allow)"
    return [
        line for line in run("apt-config", "dump").splitlines() if re.match(wanted, line) and not line.endswith('"";')
    ]


def pip_settings(python: Path) -> tuple[str, list[Path]]:
    """Return this machine's pip settings as a pip.conf, and the local folders that they name.

    Raises LabError if `python` does not exist.
    """
    if not python.exists():
        raise LabError(f"{python.parent.parent} is not a Python environment: create one, or pass another with --venv")
    values: dict[str, str] = {}
    for line in run(python, "-m", "pip", "config", "list", check=False).splitlines():
        key, _, value = line.partition("=")
        values.setdefault(key.rsplit(".", 1)[-1], value.strip("'\""))
    words = " ".join(values.values()).replace("file://", "").split()
    folders = [Path(word) for word in words if word.startswith("/") and Path(word).is_dir()]
    # An index is served from its "simple" folder but refers to files beside it.
    folders = [folder.parent if folder.name == "simple" else folder for folder in folders]
    return "[global]\n" + "".join(f"{key} = {value}\n" for key, value in values.items()), folders


def proxy_ports() -> list[int]:
    """Return the ports of the proxies that this machine's apt or pip use."""
    return sorted({int(port) for port in re.findall(r"proxy.*?:(\d+)", "\n".join(apt_options()), re.I)})


def python_binds(venv: Path) -> list[Path]:
    """Return the folders that the interpreter of `venv` needs: the environment and its base Python."""
    base = Path(run(venv / "bin/python", "-c", "import sys; print(sys.base_prefix)").strip())
    return [venv] if base == Path("/usr") else [venv, base]


def remove_cgroups(top: Path, timeout: float = 10.0) -> None:
    """Remove the cgroup `top` and all groups below it. Raises OSError if processes remain in it after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while top.exists():
        try:
            for folder, _, _ in os.walk(top, topdown=False):
                Path(folder).rmdir()
        except OSError:
            # A killed process leaves its cgroup some milliseconds after its parent is notified.
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)


# Each systemd takes six of the 128 inotify instances that root has by default: with five hosts or more, some hang.
INOTIFY = Path("/proc/sys/fs/inotify/max_user_instances")
INOTIFY_BEFORE = Path("/run/trainyard-inotify.before")  # one file for all caches: the limit is one for the machine


def raise_limits() -> None:
    """Raise the limit of inotify instances to what 200 hosts need, and save the previous value."""
    if int(INOTIFY.read_text()) < 8192:
        if not INOTIFY_BEFORE.exists():
            INOTIFY_BEFORE.write_text(INOTIFY.read_text())
        INOTIFY.write_text("8192")


def restore_limits() -> None:
    """Restore what `raise_limits` changed, if no lab is left, of this cache or of another one."""
    of_others = any(Path("/sys/class/net").glob("trainyard[0-9]*"))
    if INOTIFY_BEFORE.exists() and not of_others and not any(path.is_dir() for path in LABS.iterdir()):
        INOTIFY.write_text(INOTIFY_BEFORE.read_text())
        INOTIFY_BEFORE.unlink()


def start_time(pid: int) -> int | None:
    """Return when a process started, in clock ticks since boot; None if it does not exist or is a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def read_if_present(file: Path) -> str:
    """Return the text of a file, or an empty string if it cannot be read."""
    try:
        return file.read_text()
    except OSError:
        return ""


def loop_files(folder: Path) -> list[str]:
    """Return the files below `folder` that back loop devices."""
    files = Path("/sys/block").glob("loop*/loop/backing_file")
    return [text for text in map(read_if_present, files) if text.startswith(f"{folder}/")]
