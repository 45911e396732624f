"""The use of a rank's GPU: utilisation, memory, temperature and power, by NVML (nvidia-ml-py) or else by nvidia-smi."""

import contextlib
import math
import os
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from trainer.supervise import nvidia_smi

if TYPE_CHECKING:
    import torch

NVML_INTERVAL = 2.0  # s between two readings
SMI_INTERVAL = 10.0  # s between two readings by nvidia-smi, which takes up to a second of a core
READINGS = ("memory_peak_gb", "utilisation_percent", "memory_gb", "temperature_c", "power_w")  # the first is of torch
_SMI_FIELDS = ("uuid", "utilization.gpu", "memory.used", "temperature.gpu", "power.draw")

Read = Callable[[], dict[str, float]]


class GpuMonitor:
    """Reads the use of one GPU in a daemon thread, so that no step waits for the driver. `latest` is the newest reading."""

    def __init__(self, uuid: str) -> None:
        """Start to read. `uuid`: of the GPU, as nvidia-smi shows it."""
        self.latest: dict[str, float] = {}
        self._uuid = uuid
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()

    def _run(self) -> None:
        read, interval = nvml_reader(self._uuid), NVML_INTERVAL
        if read is None:
            read, interval = lambda: smi_use(self._uuid), SMI_INTERVAL
        while True:
            try:
                self.latest = read()
            except Exception:  # the driver's own classes: without a reading, the run continues
                self.latest = {}
            if self._stop.wait(interval):
                return


def nvml_reader(uuid: str) -> Read | None:
    """Return a function that reads the use of a GPU by NVML, or None without the package or the driver."""
    try:
        import pynvml

        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
    except Exception:  # not installed, or the driver rejects the request
        return None

    def read() -> dict[str, float]:
        values: dict[str, Callable[[], Any]] = {
            "utilisation_percent": lambda: pynvml.nvmlDeviceGetUtilizationRates(handle).gpu,
            "memory_gb": lambda: pynvml.nvmlDeviceGetMemoryInfo(handle).used / 1e9,
            "temperature_c": lambda: pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU),
            "power_w": lambda: pynvml.nvmlDeviceGetPowerUsage(handle) / 1000,
        }
        found = {}
        for name, value in values.items():
            with contextlib.suppress(Exception):  # a GPU may not have this sensor
                found[name] = float(value())
        return found

    return read


def smi_use(uuid: str) -> dict[str, float]:
    """Return the use of a GPU by nvidia-smi; empty without it."""
    for name, *values in nvidia_smi.query(*_SMI_FIELDS):
        if name == uuid:
            found = {}
            for key, value in zip(READINGS[1:], values, strict=True):
                with contextlib.suppress(ValueError):  # "[N/A]"
                    if math.isfinite(number := float(value)):
                        found[key] = number * 2**20 / 1e9 if key == "memory_gb" else number
            return found
    return {}


def gpu_uuid(device: "torch.device") -> str:
    """Return the UUID of a CUDA device: of CUDA_VISIBLE_DEVICES, or as torch reads it; empty if unknown."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    place = device.index or 0
    if place < len(visible) and visible[place].startswith(("GPU-", "MIG-")):
        return visible[place]
    import torch

    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", "")
    return f"GPU-{uuid}" if uuid else ""


_monitors: dict[str, GpuMonitor] = {}


def gpu_use(uuid: str) -> dict[str, float]:
    """Return the newest reading of a GPU; the first call starts its monitor, and may return nothing yet."""
    if uuid and uuid not in _monitors:
        _monitors[uuid] = GpuMonitor(uuid)
    return dict(_monitors[uuid].latest) if uuid else {}
