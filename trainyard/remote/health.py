"""What can spoil a run on a host, beyond what probe.py asks. Runs on the host, piped to its Python: standard library only.

    python - '{"peers": {"node2": "10.0.0.2"}, "data_dir": ..., "run": ..., "sudo": true, "memory_mib": 768}'

Prints one JSON object on one line (see `look`).
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

SPIN = 0.6  # s that a busy loop runs, to see how much of a core this host really has
PAUSE = 0.035  # s
WATCH = 0.5  # s over which other processes' use of the CPUs is taken
RESOLVE_LIMIT = 6.0  # s for all names; a dead DNS server takes ten for each
OURS = b"\0-I\0-S\0-"  # how Python is started for a question (see links.py); one machine may be two hosts
SIOCGIFADDR, SIOCGIFNETMASK = 0x8915, 0x891B  # netdevice(7)
VIRTUAL = ("lo", "docker", "br-", "virbr", "veth", "tun", "tap", "wg", "tailscale", "cni", "flannel", "podman")


def read(path: str | Path, otherwise: str = "") -> str:
    """Return a file's text without white space around it, or `otherwise`."""
    try:
        return Path(path).read_text().strip()
    except (OSError, ValueError):
        return otherwise


def devices() -> list[dict[str, Any]]:
    """Return every network device that is up and has an IPv4 address: its name, address, mask, mtu, mbit, wireless."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # no IPv4 address
                asked = struct.pack("256s", name.encode()[:15])
                address = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, asked)[20:24]
                mask = fcntl.ioctl(probe.fileno(), SIOCGIFNETMASK, asked)[20:24]
                folder = Path("/sys/class/net", name)
                speed = read(folder / "speed", "0")
                found.append(
                    {
                        "name": name,
                        "address": socket.inet_ntoa(address),
                        "mask": socket.inet_ntoa(mask),
                        "mtu": int(read(folder / "mtu", "0")),
                        "mbit": int(speed) if speed.isdigit() else 0,
                        "wireless": (folder / "wireless").exists() or (folder / "phy80211").exists(),
                        "virtual": name.startswith(VIRTUAL),
                    }
                )
    return found


def resolve(names: list[str]) -> dict[str, Any]:
    """Return for each name the IPv4 addresses that this host takes it for ([] for none), and the seconds that it took."""
    answers: dict[str, list[str]] = {}
    begun = time.monotonic()

    def ask(name: str) -> None:
        try:
            answers[name] = sorted({str(row[4][0]) for row in socket.getaddrinfo(name, None, socket.AF_INET)})
        except OSError:
            answers[name] = []

    threads = [threading.Thread(target=ask, args=(name,), daemon=True) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, RESOLVE_LIMIT - (time.monotonic() - begun)))
    return {"addresses": dict(answers), "seconds": round(time.monotonic() - begun, 2)}


def spin() -> dict[str, float]:
    """Return the share of one core that a busy loop gets, and how often it was stopped for longer than PAUSE.

    A quota stops it for tens of milliseconds in every tenth of a second; other processes only for a few at a time.
    """
    begun, used = time.monotonic(), time.process_time()
    last, gap, pauses = begun, 0.0, 0
    while (now := time.monotonic()) - begun < SPIN:
        gap = max(gap, now - last)
        pauses += now - last > PAUSE
        last = now
    share = (time.process_time() - used) / (time.monotonic() - begun)
    return {"share": round(share, 2), "gap": round(gap, 3), "pauses": pauses}


OUTSIDE = r"""
mount -t cgroup -o memory none /mnt && cat /mnt/memory.limit_in_bytes && awk '/^total_rss / {print $2}' /mnt/memory.stat
umount /mnt; mount -t cgroup -o cpu none /mnt && cat /mnt/cpu.cfs_quota_us /mnt/cpu.cfs_period_us
"""


def outside() -> dict[str, float]:
    """Return the limits that a container has from outside by cgroups of version 1, which are mounted nowhere inside.

    Read as root, by a mount that nobody else sees: `memory` and `rss` in bytes, `cpus`; empty where there are none.
    """
    if not Path("/run/systemd/container").exists():
        return {}
    try:
        argv = ["sudo", "-n", "unshare", "--mount", "--propagation", "private", "sh", "-c", OUTSIDE]
        done = subprocess.run(argv, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=20)
        limit, rss, share, period = (int(word) for word in done.stdout.split())
    except (OSError, subprocess.TimeoutExpired, ValueError):
        return {}
    return {"memory": limit, "rss": rss} | ({"cpus": share / period} if share > 0 else {})


def quota(limits: list[float]) -> float | None:
    """Return the number of CPUs that a cgroup of ours, or one of `limits`, allows, or None for no limit."""
    for line in read("/proc/self/cgroup").splitlines():
        if line.startswith("0::"):
            folder = Path("/sys/fs/cgroup", line[3:].lstrip("/"))
            for group in (folder, *folder.parents):
                words = read(group / "cpu.max").split()
                if len(words) == 2 and words[0] != "max":
                    limits.append(int(words[0]) / int(words[1]))
    return min(limits, default=None)


def memory(limits: dict[str, float]) -> dict[str, int]:
    """Return the machine's memory, what is available of it and of our cgroup's limit, in MiB."""
    rows = dict(line.split(":", 1) for line in read("/proc/meminfo").splitlines() if ":" in line)
    total, available = (int(rows.get(name, "0 kB").split()[0]) >> 10 for name in ("MemTotal", "MemAvailable"))
    for line in read("/proc/self/cgroup").splitlines():
        if line.startswith("0::"):
            folder = Path("/sys/fs/cgroup", line[3:].lstrip("/"))
            for group in (folder, *folder.parents):
                limit = read(group / "memory.max")
                if limit.isdigit():
                    used = int(read(group / "memory.current", "0"))
                    available = min(available, max(0, int(limit) - used) >> 20)
    if limits.get("memory", 1 << 62) < total << 20:
        total = int(limits["memory"]) >> 20
        available = min(available, max(0, int(limits["memory"] - limits["rss"])) >> 20)
    return {"total_mib": total, "available_mib": available}


def can_have(mib: int) -> bool:
    """Tell whether a process can really have so much memory: limits from outside may be shown nowhere inside.

    The child that tries is the first that the kernel would kill. One that is merely slow is not refused.
    """
    code = "open('/proc/self/oom_score_adj', 'w').write('1000'); b = bytearray(int(__import__('sys').argv[1]) << 20)"
    code += "; b[::4096] = b'x' * len(b[::4096])"
    try:
        done = subprocess.run([sys.executable, "-I", "-S", "-c", code, str(mib)], capture_output=True, timeout=20)
    except subprocess.TimeoutExpired:
        return True
    except OSError:
        return False
    return done.returncode == 0


def processes() -> dict[int, tuple[int, str, int]]:
    """Return CPU time in ticks, name and user of every process but kernel threads and those that ask, as this one does."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            head, _, tail = (folder / "stat").read_text().rpartition(")")
            fields = tail.split()
            if int(fields[6]) & 0x00200000:  # PF_KTHREAD
                continue
            if OURS in (folder / "cmdline").read_bytes():
                continue
            found[int(folder.name)] = (
                int(fields[11]) + int(fields[12]),
                head.partition("(")[2],
                folder.stat().st_uid,
            )
    return found


