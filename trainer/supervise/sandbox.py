"""The restrictions of the systemd unit of a run. Its ranks run code of models and packages, as the login user.

Programs outside of the unit run as the same user, or as root: what they execute, trust or follow must not be writable in the unit.
So the whole file system is read-only there, but for the run folder, and no name of a folder above it can be exchanged.

A later property replaces an earlier one of the same name, or extends it if it is a list. So `unit_properties` of the launch
options, which come last, take precedence, as in a drop-in of the unit; see systemd.exec(5).
"""

from __future__ import annotations

import contextlib
import os
import pwd
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from trainer.supervise.run_files import SupervisorError

# Properties without privileges of the service manager, which a user's own manager can also set.
ANY_UNIT = (
    "NoNewPrivileges=yes",  # sudo and other setuid programs fail
    "LockPersonality=yes",
    "RestrictNamespaces=yes",
    "RestrictRealtime=yes",
    "RestrictSUIDSGID=yes",
    "RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6 AF_NETLINK",  # RDMA uses devices, not sockets
    "SystemCallArchitectures=native",
    "SystemCallFilter=@system-service",  # includes mbind and set_mempolicy
    "SystemCallErrorNumber=EPERM",
)
# No PrivateDevices and no ProtectClock, which hide GPUs. No MemoryDenyWriteExecute, which compilers of kernels need.
SYSTEM_UNIT = (
    "ProtectSystem=strict",
    "ProtectHome=read-only",
    "PrivateTmp=yes",
    "ProtectProc=invisible",
    "ProtectControlGroups=yes",
    "ProtectKernelLogs=yes",
    "ProtectKernelModules=yes",
    "ProtectKernelTunables=yes",
    "KeyringMode=private",
    "LimitMEMLOCK=infinity",  # RDMA registers memory, for which root needs CAP_IPC_LOCK otherwise
)
# What the unit shows of /run, whose sockets start processes outside: name resolution, drivers of NixOS, the daemon of GPUs.
SHOWN_IN_RUN = (
    "NetworkManager/resolv.conf",
    "connman",
    "netconfig",
    "resolvconf",
    "systemd/resolve",
    "nscd",
    "nvidia-persistenced",
    "opengl-driver",
    "current-system",
)
MPS = Path("/tmp/nvidia-mps")  # sockets of the daemon of CUDA MPS
# Keys, and sockets and keys to sockets of programs of the login user.
HIDDEN_IN_HOME = (
    *(".ssh", ".gnupg", ".ansible", ".local/share/jupyter/runtime", ".vscode-server", ".cursor-server"),
    *(".docker/run", ".docker/desktop", ".lima", ".colima"),  # sockets of container engines
)
HIDDEN_IN_DATA = ("dashboard", "queue")
KEPT_IN_DATA = {"venv", "python", "store", "leases", "runs", *HIDDEN_IN_DATA}  # that no variable makes writable
SHARED = "store/cache"  # of the data folder: encoded datasets, which ranks of all runs write
CHECKPOINTS = "checkpoints"  # of the data folder: the shared folder of the role nfs
SYSTEM_FOLDERS = ("/boot", "/dev", "/etc", "/proc", "/run", "/sys", "/usr")


def unit_properties(
    run_dir: Path, data_dir: Path, *, system: bool, writable: Iterable[str] = (), reads: Iterable[str] = ()
) -> list[str]:
    """Return the properties of the unit of a run, without `address_properties`. Create the folders that must stay hidden.

    Raises SupervisorError: a shared folder of the ranks is a link; OSError: a folder cannot be created.

    Args:
        run_dir: the run folder, without links.
        data_dir: the data folder, without links.
        system: whether the system's service manager runs the unit, and not the user's own.
        writable: paths of variables of the ranks; folders among them stay writable, see `ProtectedPaths.opened`.
        reads: paths that the spec names; those in folders that the unit hides are shown. Of another run, all but its variables is
            shown: its ranks can exchange what is in its folder for a link, until the service manager binds it, but not the folder.
    """
    if not system:
        return list(ANY_UNIT)
    home = Path(pwd.getpwuid(os.getuid()).pw_dir)
    make_hidden(data_dir, home)
    capabilities = needed_capabilities(run_dir)
    properties = [*ANY_UNIT, *SYSTEM_UNIT, f"CapabilityBoundingSet={capabilities}"]
    if not capabilities and has_user_namespaces():
        # Else a process of the user outside is open at /proc/PID/root and /proc/PID/mem.
        properties.append("PrivateUsers=yes")
    cleared = [Path("/run"), run_dir.parent, *(path for path in [home / ".cache"] if path.is_dir())]
    # A word of this list is divided at its colons.
    words = [re.sub(r"([\\:\"'])", r"\\\1", str(path)) for path in cleared]
    properties += [f"TemporaryFileSystem={quote(f'{word}:ro')}" for word in words]
    cleared += [Path("/tmp"), Path("/var/tmp")]
    hidden = [home / name for name in HIDDEN_IN_HOME]
    hidden += [Path("/var/lib/trainyard"), *(data_dir / name for name in HIDDEN_IN_DATA)]
    protected = ProtectedPaths.of(data_dir, home, hidden)
    named = [path for text in reads if (path := protected.follow(Path(text)))]
    shown = [data_dir, *map(Path, (sys.prefix, sys.base_prefix)), *(path for path in named if path not in cleared)]
    shown = [path for path in shown if path.exists() and any(path.is_relative_to(top) for top in cleared)]
    shown = [
        run_dir.parent / path.relative_to(run_dir.parent).parts[0] if run_dir.parent in path.parents else path
        for path in shown
        if not path.is_relative_to(run_dir)
    ]
    properties += [f"BindReadOnlyPaths={quote(path)}" for path in dict.fromkeys(shown)]
    properties += [f"BindReadOnlyPaths={quote(Path('/run') / name, missing_ok=True)}" for name in SHOWN_IN_RUN]
    hidden += [path / "env" for path in dict.fromkeys(shown) if path.parent == run_dir.parent]
    properties += [f"InaccessiblePaths={quote(path, missing_ok=True)}" for path in hidden]
    outside = [folder_of_ranks(data_dir, SHARED), MPS, data_dir / CHECKPOINTS, *protected.opened(writable)]
    properties += [f"BindPaths={quote(path, missing_ok=True)}" for path in outside if not awaits_mount(path)]
    return [*properties, f"BindPaths={quote(run_dir)}"]


