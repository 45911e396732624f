"""Conditions of a host that can break a run: CPU and memory limits, other load, names, damaged files.

Standard library only. Measurements take about two seconds.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from trainer.supervise import nvidia_smi
from trainer.supervise.link_free import LinkFreePath
from trainyard.remote import hardware, wsl
from trainyard.remote.digests import sha256_file
from trainyard.remote.foreign_files import foreign_files
from trainyard.remote.host_facts import nearest_folder, read
from trainyard.remote.network import interface_details
from trainyard.remote.trees import files_below, matching

BUSY_LOOP = 0.6  # s that a busy loop runs, to measure the share of a core that this host gets
PAUSE = 0.035  # s
WATCH = 0.5  # s over which the CPU use of other processes is measured
RESOLVE_LIMIT = 6.0  # s for all names; an unreachable DNS server takes 10 s per name
# How Python is started for a request (see trainyard/wire/remote_archive.py); two hosts of an inventory may be one machine.
REQUEST_FLAGS = b"\0-I\0-S\0-c\0"
PF_KTHREAD = 0x00200000  # linux/sched.h
# Runs as root in a separate mount namespace.
CGROUP_V1_LIMITS = r"""
mount -t cgroup -o memory none /mnt && cat /mnt/memory.limit_in_bytes && awk '/^total_rss / {print $2}' /mnt/memory.stat
umount /mnt; mount -t cgroup -o cpu none /mnt && cat /mnt/cpu.cfs_quota_us /mnt/cpu.cfs_period_us
"""
# The last line of sudo if it refuses, the packages that dpkg has not configured, and the folders that root cannot open.
SITE = (
    'export LC_ALL=C; [ "$(id -u)" = 0 ] || said=$(sudo -n true 2>&1) || echo "$said" | tail -n 1; echo =; '
    "ls /var/lib/dpkg/updates; dpkg-query --show --showformat='${db:Status-Status} ${Package}\\n' | "
    "sed -En 's/^(half-|unpacked|triggers-)[^ ]* //p'; echo =; "
    'sudo -n true && for folder; do sudo -n ls -d -- "$folder/." >/dev/null || echo "$folder"; done'
)
# The child is the first process that the kernel kills for lack of memory.
ALLOCATE = (
    "import sys; open('/proc/self/oom_score_adj', 'w').write('1000'); "
    "block = bytearray(int(sys.argv[1]) << 20); block[::4096] = b'x' * len(block[::4096])"
)


def gather(request: dict[str, Any]) -> dict[str, Any]:
    """Measure this host, by the functions of this module. `clock` has its time at the start and at the end, in seconds since the epoch.

    `request`: what `hardware.gather` needs; `run`, the name of a run or an empty string; `peers`, the names of the other hosts; `memory_mib`,
    what a process must be able to allocate; `sudo`, whether trainyard configures the host as root; `python`, the interpreter of the
    cluster's environment; `services`, which of "ollama" and "queue" it installs; `ssh_port`, that of its SSH server.
    """
    start = time.time()
    data_dir = Path(request["data_dir"])
    limits = cgroup_v1_limits() if request["sudo"] else {}
    room = memory(limits)
    answer = {
        "hostname": socket.gethostname(),
        "devices": interface_details(),
        "names": resolve([*request["peers"], socket.gethostname()]),
        "memory": room,
        "memory_allocated": room["available_mib"] > request["memory_mib"] and can_allocate(request["memory_mib"]),
        "quota": quota([limits["cpus"]] if "cpus" in limits else []),
        "load": os.getloadavg()[0],
        "busy": busy(),
        "spin": spin(),
        "torchruns": torchruns(data_dir / "runs"),
        "gpu": gpu_state(),
        "hardware": hardware.gather(request),
        "files": files(data_dir, request["run"]),
        "wsl": wsl.gather(request["ssh_port"]),
        "site": site(request["services"], [data_dir, Path(request["python"]).parent]) if request["sudo"] else {},
        "inodes_free": os.statvfs(data_dir if data_dir.exists() else "/").f_favail,
    }
    return answer | {"clock": [start, time.time()]}


def resolve(names: list[str]) -> dict[str, Any]:
    """Return `addresses`, the IPv4 addresses of every name ([] for none), and the `seconds` that this took."""
    found: dict[str, list[str]] = {}
    start = time.monotonic()

    def ask(name: str) -> None:
        try:
            found[name] = sorted({str(row[4][0]) for row in socket.getaddrinfo(name, None, socket.AF_INET)})
        except OSError:
            found[name] = []

    threads = [threading.Thread(target=ask, args=(name,), daemon=True) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, RESOLVE_LIMIT - (time.monotonic() - start)))
    return {"addresses": dict(found), "seconds": round(time.monotonic() - start, 2)}


def spin() -> dict[str, float]:
    """Return the `share` of one core that a busy loop gets, its longest `gap` in seconds, and its number of `pauses`.

    A quota stops the loop for tens of milliseconds in every 100 ms; other processes stop it for a few at a time.
    """
    start, used = time.monotonic(), time.process_time()
    last, gap, pauses = start, 0.0, 0
    while (now := time.monotonic()) - start < BUSY_LOOP:
        gap = max(gap, now - last)
        pauses += now - last > PAUSE
        last = now
    share = (time.process_time() - used) / (time.monotonic() - start)
    return {"share": round(share, 2), "gap": round(gap, 3), "pauses": pauses}


def cgroup_v1_limits() -> dict[str, float]:
    """Return the limits of a container by cgroups of version 1, which are not mounted inside the container.

    They are read as root, through a mount that no other process sees: `memory` and `rss` in bytes, `cpus`. Empty if
    there are none.
    """
    if not Path("/run/systemd/container").exists():
        return {}
    command = ["sudo", "-n", "unshare", "--mount", "--propagation", "private", "sh", "-c", CGROUP_V1_LIMITS]
    try:
        done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=20)
        limit, rss, share, period = (int(word) for word in done.stdout.split())
    except (OSError, subprocess.TimeoutExpired, ValueError):
        return {}
    return {"memory": limit, "rss": rss} | ({"cpus": share / period} if share > 0 else {})


def cgroups() -> list[Path]:
    """Return the folders of this process's cgroup (version 2) and of those above it."""
    for line in read("/proc/self/cgroup").splitlines():
        if line.startswith("0::"):
            folder = Path("/sys/fs/cgroup", line[3:].lstrip("/"))
            return [folder, *folder.parents]
    return []


