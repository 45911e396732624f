"""The use of a rank's GPU, read from stand-ins for nvidia-ml-py and nvidia-smi: this machine has no GPU."""

from __future__ import annotations

import os
import sys
import threading
import time
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_nvidia_smi import write_nvidia_smi

from trainer.config import RunSpec
from trainer.records import gpu_use, telemetry
from trainer.records.run_state import RunHistory

UUID = "GPU-00000001"


def stand_in(**missing: Exception) -> Any:
    """A module like pynvml for one GPU; `missing` has the errors of functions that fail."""

    def function(name: str, value: Any) -> Any:
        def call(*arguments: Any) -> Any:
            if name in missing:
                raise missing[name]
            assert name in ("nvmlInit", "nvmlDeviceGetHandleByUUID") or arguments[0] == "handle"
            return value

        return call

    values = {
        "nvmlInit": None,
        "nvmlDeviceGetHandleByUUID": "handle",
        "nvmlDeviceGetUtilizationRates": types.SimpleNamespace(gpu=87, memory=5),
        "nvmlDeviceGetMemoryInfo": types.SimpleNamespace(used=12_000_000_000),
        "nvmlDeviceGetTemperature": 65,
        "nvmlDeviceGetPowerUsage": 240_500,
    }
    module = types.ModuleType("pynvml")
    module.NVML_TEMPERATURE_GPU = 0  # type: ignore[attr-defined]
    for name, value in values.items():
        setattr(module, name, function(name, value))
    return module


def test_nvml_is_read_and_a_missing_sensor_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", stand_in())
    read = gpu_use.nvml_reader(UUID)
    whole = {"utilisation_percent": 87.0, "memory_gb": 12.0, "temperature_c": 65.0, "power_w": 240.5}
    assert read and read() == whole
    monkeypatch.setitem(sys.modules, "pynvml", stand_in(nvmlDeviceGetPowerUsage=RuntimeError("Not Supported")))
    read = gpu_use.nvml_reader(UUID)
    assert read and read() == {name: value for name, value in whole.items() if name != "power_w"}
    monkeypatch.setitem(sys.modules, "pynvml", stand_in(nvmlInit=RuntimeError("Driver Not Loaded")))
    assert gpu_use.nvml_reader(UUID) is None
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert gpu_use.nvml_reader(UUID) is None


def test_nvidia_smi_is_the_fallback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert gpu_use.smi_use(UUID) == {}
    write_nvidia_smi(tmp_path, 2)
    expected = {"utilisation_percent": 87.0, "memory_gb": 11.811160064, "temperature_c": 65.0, "power_w": 240.55}
    assert gpu_use.smi_use(UUID) == expected and gpu_use.smi_use("GPU-9") == {}
    monitor = gpu_use.GpuMonitor(UUID)
    deadline = time.monotonic() + 20
    while not monitor.latest and time.monotonic() < deadline:
        time.sleep(0.01)
    monitor.close()
    assert monitor.latest == expected
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\necho '{UUID}, [N/A], 1, nan, x'\n")
    assert gpu_use.smi_use(UUID) == {"memory_gb": 2**20 / 1e9}


def test_the_heartbeat_of_a_rank_has_the_use_of_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", stand_in())
    monkeypatch.setattr(gpu_use, "_monitors", {})
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 11_000_000_000)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", f"GPU-00000000,{UUID}")
    device = torch.device("cuda", 1)
    assert gpu_use.gpu_uuid(device) == UUID
    deadline = time.monotonic() + 20
    while "power_w" not in (usage := telemetry.gpu_usage(device)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert usage == {
        "memory_peak_gb": 11.0, "utilisation_percent": 87.0, "memory_gb": 12.0, "temperature_c": 65.0, "power_w": 240.5,
    }  # fmt: skip
    assert all(thread.daemon for thread in threading.enumerate() if thread is not threading.main_thread())
    for monitor in gpu_use._monitors.values():
        monitor.close()
    assert telemetry.gpu_usage(torch.device("cpu")) == {}


def test_tensorboard_has_a_curve_for_the_gpu_of_every_rank(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    spec = RunSpec(run="r", model="tiny", dataset="d.jsonl", loggers=("tensorboard",))
    world = types.SimpleNamespace(rank=0, global_rank=0, is_host_leader=True)
    recorder = telemetry.Recorder(spec, tmp_path, world, RunHistory([{"start": "a", "step": 0, "head": "h"}]))  # type: ignore[arg-type]
    figures: dict[str, Any] = {
        "loss": 1.0,
        "lr": 0.1,
        "grad_norm": None,
        "tokens_per_second": 5.0,
        "step_seconds": [1.0, 2.0],
    }
    for step, power in ((1, 200.0), (2, 210.0)):
        gpus = [{"utilisation_percent": 90.0, "power_w": power}, {}, {"power_w": 75.0}]
        recorder.step(figures | {"step": step, "steps": 2, "gpus": gpus}, eta=0.0, last=True)
    recorder.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    curves = {tag: [event.value for event in events.Scalars(tag)] for tag in events.Tags()["scalars"] if "gpu" in tag}
    assert curves == {
        "gpu_utilisation_percent/rank0": [90.0, 90.0],
        "gpu_power_w/rank0": [200.0, 210.0],
        "gpu_power_w/rank2": [75.0, 75.0],
    }
