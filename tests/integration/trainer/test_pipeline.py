"""strategy=pipeline under real torchrun: the losses, the evaluation and the result of ddp, also after a resume on other hosts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from torch.testing import assert_close
from trainer_runs import Cluster, Here, losses

from trainer.distributed import COPY_STAGES

PIPELINE = {"strategy": "pipeline"}
# Five rows in micro-batches of two: three micro-batches of different sizes.
STEPS = {"total_batch_size": 5, "batch_size": 2, "epochs": 200, "max_steps": 30, "checkpoint_interval": 5}
FULL = {"lora_r": 0, "lr": 3e-3}


@pytest.fixture(scope="session")
def deep_model(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Path:
    """The small Llama with four layers and a head that is tied to the embedding."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("deep") / "model"
    shutil.copytree(model_folder, folder)
    (folder / "model.safetensors").unlink()
    config = LlamaConfig.from_pretrained(model_folder, num_hidden_layers=4, tie_word_embeddings=True)
    torch.manual_seed(1)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture
def deep(here: Here, deep_model: Path) -> Here:
    here.model = deep_model
    return here


@pytest.fixture
def deep_cluster(cluster: Cluster, deep_model: Path) -> Cluster:
    cluster.spec["model"] = deep_model
    return cluster


def compare(cluster: Cluster, hosts: int, deep: Here, weights: str) -> None:
    """Compare a finished run on `hosts` hosts with the run of ddp in this process."""
    assert losses(cluster.run_dir()) == pytest.approx(deep.losses("ddp"), abs=1e-4)
    expected = load_file(deep.run_dir("ddp") / weights)
    for host in range(hosts):
        result = json.loads((cluster.run_dir(host) / "result.json").read_text())
        for name in ("samples", "tokens", "trained_tokens"):
            assert result[name] == deep.result("ddp")[name]
        assert result["eval_loss"] == pytest.approx(deep.result("ddp")["eval_loss"], abs=1e-4)
        found = load_file(cluster.run_dir(host) / weights)
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert_close(found[name], value, rtol=1e-3, atol=2e-4, msg=name)


def stop_at(cluster: Cluster, step: int, hosts: int, **fields: Any) -> None:
    """Start a run, and stop it some steps after `step`."""
    launchers = cluster.start(hosts, **fields)
    cluster.at_step(step)
    (cluster.run_dir() / "stop").touch()
    assert cluster.wait(launchers) == [0] * hosts, cluster.logs()
    assert step <= len(losses(cluster.run_dir())) < 30


@pytest.mark.slow
@pytest.mark.long
def test_adapters_train_as_with_ddp_and_resume_on_more_hosts(deep_cluster: Cluster, deep: Here) -> None:
    """Every host has a whole checkpoint, so a host may lose its disk."""
    assert deep("ddp", **STEPS) == 0, deep.err
    fields = STEPS | PIPELINE
    stop_at(deep_cluster, 6, 2, **fields)
    shutil.rmtree(deep_cluster.run_dir(1))
    deep_cluster.run(3, pipeline_layers="2,1,1", **fields)
    assert "pipeline: layers of rank 0: 0-1, rank 1: 2-2, rank 2: 3-3" in deep_cluster.logs()
    compare(deep_cluster, 3, deep, "adapter/adapter_model.safetensors")


@pytest.mark.slow
def test_full_weights_train_as_with_ddp_and_resume_on_other_hosts(deep_cluster: Cluster, deep: Here) -> None:
    """The head is tied to the embedding, on another host. After the first stop, the same hosts hold other layers."""
    assert deep("ddp", **STEPS, **FULL) == 0, deep.err
    fields = STEPS | FULL | PIPELINE
    stop_at(deep_cluster, 6, 2, pipeline_layers="3,1", **fields)
    stop_at(deep_cluster, 16, 2, pipeline_layers="1,3", **fields)
    assert "copying step" not in deep_cluster.logs(), "ranks receive only the layers that their host lacks"
    deep_cluster.run(3, **fields)
    compare(deep_cluster, 3, deep, "model/model.safetensors")