def busy() -> list[dict[str, Any]]:
    """Return who else uses more than a tenth of a core now: pid, name, user and cores."""
    before, begun = processes(), time.monotonic()
    time.sleep(WATCH)
    after = processes()
    ticks = os.sysconf("SC_CLK_TCK") * (time.monotonic() - begun)
    found = []
    for pid, (used, name, uid) in after.items():
        cores = (used - before.get(pid, (used, "", 0))[0]) / ticks
        if cores > 0.1:
            found.append({"pid": pid, "name": name, "uid": uid, "cores": round(cores, 1)})
    return sorted(found, key=lambda row: -row["cores"])


def torchruns(runs: Path) -> list[dict[str, Any]]:
    """Return the processes of torch's launcher that belong to none of our runs: pid and command."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
            launcher = any(word.endswith("/torchrun") or word == "torch.distributed.run" for word in words[:6])
            if launcher and not any(word.startswith((f"{runs}/", f"--run-dir={runs}/")) for word in words):
                found.append({"pid": int(folder.name), "command": " ".join(words)[:120].strip()})
    return found


def gpu_state() -> dict[str, Any]:
    """Return NVIDIA cards on the bus, what the driver says of them, and who computes on them; empty without a card."""
    cards = 0
    for folder in Path("/sys/bus/pci/devices").glob("*"):
        cards += read(folder / "vendor") == "0x10de" and read(folder / "class").startswith("0x03")
    gpus, users = [], []
    with contextlib.suppress(OSError, subprocess.SubprocessError, ValueError):
        ask = ["nvidia-smi", "--format=csv,noheader,nounits"]
        out = subprocess.run(
            [*ask, "--query-gpu=name,memory.total,memory.used"], capture_output=True, text=True, timeout=20, check=True
        ).stdout
        for line in out.splitlines():
            name, total, used = (field.strip() for field in line.split(","))
            gpus.append({"name": name, "total_mib": int(total), "used_mib": int(used)})
        out = subprocess.run(
            [*ask, "--query-compute-apps=pid,process_name,used_memory"], capture_output=True, text=True, timeout=20
        ).stdout
        users = [line.strip() for line in out.splitlines() if "," in line]
    return {"cards": cards, "gpus": gpus, "users": users}


def digest(path: Path) -> str:
    """Return a file's SHA-256 in hex."""
    total = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            total.update(block)
    return total.hexdigest()