def quota(limits: list[float]) -> float | None:
    """Return the number of CPUs that the cgroups and `limits` allow, or None without a limit."""
    for group in cgroups():
        words = read(group / "cpu.max").split()
        if len(words) == 2 and words[0] != "max":
            limits.append(int(words[0]) / int(words[1]))
    return min(limits, default=None)


def memory(limits: dict[str, float]) -> dict[str, int]:
    """Return this host's total memory, and the memory that is available within the limits, in MiB."""
    rows = dict(line.split(":", 1) for line in read("/proc/meminfo").splitlines() if ":" in line)
    total, available = (int(rows.get(name, "0 kB").split()[0]) >> 10 for name in ("MemTotal", "MemAvailable"))
    for group in cgroups():
        limit = read(group / "memory.max")
        if limit.isdigit():
            used = int(read(group / "memory.current", "0"))
            available = min(available, max(0, int(limit) - used) >> 20)
    if limits.get("memory", 1 << 62) < total << 20:
        total = int(limits["memory"]) >> 20
        available = min(available, max(0, int(limits["memory"] - limits["rss"])) >> 20)
    return {"total_mib": total, "available_mib": available}


def can_allocate(mib: int) -> bool:
    """Return whether a process can really allocate memory: an outer limit may not be visible inside a container.

    An allocation that is merely slow counts as possible.
    """
    command = [sys.executable, "-I", "-S", "-c", ALLOCATE, str(mib)]
    try:
        done = subprocess.run(command, capture_output=True, timeout=20)
    except subprocess.TimeoutExpired:
        return True
    except OSError:
        return False
    return done.returncode == 0


