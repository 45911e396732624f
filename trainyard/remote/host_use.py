"""The use of this host: CPU, memory, disk, network, GPUs and Ollama. Standard library only."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

from trainer.generation.ollama_client import OllamaClient, OllamaError
from trainer.generation.ollama_names import server_form
from trainer.supervise import nvidia_smi
from trainer.supervise.interface import interface_of
from trainer.supervise.link_free import LinkFreePath
from trainyard.remote.host_facts import nearest_folder
from trainyard.remote.network import interface_mbit
from trainyard.remote.trees import matching

MODELS = 100  # names in a sample
SECTOR = 512  # bytes, in /proc/diskstats on any disk
RECORD_LIMIT = 64 << 10  # bytes
GPU_NUMBERS = {"utilisation_percent": "utilization.gpu", "memory_used_mib": "memory.used"}
GPU_NUMBERS |= {"memory_total_mib": "memory.total", "temperature_c": "temperature.gpu"}
GPU_NUMBERS |= {"power_w": "power.draw", "power_limit_w": "power.limit"}


class HostUse:
    """Reads counters of the kernel; rates are those since the last reading."""

    def __init__(self, request: dict[str, Any]) -> None:
        """Take `data_dir` and `address` of the request, see `sampler.sample`."""
        self._folder = nearest_folder(Path(request["data_dir"]))
        self._interface = interface_of(request["address"])
        self._mbit = interface_mbit(self._interface) if self._interface else 0
        self._before = self._counters()
        time.sleep(0.1)

    def read(self) -> dict[str, Any]:
        """Return one sample.

        Returns:
            `now`, seconds since the epoch; `uptime` in seconds; `cpu_percent` of all cores; `cores`; `load`; `memory_total`,
            `memory_available`, `disk_total` and `disk_free` below the data folder in bytes; `disk_read`, `disk_written`,
            `received` and `sent` by the cluster's network interface in bytes/s; `interface`, and its `link_mbit` or 0.
        """
        after = self._counters()
        seconds = after["time"] - self._before["time"]
        rate = {name: max(0.0, after[name] - self._before[name]) / seconds for name in after}
        self._before = after
        memory = _fields(Path("/proc/meminfo"))
        disk = shutil.disk_usage(self._folder)
        ticks = rate["busy"] + rate["idle"]
        return {
            "now": time.time(),
            "uptime": float(Path("/proc/uptime").read_text(encoding="utf-8").split()[0]),
            "cpu_percent": round(100 * rate["busy"] / ticks, 1) if ticks else 0.0,
            "cores": os.cpu_count() or 1,
            "load": os.getloadavg()[0],
            "memory_total": memory.get("MemTotal", 0) * 1024,
            "memory_available": memory.get("MemAvailable", 0) * 1024,
            "disk_total": disk.total,
            "disk_free": disk.free,
            **{name: round(rate[name]) for name in ("disk_read", "disk_written", "received", "sent")},
            "interface": self._interface,
            "link_mbit": self._mbit,
        }

    def _counters(self) -> dict[str, float]:
        """Return counters since the start of the machine, and their `time` in seconds."""
        words = [int(word) for word in Path("/proc/stat").read_text(encoding="utf-8").split("\n", 1)[0].split()[1:9]]
        idle = words[3] + words[4]
        found: dict[str, float] = {"time": time.monotonic(), "busy": sum(words) - idle, "idle": idle}
        return found | _disk_bytes() | _network_bytes(self._interface)


def _fields(path: Path) -> dict[str, int]:
    rows = (line.split() for line in path.read_text(encoding="utf-8").splitlines())
    return {row[0].rstrip(":"): int(row[1]) for row in rows if len(row) > 1 and row[1].isdigit()}


def _disk_bytes() -> dict[str, float]:
    """Return the bytes `disk_read` and `disk_written` of all disks: devices with hardware behind them, without partitions."""
    read = written = 0
    for line in Path("/proc/diskstats").read_text(encoding="utf-8").splitlines():
        words = line.split()
        if Path("/sys/block", words[2], "device").exists():
            read, written = read + int(words[5]), written + int(words[9])
    return {"disk_read": read * SECTOR, "disk_written": written * SECTOR}


def _network_bytes(interface: str) -> dict[str, float]:
    """Return the bytes `received` and `sent` by an interface; 0 without one."""
    for line in Path("/proc/net/dev").read_text(encoding="utf-8").splitlines():
        name, _, rest = line.partition(":")
        if interface and name.strip() == interface:
            words = rest.split()
            return {"received": int(words[0]), "sent": int(words[8])}
    return {"received": 0, "sent": 0}


def gpu_use() -> list[dict[str, Any]]:
    """Return `uuid`, `name` and GPU_NUMBERS of every NVIDIA GPU; a number that the driver does not report is None."""
    if not nvidia_smi.program():
        return []
    return [
        {"uuid": uuid, "name": name} | dict(zip(GPU_NUMBERS, map(_number, numbers), strict=True))
        for uuid, name, *numbers in nvidia_smi.query("uuid", "name", *GPU_NUMBERS.values())
    ]


def _number(word: str) -> float | None:
    return float(word) if word.replace(".", "", 1).isdigit() else None


def ollama_use(request: dict[str, Any]) -> dict[str, Any]:
    """Return the models of this host's Ollama: `installed`, `loaded`, `deployed` by trainyard; `version`, empty without one.

    Args:
        request: `ollama_urls`, see `sampler.sample`; `data_dir`, which has the records of deployments.
    """
    deployed = _deployed(Path(request["data_dir"]) / "deployed")
    for url in request["ollama_urls"]:
        try:
            client = OllamaClient(url, connect_timeout=2.0, idle_timeout=5.0, deadline=5.0)
            version = ".".join(map(str, client.version()))
            installed, loaded = sorted(client.tags()), client.loaded()
            here = [name for name in installed if server_form(name) in deployed]
        except (OllamaError, OSError):
            continue
        return {"version": version, "installed": installed[:MODELS], "loaded": loaded[:MODELS], "deployed": here}
    return {"version": "", "installed": [], "loaded": [], "deployed": []}


def _deployed(records: Path) -> list[str]:
    """Return the names of the models that trainyard deployed on this host, in the server's form."""
    found = []
    for path in matching(LinkFreePath(records), "*.json")[:MODELS]:
        try:
            found.append(str(json.loads(path.read(RECORD_LIMIT))["name"]).lower())
        except (OSError, ValueError, LookupError, TypeError, RecursionError):
            continue
    return sorted(found)
