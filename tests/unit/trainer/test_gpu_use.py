"""The use of a rank's GPU, read from stand-ins for nvidia-ml-py and nvidia-smi: this machine has no GPU."""

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
from tables import table
from torch.utils.flop_counter import FlopCounterMode
from trainer_runs import Here, lines
from transformers import AutoConfig, AutoModelForCausalLM

from trainer.config import RunSpec
from trainer.method.module_with_loss import ModelWithLoss
from trainer.model_files.model_shape import read_shape
from trainer.models.model import add_lora
from trainer.models.peak import Utilisation, peak_flops
from trainer.records import gpu_use, telemetry
from trainer.records.run_state import RunHistory
from trainer.spec import make_spec

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

    values = table("gpu_use")["stand"] | {
        "nvmlDeviceGetUtilizationRates": types.SimpleNamespace(gpu=87, memory=5),
        "nvmlDeviceGetMemoryInfo": types.SimpleNamespace(used=12_000_000_000),
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
    figures: dict[str, Any] = table("gpu_use")["figures"]
    for step, power in ((1, 200.0), (2, 210.0)):
        gpus = [{"utilisation_percent": 90.0, "power_w": power}, {}, {"power_w": 75.0}]
        recorder.step(figures | {"step": step, "steps": 2, "gpus": gpus}, eta=0.0, last=True)
    recorder.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    curves = {tag: [event.value for event in events.Scalars(tag)] for tag in events.Tags()["scalars"] if "gpu" in tag}
    assert curves == table("gpu_use")["tensorboard_has_a_curve"]


# MFU -----------------------------------------------------------------------------------------------------------------

CPU = torch.device("cpu")
SIZES = table("peak")["sizes"]


@pytest.mark.parametrize("lora", [0, 8])
def test_operations_are_those_that_torch_counts(lora: int) -> None:
    torch.manual_seed(1)
    config = AutoConfig.for_model("llama", vocab_size=300, **SIZES)
    spec = make_spec({"model": "x", "lora_r": lora}, "here")
    # FlopCounterMode does not know the attention of CPUs: here it is a product of matrices.
    model: Any = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    module = ModelWithLoss(add_lora(spec, model) if lora else model)
    ids = torch.randint(0, 300, (2, 48))
    labels = ids.clone()
    labels[:, :24] = -100
    with FlopCounterMode(display=False) as counter:
        module(ids, torch.arange(48).repeat(2, 1), labels).backward()
    used = Utilisation(spec, read_shape(config.to_diff_dict()), 1.0).seconds(96, 48, 2)
    assert used == pytest.approx(counter.get_total_flops(), rel=0.1)


def test_the_peak_is_that_of_a_product_of_matrices() -> None:
    assert 1e8 < peak_flops("32-true", CPU) < 1e14


def test_a_run_records_its_share_of_the_peak(here: Here) -> None:
    assert here(max_steps=3) == 0, here.err
    records = lines(here.run_dir() / "metrics.jsonl")
    assert all(len(record["mfu"]) == 1 and 0 < record["mfu"][0] < 1.5 for record in records)
    result = here.result()
    shares = [record["mfu"][0] for record in records]
    assert min(shares) <= result["mfu"] <= max(shares)
    assert min(shares[1:]) - 1e-4 <= result["mfu_ranks"][0] <= max(shares[1:]) + 1e-4, "without the first step"
    assert f"({result['mfu']:.0%} of the device's peak)" in here.out