def make_hidden(data_dir: Path, home: Path) -> None:
    """Create folders that a role, the queue or the user would otherwise create later: the service manager hides what exists."""
    for name in HIDDEN_IN_DATA:
        (data_dir / name).mkdir(mode=0o700, parents=True, exist_ok=True)
    for name in (".ssh", ".cache"):
        with contextlib.suppress(OSError):  # a home that this user cannot write
            (home / name).mkdir(mode=0o700, exist_ok=True)


def folder_of_ranks(data_dir: Path, name: str) -> Path:
    """Return a folder that ranks of all runs write; create it. Raises SupervisorError if it leads elsewhere."""
    folder = data_dir / name
    folder.mkdir(parents=True, exist_ok=True)
    if folder.resolve() != folder:
        raise SupervisorError(f"{folder} is a link; replace it with a folder")
    return folder


@dataclass(frozen=True)
class ProtectedPaths:
    """What no variable of any run makes writable: `kept` and every folder above these, and of the home itself only its entries.

    These are folders of the system, hidden ones, and those of `data_dir` that a role or trainyard writes. No path has a link.
    """

    kept: list[Path]
    home: Path
    ranks: list[Path]  # folders in `kept` that ranks write nevertheless
    runs: Path

    @classmethod
    def of(cls, data_dir: Path, home: Path, hidden: Iterable[Path]) -> ProtectedPaths:
        """Return that of a host. A home, or an environment, may be a link, or below one."""
        kept = [*hidden, *map(Path, SYSTEM_FOLDERS), home, Path(sys.prefix)]
        kept += [data_dir / name for name in KEPT_IN_DATA]
        ranks = [data_dir / SHARED, Path("/dev/shm")]
        return cls([path.resolve() for path in kept], home.resolve(), ranks, data_dir / "runs")

    def keeps(self, path: Path) -> bool:
        """Return whether no variable makes the path writable."""
        inside = any(path.is_relative_to(top) for top in self.kept if top != self.home)
        return inside or any(top.is_relative_to(path) for top in self.kept)

    def follow(self, path: Path) -> Path | None:
        """Return an absolute path without its links; None if code of a rank may have made one of these."""
        if path == path.parent:
            return path
        folder = self.follow(path.parent)
        if folder is None or path.name == "..":
            return folder and folder.parent
        entry = folder / path.name
        if not entry.is_symlink():
            return entry
        written = self.runs in folder.parents or any(folder.is_relative_to(top) for top in self.ranks)
        return self.follow(folder / entry.readlink()) if self.keeps(folder) and not written else None

    def opened(self, values: Iterable[str]) -> list[Path]:
        """Return the folders that variables of the ranks name, but none that programs outside of the unit need unchanged."""
        named = {self.follow(Path(value)) for value in values if value.startswith("/")}
        found = {path for path in named if path and path.is_dir() and not self.keeps(path)}
        return sorted(path for path in found if found.isdisjoint(path.parents))


def awaits_mount(path: Path) -> bool:
    """Return whether the first access to a folder mounts it. That would wait for its server; the unit gets that mount later, as it is."""
    mounts = [line.split(" ") for line in Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines()]
    kinds = [kind for _, place, kind, *_ in mounts if place.encode().decode("unicode_escape") == str(path)]
    return kinds[-1:] == ["autofs"]


def address_properties(reachable: Iterable[str]) -> list[str]:
    """Return the properties that limit a unit of the system's service manager to addresses; none for no address."""
    addresses = " ".join(address.partition("%")[0] for address in reachable)
    return ["IPAddressDeny=any", f"IPAddressAllow=127.0.0.0/8 ::1/128 {addresses}"] if addresses else []


def needed_capabilities(run_dir: Path) -> str:
    """Return the capabilities of a rank: none, or for root the one that opens folders of other users."""
    owners = {folder.stat().st_uid for folder in (run_dir, *run_dir.parents)}
    return "CAP_DAC_OVERRIDE" if os.getuid() == 0 and owners != {0} else ""


def has_user_namespaces() -> bool:
    try:
        return int(Path("/proc/sys/user/max_user_namespaces").read_text(encoding="utf-8")) > 0
    except (OSError, ValueError):
        return False


def quote(path: Path | str, *, missing_ok: bool = False) -> str:
    """Return a path as one word of a property."""
    text = str(path).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{"-" if missing_ok else ""}{text}"'