def processes() -> dict[int, tuple[int, str, int]]:
    """Return CPU time in ticks, name and user of every process, without kernel threads and trainyard's requests."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            head, _, tail = (folder / "stat").read_text(encoding="utf-8").rpartition(")")
            fields = tail.split()
            if int(fields[6]) & PF_KTHREAD or REQUEST_FLAGS in (folder / "cmdline").read_bytes():
                continue
            ticks = int(fields[11]) + int(fields[12])
            found[int(folder.name)] = (ticks, head.partition("(")[2], folder.stat().st_uid)
    return found


def busy() -> list[dict[str, Any]]:
    """Return the processes that use more than a tenth of a core: `pid`, `name`, `uid` and `cores`."""
    before, start = processes(), time.monotonic()
    time.sleep(WATCH)
    after = processes()
    ticks = os.sysconf("SC_CLK_TCK") * (time.monotonic() - start)
    found = []
    for pid, (used, name, uid) in after.items():
        cores = (used - before.get(pid, (used, "", 0))[0]) / ticks
        if cores > 0.1:
            found.append({"pid": pid, "name": name, "uid": uid, "cores": round(cores, 1)})
    return sorted(found, key=lambda row: -row["cores"])


def torchruns(runs: Path) -> list[dict[str, Any]]:
    """Return `pid` and `command` of every torchrun that belongs to no run below `runs`."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
            launcher = any(word.endswith(("/torchrun", ".torchrun", "torch.distributed.run")) for word in words[:6])
            if launcher and not any(word.startswith((f"{runs}/", f"--run-dir={runs}/")) for word in words):
                found.append({"pid": int(folder.name), "command": " ".join(words)[:120].strip()})
    return found


def gpu_state() -> dict[str, Any]:
    """Return the number of NVIDIA `cards` on the bus, the `gpus` that the driver shows, the `users` of their memory, and which are `exclusive`."""
    cards = 0
    for folder in Path("/sys/bus/pci/devices").glob("*"):
        cards += read(folder / "vendor") == "0x10de" and read(folder / "class").startswith("0x03")
    gpus = [
        {"name": name, "total_mib": nvidia_smi.mib(total)} for name, total in nvidia_smi.query("name", "memory.total")
    ]
    apps = nvidia_smi.query("pid", "used_memory", "process_name", subject="compute-apps")
    exclusive = [index for index, mode in nvidia_smi.query("index", "compute_mode") if mode.startswith("Exclusive")]
    users = [f"{pid}, {name}, {used}" for pid, used, name in apps]
    return {"cards": cards, "gpus": gpus, "users": users, "exclusive": exclusive}


def files(data_dir: Path, run: str) -> dict[str, Any]:
    """Return the damaged files of the data folder, and digests of files to compare between hosts.

    `damaged` lists staged datasets whose content does not match the digest in their name. `equal` has digests of the
    files that must be the same on every host: the datasets that the role nfs copies, and the run's trainer.
    """
    damaged, equal = [], {}
    for path in matching(LinkFreePath(data_dir / "store"), "datasets/*"):
        # A link leads to a file that the host had already, which a start compares.
        if path.is_file() and not sha256_file(path).startswith(path.name.partition(".")[0]):
            damaged.append(str(path))
    folder = LinkFreePath(data_dir / "datasets")
    # A mounted folder holds the head's files, and reading it from an unreachable head takes long.
    if folder.is_folder() and f" {folder} " not in read("/proc/mounts"):
        for name in files_below(folder):
            if (folder / name).is_file():
                equal[f"datasets/{name}"] = sha256_file(folder / name)
    if run and (trainer := LinkFreePath(data_dir / "runs", run, "trainer.zip")).exists():
        equal[f"runs/{run}/trainer.zip"] = sha256_file(trainer)
    return {"damaged": damaged, "equal": equal}


def site(services: list[str], folders: list[Path]) -> dict[str, str]:
    """Return what stops site.yml and units, by check: what `sudo` says, `packages` that are not configured, `folders` of the cluster that
    are closed to root, files of other `services`."""
    command = ["sh", "-c", SITE, "sh", *dict.fromkeys(str(nearest_folder(folder)) for folder in folders)]
    try:
        out = subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL, timeout=20).stdout
    except subprocess.TimeoutExpired:
        out = b"no answer within 20 s"
    sudo, packages, closed, *_ = [*out.decode(errors="replace").split("=\n"), "", ""]
    found = {"sudo": sudo.strip(), "packages": ", ".join(packages.split()), "folders": ", ".join(closed.splitlines())}
    found |= {name: ", ".join(foreign_files(name)) for name in services}
    return {check: text for check, text in found.items() if text}