def files(data_dir: Path, run: str) -> dict[str, Any]:
    """Return staged datasets whose content is not what their name says, and digests of what has to be equal everywhere.

    Staged datasets are named by their SHA-256; `datasets` is the folder that the role nfs copies.
    """
    spoilt, equal = [], {}
    for path in sorted((data_dir / "store/datasets").glob("*")):
        if path.is_file() and not digest(path).startswith(path.name.partition(".")[0]):
            spoilt.append(str(path))
    folder = data_dir / "datasets"
    # What is mounted from the head is the same file, and asking a dead head takes long.
    if folder.is_dir() and f" {folder} " not in read("/proc/mounts"):
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                equal[f"datasets/{path.relative_to(folder)}"] = digest(path)
    trainer = data_dir / "runs" / run / "trainer.zip"
    if run and trainer.exists():
        equal[f"runs/{run}/trainer.zip"] = digest(trainer)
    return {"spoilt": spoilt, "equal": equal}


def sudo() -> bool:
    """Tell whether this user is root or may be without a password."""
    if os.geteuid() == 0:
        return True
    try:
        done = subprocess.run(["sudo", "-n", "true"], capture_output=True, stdin=subprocess.DEVNULL, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def gather(a: dict[str, Any]) -> dict[str, Any]:
    """Return what this host is; times are seconds since the epoch by its own clock, at the start and the end."""
    begun = time.time()
    data_dir = Path(a["data_dir"])
    limits = outside() if a["sudo"] else {}
    room = memory(limits)
    answer = {
        "hostname": socket.gethostname(),
        "kernel": os.uname().release,
        "devices": devices(),
        "names": resolve([*a["peers"], socket.gethostname()]),
        "memory": room,
        "memory_had": room["available_mib"] > a["memory_mib"] and can_have(a["memory_mib"]),
        "quota": quota([limits["cpus"]] if "cpus" in limits else []),
        "load": os.getloadavg()[0],
        "busy": busy(),
        "spin": spin(),
        "torchruns": torchruns(data_dir / "runs"),
        "gpu": gpu_state(),
        "files": files(data_dir, a["run"]),
        "sudo": sudo() if a["sudo"] else True,
        "inodes_free": os.statvfs(data_dir if data_dir.exists() else "/").f_favail,
    }
    return answer | {"clock": [begun, time.time()]}
