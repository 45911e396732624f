"""The systemd unit of a run, whose ranks run code of models and packages as the login user. Its file system starts from nothing.

It shows what the ranks need, read-only but for the run folder. Programs outside of the unit run as the same user, or as root: what they
execute, trust or follow is not writable. `unit_properties` of the launch options come last: they replace a limit, as in a drop-in.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import pwd
import re
import site
import subprocess
import sys
from collections.abc import Iterable, Iterator
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
    # Sockets of io_uring pass the filter of address families; a private keyring still reaches that of the user.
    "SystemCallFilter=~io_uring_setup io_uring_enter io_uring_register @keyring",
    "SystemCallErrorNumber=EPERM",
    "LimitCORE=0",
)
# Of a host without trainyard.slice, which the role storage installs for all runs together.
LIMITS = ("MemoryMax=90%", "MemorySwapMax=10%", "TasksMax=16384")
SLICE = Path("/etc/systemd/system/trainyard.slice")
# GPUs of NVIDIA, AMD and Intel, of Jetson and of WSL; other accelerators; RDMA. No disk, kvm, fuse or tun, whatever groups the user has, and
# no terminal of the user, which DevicePolicy=closed would add.
DEVICES = "/dev/null /dev/zero /dev/full /dev/random /dev/urandom /dev/tty /dev/ptmx char-nvidia* char-drm char-kfd char-accel* char-infiniband* char-nvhost* char-nvgpu* char-gdrdrv /dev/nvmap /dev/dxg /dev/infiniband/rdma_cm"
# PrivateDevices and ProtectClock hide GPUs; compilers of kernels need what MemoryDenyWriteExecute forbids; ProtectHome would win over an empty /home.
SYSTEM_UNIT = (
    "ProtectSystem=strict",
    "PrivateTmp=yes",
    "ProtectProc=invisible",
    "ProtectControlGroups=yes",
    "ProtectKernelLogs=yes",
    "ProtectKernelModules=yes",
    "ProtectKernelTunables=yes",
    "KeyringMode=private",
    "PrivateIPC=yes",
    "TemporaryFileSystem=/dev/shm:mode=1777,nosuid,nodev,size=50%",  # of the ranks of this host
    "DevicePolicy=strict",
    *(f"DeviceAllow={name} rw" for name in DEVICES.split()),
    "LimitMEMLOCK=infinity",  # RDMA registers memory, for which root needs CAP_IPC_LOCK otherwise
)
SHOWN_AT_ROOT = re.compile("bin|boot|dev|etc|lib.*|proc|sbin|sys|tmp|usr")  # all other folders of / are empty
# Names of hosts and users, drivers of NixOS, the daemon of GPUs. What names them by /var/run has to find them, too.
RESOLUTION = "NetworkManager/resolv.conf connman netconfig resolvconf systemd/resolve avahi-daemon/socket nscd nslcd samba/winbindd systemd/userdb"
SHOWN_IN_RUN = (*RESOLUTION.split(), "nvidia-persistenced", "opengl-driver", "current-system")
SHOWN = ("/nix/store", "/mnt/wsl/resolv.conf", "/var/lib/sss/pipes/nss", "/var/lib/sss/mc")
SHOWN_OF_RUNS = ("adapter", "model", "merged", "checkpoints", "spec.yml", "result.json")
CHECKPOINTS = "checkpoints"  # of the data folder: the shared folder of the role nfs
# Of the data folder: what a role or trainyard writes. No variable makes it writable; of these, a spec shows the first three only.
KEPT_IN_DATA = ("store", "venv", "python", "leases", "runs", "dashboard", "queue", CHECKPOINTS)
SYSTEM_FOLDERS = tuple(map(Path, ("/boot", "/dev", "/etc", "/proc", "/sys", "/usr")))
SERVICES = tuple(map(Path, ("/run", "/var/lib", "/var/snap")))  # whose sockets start processes outside
TEMPORARY = (Path("/tmp"), Path("/var/tmp"))  # the unit has its own
MOUNT_LIMIT = 10.0  # s for the server of a shared folder to answer
Texts = Iterable[str]
ENTRIES = 10_000  # of a folder that a spec names, in which links are looked for


def unit_properties(
    run_dir: Path, data_dir: Path, name: str = "", *, system: bool, writable: Texts = (), reads: Texts = ()
) -> list[str]:
    """Return the properties of the unit of a run, without `address_properties`; of a user's own service manager if not `system`.

    `name`: the run folder as the ranks name it; `run_dir` and `data_dir` have no links. `writable`: paths of variables: folders among
    them are opened. `reads`: further paths to show. Raises SupervisorError: a folder stays closed, or a server does not answer.
    """
    if not system:
        return [*ANY_UNIT, *LIMITS]
    named, writable, reads = Path(name or run_dir), list(writable), [str(Path(text).expanduser()) for text in reads]
    if is_dead(*writable, *reads):
        raise SupervisorError(f"{' or '.join([*writable, *reads])}: no answer within {MOUNT_LIMIT:.0f} s")
    capabilities = needed_capabilities(run_dir)
    limits = ["Slice=trainyard-runs.slice"] if SLICE.exists() else LIMITS
    properties = [*ANY_UNIT, *SYSTEM_UNIT, *limits, f"CapabilityBoundingSet={capabilities}"]
    if not capabilities and has_user_namespaces():
        # Else a process of the user outside is open at /proc/PID/root and /proc/PID/mem.
        properties.append("PrivateUsers=yes")
    places = Places(run_dir, data_dir, writable)
    services = [(f"/run/{name}", f"{top}/{name}") for name in SHOWN_IN_RUN for top in ("/run", "/var/run")]
    services += zip(SHOWN, SHOWN, strict=True)
    folders = [folder / "leases" for folder in (data_dir, named.parents[1]) if (folder / "leases").is_dir()]
    shown = [(path.resolve(), path) for path in [*interpreter_paths(), *folders]]
    shown += [pair for text in reads for pair in places.shown(Path(text))]
    opened = {run_dir: run_dir, named: run_dir} | places.opened
    shared = data_dir / CHECKPOINTS / run_dir.name
    if not is_dead(str(shared)) and shared.parent.is_dir() and not shared.is_symlink():
        with contextlib.suppress(OSError):  # of a server that lets this user write nothing
            shared.mkdir(exist_ok=True)
            opened |= dict.fromkeys((shared, named.parents[1] / CHECKPOINTS / run_dir.name), shared)
    lacking = places.lacking(shown, opened)
    # A word of this list is divided at its colons. Of two properties of one path, systemd would ignore one.
    empty = [re.sub(r"([\\:\"'])", r"\\\1", str(path)) for path in places.empty if path not in lacking | opened]
    properties += [f"TemporaryFileSystem={quote(f'{word}:ro,mode=0755')}" for word in empty]
    bound = [("BindReadOnlyPaths", f"-{place}", name) for place, name in services if Path(place).exists()]
    bound += [("BindReadOnlyPaths", str(place), str(name)) for name, place in lacking.items()]
    bound += [("BindPaths", str(place), str(name)) for name, place in opened.items()]
    return [*properties, *(f"{kind}={quote(place)}:{quote(name)}" for kind, place, name in bound)]


def interpreter_paths() -> list[Path]:
    """Return the folders and links of the interpreter and its packages, also those of the user, as they are named."""
    user = Path(site.getusersitepackages())  # not in sys.path of the programs that call this
    lines = [
        line for file in user.glob("*.pth") for line in file.read_text(encoding="utf-8", errors="replace").splitlines()
    ]
    found: list[str | Path] = [
        sys.prefix,
        sys.base_prefix,
        *sys.path,
        user,
        *(user / line for line in lines if line.startswith("/")),
    ]
    link = Path(sys.executable)
    while link.is_symlink() and len(found) < ENTRIES:
        found.append(link)
        link = Path(os.path.normpath(link.parent / link.readlink()))
    return [path for path in dict.fromkeys(map(Path, [*found, link])) if path.is_absolute() and path.exists()]


class Places:
    """What the unit of a run shows and opens of this host. `empty`: the folders at which it starts from nothing."""

    def __init__(self, run_dir: Path, data_dir: Path, writable: Iterable[str] = ()) -> None:
        self.run_dir, self.data_dir = run_dir, data_dir
        home = Path(pwd.getpwuid(os.getuid()).pw_dir)
        self.home, self.homes = home.resolve(), (home, home.resolve())
        self.code = [path.resolve() for path in interpreter_paths() if path.is_dir()]
        # No look at the folders themselves: the server of a mount may be dead.
        names = [each for each in os.scandir("/") if each.is_symlink() or each.is_dir(follow_symlinks=False)]
        tops = {Path(each.path).resolve() for each in names if not SHOWN_AT_ROOT.fullmatch(each.name)}
        own = {path for path in (self.home, data_dir) if not path.is_relative_to("/tmp")}
        found = {path for path in tops | own if not any(each.is_relative_to(path) for each in SYSTEM_FOLDERS)}
        self.empty = sorted(path for path in found if found.isdisjoint(path.parents))
        self.opened: dict[Path, Path] = {}
        self.opened = dict(pair for text in writable for pair in self._open(Path(text)))

    def _open(self, name: Path) -> list[tuple[Path, Path]]:
        """Return the folder of a variable by its names; none for other values. Raises SupervisorError if it stays closed."""
        visible = any(name.resolve().is_relative_to(top) for top in (*SYSTEM_FOLDERS, self.run_dir))
        if visible or name in TEMPORARY or not name.is_dir():
            return []
        real = self.follow(name, strict=True)
        if real is None or self.is_kept(real):
            raise SupervisorError(f"run_env: a run may not write {name}: name a folder of its own, without links")
        return [(name, real), (real, real)]

    def is_kept(self, path: Path, names: Iterable[str] = KEPT_IN_DATA) -> bool:
        """Return whether no variable opens the path, and no link shows it: keys, services, programs, and every folder above these."""
        kept = [*(self.data_dir / name for name in names), *SERVICES, *self.code]
        inside = any(path.is_relative_to(top) for top in kept)
        below = path.relative_to(self.home).parts if path.is_relative_to(self.home) else ("",)
        hidden = bool(below) and below[0].startswith(".") and (below[0] != ".cache" or len(below) == 1)
        return inside or hidden or any(top.is_relative_to(path) for top in (*kept, *self.homes))

    def follow(self, path: Path, *, strict: bool = False, left: int = 40) -> Path | None:
        """Return a path without its links; None if code of a rank may have made one of these. `strict`: in a folder of any variable."""
        if path == path.parent or not left:
            return path if left else None
        folder = self.follow(path.parent, strict=strict, left=left)
        if folder is None or path.name == "..":
            return folder and folder.parent
        entry = folder / path.name
        if not entry.is_symlink():
            return entry
        ranks = [self.data_dir / "runs", self.data_dir / CHECKPOINTS, Path("/dev/shm"), *self.opened.values()]
        trusted = not strict or self.is_kept(folder) or any(folder.is_relative_to(top) for top in SYSTEM_FOLDERS)
        if not trusted or any(folder.is_relative_to(top) for top in ranks):
            return None
        return self.follow(folder / entry.readlink(), strict=strict, left=left - 1)

    def shown(self, name: Path) -> Iterator[tuple[Path, Path]]:
        """Yield what a path needs, as (place, name): itself, and what links in its folder lead to, as in a snapshot of the hub.

        Of another run only SHOWN_OF_RUNS: its ranks can exchange these for links until the service manager binds them.
        """
        real = self.follow(name)
        closed = (self.home, self.data_dir, *SERVICES, *TEMPORARY)
        if real is None or not real.exists() or real.is_socket() or any(top.is_relative_to(real) for top in closed):
            return
        runs = self.data_dir / "runs"
        if real.is_relative_to(runs):
            other, *part = real.relative_to(runs).parts or ("",)
            for path in [real] if part else [real / each for each in SHOWN_OF_RUNS]:
                named = other and path.relative_to(runs / other).parts[0] in SHOWN_OF_RUNS
                if named and path.exists() and not path.is_symlink():
                    yield path, name / path.relative_to(real)
            return
        kept = [self.data_dir / each for each in KEPT_IN_DATA[3:]]
        if any(real.is_relative_to(each) for each in kept) or (real != name and self.is_kept(real, KEPT_IN_DATA[3:])):
            return
        yield real, name
        entries = ((Path(top, each)) for top, folders, files in os.walk(real) for each in (*folders, *files))
        for link in itertools.islice(entries, ENTRIES):
            if not link.is_symlink() or not (target := self.follow(link)) or target.is_relative_to(real):
                continue
            if target.is_relative_to(runs):
                yield from self.shown(target)
            elif target.exists() and not self.is_kept(target, KEPT_IN_DATA[3:]):
                text = link.readlink()
                # A snapshot of the hub is a folder of links to ../../blobs.
                up = not text.is_absolute() and text.name == target.name and not self.is_kept(target.parent)
                for base in (real, name):
                    at = Path(os.path.normpath((base / link.relative_to(real)).parent / text))
                    yield (target.parent, at.parent) if up else (target, at)

    def lacking(self, pairs: Iterable[tuple[Path, Path]], opened: Iterable[Path]) -> dict[Path, Path]:
        """Return {name: place} of what the unit lacks otherwise: each place also by its own name."""
        found: dict[Path, Path] = {}
        every = {name: real for pair in pairs for real, name in (pair, (pair[0], pair[0]))}
        above = {self.home, self.data_dir, *self.home.parents, *self.data_dir.parents}
        for name, real in sorted(every.items()):
            absent = any(name.is_relative_to(each) for each in (*self.empty, *TEMPORARY))
            there = any(name.is_relative_to(each) for each in opened) or not found.keys().isdisjoint(name.parents)
            if absent and not there and real not in above:
                found[name] = real
        return found


def is_dead(*paths: str) -> bool:
    """Return whether the server of a shared folder does not answer. An automount comes up. A child asks, which it may block for ever."""
    child = subprocess.Popen(["stat", "-L", "--", *paths], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(MOUNT_LIMIT)
    return child.returncode is None


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


def quote(text: str) -> str:
    """Return a path as one word of a property."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
