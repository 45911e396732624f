"""The restrictions of the systemd unit of a run. Its ranks run code of models and packages, as the login user.

A later property replaces an earlier one of the same name, or extends it if it is a list. So `unit_properties` of the launch
options, which come last, take precedence, as in a drop-in of the unit; see systemd.exec(5).
"""

from __future__ import annotations

import contextlib
import os
import pwd
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

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
# No PrivateDevices and no ProtectClock, which hide GPUs. No PrivateTmp: the caches of torch.compile in /tmp outlive a start,
# and CUDA MPS has its socket there. No MemoryDenyWriteExecute, which compilers of kernels need.
SYSTEM_UNIT = (
    "ProtectSystem=full",
    "ProtectHome=read-only",
    "ProtectProc=invisible",
    "ProtectControlGroups=yes",
    "ProtectKernelLogs=yes",
    "ProtectKernelModules=yes",
    "ProtectKernelTunables=yes",
    "KeyringMode=private",
    "LimitMEMLOCK=infinity",  # RDMA registers memory, for which root needs CAP_IPC_LOCK otherwise
)
# Folders in a home where libraries keep compiled kernels and downloads.
CACHES = (".cache", ".nv", ".triton")
# Control sockets that start processes outside the unit.
CONTROL_SOCKETS = (
    "/run/dbus",
    "/run/docker.sock",
    "/run/podman/podman.sock",
    "/run/containerd/containerd.sock",
    "/run/libvirt",
)


def unit_properties(run_dir: Path, *, system: bool, env: Mapping[str, str]) -> list[str]:
    """Return the properties of the unit of a run, without `address_properties`.

    Args:
        run_dir: the run folder, two levels below the data folder.
        system: whether the system's service manager runs the unit, and not the user's own.
        env: environment of the ranks. Folders in the home that it names stay writable.
    """
    if not system:
        return list(ANY_UNIT)
    properties = [*ANY_UNIT, *SYSTEM_UNIT, f"CapabilityBoundingSet={needed_capabilities(run_dir)}"]
    data_dir, home = run_dir.parents[1], Path(pwd.getpwuid(os.getuid()).pw_dir)
    named = [Path(value) for value in env.values() if value.startswith(f"{home}/") and Path(value).is_dir()]
    # Not the run folder itself: the unit may serve another run of the data folder.
    apart = [path for path in make_caches(home) + named if not path.resolve().is_relative_to(data_dir.resolve())]
    properties += [f"ReadWritePaths={quote(path, missing_ok=True)}" for path in apart]
    properties.append(f"ReadWritePaths={quote(data_dir)}")
    # The controller runs programs of the environment over SSH, where sudo works.
    environment = Path(sys.prefix).resolve()
    if data_dir in environment.parents and environment not in run_dir.parents:
        properties.append(f"ReadOnlyPaths={quote(environment)}")
    hidden = [home / ".ssh", Path(f"/run/user/{os.getuid()}"), *map(Path, CONTROL_SOCKETS)]
    return properties + [f"InaccessiblePaths={quote(path, missing_ok=True)}" for path in hidden]


def address_properties(reachable: Iterable[str]) -> list[str]:
    """Return the properties that limit a unit of the system's service manager to addresses; none for no address."""
    addresses = " ".join(address.partition("%")[0] for address in reachable)
    return ["IPAddressDeny=any", f"IPAddressAllow=127.0.0.0/8 ::1/128 {addresses}"] if addresses else []


def needed_capabilities(run_dir: Path) -> str:
    """Return the capabilities of a rank: none, or for root the one that opens folders of other users."""
    owners = {folder.stat().st_uid for folder in (run_dir, *run_dir.parents)}
    return "CAP_DAC_OVERRIDE" if os.getuid() == 0 and owners != {0} else ""


def make_caches(home: Path) -> list[Path]:
    """Create the folders of caches that a run may need, because it cannot create them in a read-only home."""
    names = CACHES if Path("/dev/nvidiactl").exists() else CACHES[:1]
    with contextlib.suppress(OSError):  # a user without a home of its own
        for name in names:
            (home / name).mkdir(mode=0o700, exist_ok=True)
    return [home / name for name in CACHES]


def quote(path: Path, *, missing_ok: bool = False) -> str:
    """Return a path as one word of a property."""
    text = str(path).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{"-" if missing_ok else ""}{text}"'
