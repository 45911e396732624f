"""What a host is, as far as a run has to know it. Runs on the host, piped to its Python: standard library only.

    python - '{"head": "10.0.0.1", "address": "10.0.0.2", "port": 0, "run_dir": ..., "data_dir": ..., "python": ...}'

Prints one JSON object on one line (see `look`).
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import socket
import struct
import subprocess
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "transformers", "peft", "tokenizers", "safetensors", "numpy", "pydantic", "tensorboard")
OPTIONAL = ("datasets", "wandb", "unsloth", "bitsandbytes", "liger-kernel", "flash-attn", "deepspeed", "torchft")
SIOCGIFADDR = 0x8915  # netdevice(7)
# CUDA's and NCCL's versions are asked for without importing torch, which takes seconds.
_ASK_VERSIONS = """
import importlib.metadata, importlib.util, json, pathlib, platform, runpy
versions = {"python": platform.python_version()}
for name in %r:
    try:
        versions[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        pass
torch = importlib.util.find_spec("torch")
if torch and torch.origin:
    cuda = runpy.run_path(str(pathlib.Path(torch.origin).with_name("version.py"))).get("cuda")
    versions |= {"cuda": cuda} if cuda else {}
    for found in importlib.metadata.distributions():
        if (found.metadata["Name"] or "").startswith("nvidia-nccl-cu"):
            versions["nccl"] = found.version
print(json.dumps(versions))
"""


def source_address(peer: str) -> str:
    """Return the address that this host speaks to `peer` from, by its routing table; no packet is sent."""
    family = socket.AF_INET6 if ":" in peer else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((peer, 9))
        return str(probe.getsockname()[0])


def interface_of(address: str) -> str:
    """Return the network device that has `address`, or an empty string."""
    if ":" in address:
        wanted = socket.inet_pton(socket.AF_INET6, address).hex()
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            fields = line.split()
            if fields[0] == wanted:
                return fields[5]
        return ""
    if address.startswith("127."):
        return "lo"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # a device without an IPv4 address
                answer = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return ""


def addresses() -> list[str]:
    """Return this host's IPv4 addresses but loopback's, in order: what tells clones of one image apart."""
    found = set()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # a device without an IPv4 address
                answer = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                found.add(socket.inet_ntoa(answer[20:24]))
    return sorted(address for address in found if not address.startswith("127."))


def link_mbit(device: str) -> int:
    """Return the speed that a network device's driver states, in Mbit/s; 0 if it does not (Wi-Fi, no carrier)."""
    try:
        return max(0, int(Path(f"/sys/class/net/{device}/speed").read_text()))
    except (OSError, ValueError):
        return 0


def allocator() -> str:
    """Return the path of gperftools' tcmalloc as Debian and Ubuntu have it (libtcmalloc-minimal4), or an empty string."""
    path = Path(f"/usr/lib/{os.uname().machine}-linux-gnu/libtcmalloc_minimal.so.4")
    return str(path) if path.exists() else ""


def port_is_free(port: int) -> bool:
    """Tell whether a server could listen on the port now, at all of this host's addresses, as torch's store does."""
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        try:
            probe.bind(("", port))
            probe.listen(1)
        except OSError:
            return False
    return True


def gpus() -> list[dict[str, Any]]:
    """Return name, memory in MiB and UUID of every NVIDIA GPU that the driver shows; none without a driver."""
    try:
        done = subprocess.run(
            ["nvidia-smi", "--query-gpu=name,memory.total,uuid", "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    found = []
    for line in done.stdout.splitlines() if done.returncode == 0 else []:
        name, memory, uuid = (field.strip() for field in line.split(","))
        # A GPU that shares the machine's memory has none of its own to tell of ("[N/A]").
        size = int(float(memory)) if memory.replace(".", "", 1).isdigit() else 0
        found.append({"name": name, "memory_mib": size, "uuid": uuid})
    return found


def versions(python: str, more: tuple[str, ...] = ()) -> dict[str, str]:
    """Return the versions of Python, of what a run imports and of the packages `more`, as the interpreter `python` has them.

    `cuda` is what torch is built for, `nccl` the library beside it. {} if the interpreter cannot run.
    """
    try:
        done = subprocess.run(
            [python, "-I", "-c", _ASK_VERSIONS % (PACKAGES + OPTIONAL + more,)],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        answer: dict[str, str] = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        return {}
    return answer


def free_bytes(path: Path) -> int:
    """Return the space left for this user where `path` is, or would be made."""
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free


def read_json(path: Path) -> Any:
    """Return what a JSON file holds, or None."""
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None


def first_line(path: Path) -> str:
    """Return a file's first line, or an empty string if there is none."""
    try:
        return path.read_text().split("\n", 1)[0]
    except OSError:
        return ""


def may_write(path: Path) -> bool:
    """Tell whether this user may make files in `path`, or make it."""
    while not path.exists():
        path = path.parent
    return os.access(path, os.W_OK | os.X_OK)


def lives(run_dir: Path) -> bool:
    """Tell whether a supervisor holds the run's lock on this host."""
    try:
        with (run_dir / "lock").open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def busy_with(run_dir: Path) -> str:
    """Return the name of another run that lives on this host, or an empty string."""
    others = sorted(run_dir.parent.iterdir()) if run_dir.parent.is_dir() else []
    return next((other.name for other in others if other != run_dir and lives(other)), "")


def last_rows(metrics: Path) -> list[int]:
    """Return how the ranks shared the rows of the last step that the run's metrics tell of; nothing if they do not."""
    try:
        with metrics.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - (1 << 16)))
            rows = json.loads(file.read().splitlines()[-1]).get("rows", [])
    except (OSError, ValueError, IndexError, AttributeError):
        return []
    return rows if isinstance(rows, list) and all(isinstance(count, int) for count in rows) else []


def gather(a: dict[str, Any]) -> dict[str, Any]:
    """Return what this host is: device towards the head, ports, CPUs, GPUs, versions, disk, and the run as it stands."""
    run_dir, data_dir = Path(a["run_dir"]), Path(a["data_dir"])
    try:
        source = source_address(a["head"])
    except OSError as error:
        source, device, why = "", "", f"no route to the head {a['head']}: {error.strerror}"
    else:
        device, why = interface_of(source), ""
    spec = run_dir / "spec.yml"
    return {
        "boot_id": Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
        "machine_id": first_line(Path("/etc/machine-id")),
        "addresses": addresses(),
        "source": source,
        "interface": device,
        "trouble": why,
        "free_ports": [port for port in a["ports"] if port_is_free(port)] if a["ports"] else [],
        "cpus": len(os.sched_getaffinity(0)),
        "memory_mib": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2**20,
        "link_mbit": link_mbit(device),
        "gpus": gpus(),
        "allocator": allocator(),
        "compiler": any(shutil.which(name) for name in ("g++", "clang++", "c++")),
        "versions": versions(a["python"]),
        "python_exists": os.access(a["python"], os.X_OK),
        "free_bytes": free_bytes(data_dir),
        "may_write": may_write(data_dir),
        "spec": spec.read_text() if spec.exists() and ((run_dir / "checkpoints").is_dir() or lives(run_dir)) else None,
        "result": read_json(run_dir / "result.json"),
        "rows": last_rows(run_dir / "metrics.jsonl"),
        "running": lives(run_dir),
        "part": read_json(run_dir / "state/node.json"),
        "stop_wanted": (run_dir / "state/stop-wanted").exists(),
        "busy_with": busy_with(run_dir),
    }