@pytest.mark.long
def test_full_weights_resume_after_the_permanent_loss_of_a_host(
    deep_cluster: Cluster, deep: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every host has a copy of the layers of the host before it."""
    assert deep("ddp", **STEPS, **FULL) == 0, deep.err
    monkeypatch.setenv(COPY_STAGES, "1")
    fields = STEPS | FULL | PIPELINE
    stop_at(deep_cluster, 6, 3, **fields)
    newest = max((deep_cluster.run_dir() / "checkpoints").glob("step-*")).name
    stages = [
        sorted(path.name for path in (deep_cluster.run_dir(host) / "checkpoints" / newest).glob("stage-*"))
        for host in range(3)
    ]
    assert stages == [
        [f"stage-0000{number}.safetensors" for number in sorted((host, (host + 2) % 3))] for host in range(3)
    ]
    shutil.rmtree(deep_cluster.run_dir(1))
    deep_cluster.run_dir(2).rename(deep_cluster.run_dir(1))
    deep_cluster.run(2, **fields)
    assert f"resuming from step {int(newest[5:])} of 30" in deep_cluster.logs()
    compare(deep_cluster, 2, deep, "model/model.safetensors")


@pytest.mark.long
def test_pipelines_as_replicas_of_diloco_train_as_replicas_of_one_host(deep_cluster: Cluster) -> None:
    """Two replicas of one host each, and two of two hosts each, the latter with a resume."""
    fields = STEPS | {"strategy": "diloco", "local_steps": 5, "balance": "even", "max_steps": 20}
    expected = deep_cluster.run(2, run="whole", **fields)
    fields |= {"replica_strategy": "pipeline", "replica_hosts": 2}
    launchers = deep_cluster.start(4, **fields)
    deep_cluster.at_step(10)
    (deep_cluster.run_dir() / "stop").touch()
    assert deep_cluster.wait(launchers) == [0] * 4, deep_cluster.logs()
    assert 10 <= len(losses(deep_cluster.run_dir())) < 20
    found = deep_cluster.run(4, **fields)
    assert "pipeline: 2 times layers of rank 0: " in deep_cluster.logs()
    assert found == pytest.approx(expected, abs=1e-4)
    weights = load_file(deep_cluster.run_dir(0, "whole") / "adapter" / "adapter_model.safetensors")
    for host in range(4):
        result = json.loads((deep_cluster.run_dir(host) / "result.json").read_text())
        whole = json.loads((deep_cluster.run_dir(0, "whole") / "result.json").read_text())
        assert result["tokens"] == whole["tokens"]
        assert result["eval_loss"] == pytest.approx(whole["eval_loss"], abs=1e-4)
        for name, value in load_file(deep_cluster.run_dir(host) / "adapter" / "adapter_model.safetensors").items():
            assert_close(value, weights[name], rtol=1e-3, atol=2e-4, msg=name)


@pytest.mark.slow
@pytest.mark.long
def test_pipelines_need_equal_numbers_of_hosts(deep_cluster: Cluster) -> None:
    replicas = {"strategy": "diloco", "replica_strategy": "pipeline", "replica_hosts": 2}
    launchers = deep_cluster.start(3, **STEPS, **replicas)
    assert 0 not in deep_cluster.wait(launchers)
    assert "strategy: pipelines of 2 hosts would have 2, 1 ranks, which must be equal" in deep_cluster.logs()


@pytest.mark.slow
@pytest.mark.long
def test_a_quantized_model_trains_as_with_ddp_and_resumes_with_other_layers(deep_cluster: Cluster, deep: Here) -> None:
    pytest.importorskip("bitsandbytes")
    fields = STEPS | {"quantize": "nf4"}
    assert deep("ddp", **fields) == 0, deep.err
    fields |= PIPELINE
    stop_at(deep_cluster, 6, 2, pipeline_layers="2,2", **fields)
    deep_cluster.run(3, pipeline_layers="1,1,2", **fields)
    compare(deep_cluster, 3, deep, "adapter/adapter_model.safetensors")


@pytest.mark.slow
def test_a_host_without_the_weights_stops_all_ranks(deep_cluster: Cluster, deep_model: Path) -> None:
    folders = [deep_cluster.run_dir(host).parents[1] for host in range(2)]
    for folder in folders:
        shutil.copytree(deep_model, folder / "model")
    (folders[1] / "model/model.safetensors").unlink()
    launchers = deep_cluster.start(2, **STEPS | PIPELINE | {"model": "./model"})
    assert 0 not in deep_cluster.wait(launchers)
    assert "model: ./model has no model.safetensors, which strategy=pipeline needs" in deep_cluster.logs()


def test_what_a_pipeline_cannot_do_is_refused_in_one_line(deep: Here) -> None:
    replicas, teacher = {"strategy": "diloco", "replica_strategy": "pipeline"}, {"teacher": "x/y", "distill_alpha": 0.5}
    cases: dict[str, dict[str, Any]] = {
        "optimizer: adamw8bit requires strategy ddp": {"optimizer": "adamw8bit"},
        "teacher: a pipeline cannot hold a teacher": teacher,
        "replica_strategy: pipeline requires LoRA": replicas | {"lora_r": 0},
        "pipeline cannot hold a teacher: set replica_strategy=ddp": replicas | teacher,
        "pipeline_layers: 3,1 has 2 ranks and 4 layers, but the run has 1 ranks": {"pipeline_layers": "3,1"},
        "pipeline_layers: every rank needs a layer, got 4,0": {"pipeline_layers": "4,0"},
    }
    for message, fields in cases.items():
        assert deep(**PIPELINE | fields) in (1, 2)
        assert message in deep.err and len(deep.err.strip().splitlines()) == 1, deep.err
