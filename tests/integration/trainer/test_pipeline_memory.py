"""A model that no host can hold trains as a pipeline: three hosts with a memory limit each, and only the first has the files."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from testbed import machine
from trainer_runs import Cluster, llama, losses

from trainer.costs.host_memory import BASE, available_bytes
from trainyard.remote.host_facts import allocator

MIB = 2**20
# 154 M weights in 12 equal layers; embedding and head are small.
SIZES = {"hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 16, "num_hidden_layers": 13}


@pytest.fixture
def groups() -> Iterator[list[Path]]:
    """Three cgroups, one for each host."""
    if os.geteuid():
        pytest.skip("limits of memory need root")
    top, _ = machine.cgroup_of("memory")
    made = [top / f"trainyard-memory-{os.getpid()}-{host}" for host in range(3)]
    for group in made:
        group.mkdir()
    yield made
    for group in made:
        group.rmdir()


def set_limit(group: Path, mib: int) -> None:
    unified = (group / "memory.max").exists()
    (group / ("memory.max" if unified else "memory.limit_in_bytes")).write_text(str(mib * MIB))


def peak_mib(group: Path) -> float:
    name = "memory.peak" if (group / "memory.peak").exists() else "memory.max_usage_in_bytes"
    return int((group / name).read_text()) / MIB


@pytest.mark.slow
@pytest.mark.long
def test_a_model_of_twice_the_memory_of_a_host_trains_on_three_hosts(
    cluster: Cluster, groups: list[Path], model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = llama(tmp_path / "large", model_folder, **SIZES)
    size = sum(file.stat().st_size for file in model.glob("*.safetensors")) / MIB
    limit = BASE + int(size / 2)
    for host, group in enumerate(groups):
        set_limit(group, limit)
        folder = cluster.run_dir(host).parents[1] / "model"
        shutil.copytree(model, folder, ignore=shutil.ignore_patterns("*.safetensors") if host else None)
    cluster.cold = True
    monkeypatch.setenv("LD_PRELOAD", allocator())
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    fields = {"strategy": "pipeline", "model": "./model", "batch_size": 1, "total_batch_size": 6, "max_steps": 3}
    launchers = cluster.start(3, lr=1e-3, **fields)
    for launcher, group in zip(launchers, groups, strict=True):
        (group / "cgroup.procs").write_text(str(launcher.pid))
    assert cluster.wait(launchers) == [0, 0, 0], cluster.logs()
    peaks = [peak_mib(group) for group in groups]
    print(f"model of {size:.0f} MiB, limit {limit} MiB, peaks {', '.join(f'{peak:.0f}' for peak in peaks)} MiB")
    found = losses(cluster.run_dir())
    assert len(found) == 3 and found[-1] < found[0]
    assert max(peaks) <= limit
    result = json.loads((cluster.run_dir(2) / "result.json").read_text())
    assert result["step"] == 3 and (cluster.run_dir(2) / "adapter" / "adapter_model.safetensors").exists()


@pytest.mark.privileged(reason="limits of memory need root")
def test_limits_of_cgroups_count(groups: list[Path]) -> None:
    before = available_bytes("cpu", 1)
    set_limit(groups[0], 300)
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        (groups[0] / "cgroup.procs").write_text("0")
        os.write(writer, str(available_bytes("cpu", 1)).encode())
        os._exit(0)
    os.waitpid(child, 0)
    found = float(os.read(reader, 100))
    assert before > 400 * MIB > 300 * MIB > found > 200 * MIB
