"""Strategies with independent replicas: diloco synchronizes every few steps, averaging once, at the end."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from peft import PeftModel
from run_hosts import free_port
from safetensors.torch import load_file
from test_fast_kernels import CAN_UNSHARE, CPU, UNSHARE_NETWORK
from test_torchrun import assert_every_sample_once, weights
from trainer_runs import TOP, WIDE, Cluster, Here, llama, undo_end
from transformers import AutoModelForCausalLM

from trainer.common.errors import UserError
from trainer.costs.cost import Layout
from trainer.data.order import Order
from trainer.distributed.world import World
from trainer.loop.train import is_due
from trainer.method.module_with_loss import ModelWithLoss
from trainer.model_files.model_shape import shape_of
from trainer.models.model import load_model
from trainer.offline import merge
from trainer.records.checkpoint import complete_checkpoints
from trainer.spec import make_spec, read_spec
from trainer.strategy import make_strategy, plan_of
from trainer.strategy.replicas import apportion, by_speed

# Equal shares: with shares by speed, the samples of a replica differ between runs.
LONG = {"epochs": 200, "max_steps": 40, "checkpoint_interval": 10, "lora_r": 8, "balance": "even"}
PAIR = [(0, 0), (1, 1)]
FOUR = [(0, 0), (0, 1), (1, 2), (1, 3)]


@given(st.integers(0, 300), st.lists(st.floats(0.05, 20), min_size=1, max_size=8))
def test_portions_are_assigned_in_proportion_to_shares(turns: int, shares: list[float]) -> None:
    assigned = Counter(apportion(turns, shares))
    for place, share in enumerate(shares):
        assert abs(assigned[place] - turns * share / sum(shares)) < len(shares)
    assert apportion(turns, [shares[0]] * len(shares)) == [turn % len(shares) for turn in range(turns)]


def test_a_slow_replica_has_fewer_portions() -> None:
    assert Counter(apportion(20, [1.0, 3.0])) == {0: 5, 1: 15}
    assert by_speed([1.0, 1.0], [0.0, 0.3]) == [1.0, 1.0], "not measured yet"
    assert by_speed([1.0, 1.0], [0.3, 0.35]) == [1.0, 1.0], "noise"
    assert by_speed([1.0, 1.0], [1.0, 0.5]) == [1.0, 2.0]
    assert by_speed([4.0, 1.0], [0.25, 1.0]) == [4.0, 1.0]


@pytest.mark.parametrize("interval", [0, 1, 3, 10, 25])
@pytest.mark.parametrize("stride", [1, 4, 10, 30])
def test_a_due_action_runs_at_the_next_sync(interval: int, stride: int) -> None:
    order = Order(np.ones(90, np.int64), seed=0, capacity=8, packing=False, epochs=4, rows=3)
    actual = [now for now in range(stride, 121, stride) if is_due(interval, now - stride, now, order)]
    wanted = {-(-step // stride) * stride for step in range(interval, 121, interval)} if interval else set()
    assert actual == sorted(step for step in wanted if step <= 120)


# One process -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_averaging_with_one_replica_equals_ddp(here: Here) -> None:
    few = {"max_steps": 6, "checkpoint_interval": 3}
    assert here("ddp", **few) == 0
    assert here("alone", strategy="averaging", **few) == 0, here.err
    assert here.losses("alone") == here.losses("ddp")
    assert weights(here.run_dir("alone")) == weights(here.run_dir("ddp"))
    (part,) = here.result("alone")["parts"]
    assert part["eval_loss"] == here.result("alone")["eval_loss"] == here.result("ddp")["eval_loss"]


@pytest.mark.slow
def test_the_outer_optimizer_is_nesterov_sgd(here: Here) -> None:
    """Compare two rounds of one replica with the formula: v = m v + g; theta -= lr (g + m v); g = theta - AdamW's result.

    m is 0.9 in rounds of 20 steps or more, and smaller in shorter rounds.
    """
    m = 0.9 * 3 / 20
    few = {"max_steps": 6, "checkpoint_interval": 3, "schedule": "constant", "warmup": 0, "checkpoint_keep": 9}
    diloco = few | {"strategy": "diloco", "comm_dtype": "32", "local_steps": 3}
    assert here("ddp", **few) == 0
    assert here("start", **(diloco | {"outer_lr": 1e-30})) == 0
    assert here("diloco", **diloco) == 0, here.err

    def trained(run: str, step: int) -> torch.Tensor:
        kept = load_file(here.run_dir(run) / "checkpoints" / f"step-{step:08d}" / "trained.safetensors")
        return torch.cat([kept[name].flatten() for name in sorted(kept)])

    theta, inner = trained("start", 3), trained("ddp", 3)
    first = theta - inner
    after = theta - 0.7 * (first + m * first)
    assert torch.allclose(trained("diloco", 3), after, atol=1e-6)
    # From the second round on, AdamW starts at the synchronized weights; the outer state contains the pseudo-gradient.
    state = torch.load(here.run_dir("diloco") / "checkpoints/step-00000006/outer.pt", weights_only=True)["optimizer"][
        "state"
    ]
    kept = load_file(here.run_dir("diloco") / "checkpoints/step-00000006/trained.safetensors")
    velocity = dict(zip(list(kept), range(len(kept)), strict=True))
    assert len(state) == len(velocity)
    last = trained("diloco", 6)
    # theta2 = theta1 - lr (g + m v), v = m g1 + g: so g = ((theta1 - theta2) / lr - m^2 g1) / (1 + m), which determines v.
    second = ((after - last) / 0.7 - m * m * first) / (1 + m)
    size = torch.cat([entry["momentum_buffer"].flatten() for entry in state.values()]).norm()
    assert float(size) == pytest.approx(float((m * first + second).norm()), rel=1e-3)


@pytest.mark.slow
def test_diloco_resumes_at_a_sync(here: Here) -> None:
    fields = {"strategy": "diloco", "local_steps": 4, "max_steps": 10, "checkpoint_interval": 3, "epochs": 2}
    assert here("straight", **fields) == 0, here.err
    # Syncs after steps 4, 8 and 10 (the end); at 8 and 10, a checkpoint was due since the previous sync.
    assert set(complete_checkpoints(here.run_dir("straight") / "checkpoints")) == {8, 10}
    kept, wanted = here.losses("straight"), weights(here.run_dir("straight"))
    undo_end(here.run_dir("straight"))
    assert here("straight", **fields) == 0, here.err
    assert "resuming from step 8 of 10" in here.out
    assert here.losses("straight") == kept and weights(here.run_dir("straight")) == wanted


def test_a_worker_resumes_only_its_own_checkpoint(model_folder: Path, tmp_path: Path) -> None:
    spec = make_spec({"model": str(model_folder), "strategy": "averaging", "seq_length": 64}, "here")
    (tmp_path / "worker.json").write_text('{"worker": 0, "workers": 2}')
    world = World.join(60)
    try:
        strategy = make_strategy(spec, world, ModelWithLoss(load_model(spec, CPU)))
        with pytest.raises(
            UserError, match="the checkpoint of this host is that of worker 1 of 2, but the host is now worker 1 of 1"
        ):
            strategy.load(tmp_path)
    finally:
        torch.distributed.destroy_process_group()


def test_fewer_rows_than_replicas_is_an_error() -> None:
    from trainer.strategy.replicas import Replicas

    class Nodes:
        node_rank, rank = 0, 0

        @staticmethod
        def gather(_: Any) -> list[int]:
            return [0, 1, 2]

    with pytest.raises(UserError, match="diloco has 3 replicas, but a step has 2 rows: set total_batch_size to 3"):
        Replicas.find(make_spec({"strategy": "diloco", "total_batch_size": 2}, ""), Nodes())  # type: ignore[arg-type]
    grouped = make_spec({"strategy": "diloco", "replica_hosts": 2}, "")
    assert Replicas.find(grouped, Nodes()).ranks == [[0, 1], [2]]  # type: ignore[arg-type]


# Hosts -------------------------------------------------------------------------------------------------------------------


def result(cluster: Cluster, run: str = "r", host: int = 0) -> dict[str, Any]:
    return json.loads((cluster.run_dir(host, run) / "result.json").read_text())


def newest(cluster: Cluster, host: int, run: str = "r") -> Path:
    folder = cluster.run_dir(host, run) / "checkpoints"
    return folder / f"step-{max(complete_checkpoints(folder)):08d}"


@pytest.mark.slow
def test_diloco_stops_resumes_and_recovers_a_lost_host(cluster: Cluster) -> None:
    fields = LONG | {"strategy": "diloco", "local_steps": 5}
    wanted = cluster.run(2, run="straight", **fields)
    assert wanted[-1] < wanted[0] and len(wanted) == 40
    assert_every_sample_once(cluster, PAIR, "straight")
    ends = [newest(cluster, host, "straight") for host in (0, 1)]
    assert (ends[0] / "trained.safetensors").read_bytes() == (ends[1] / "trained.safetensors").read_bytes()
    outer = [torch.load(end / "outer.pt", weights_only=True)["optimizer"]["state"] for end in ends]
    assert all(torch.equal(entry["momentum_buffer"], outer[1][n]["momentum_buffer"]) for n, entry in outer[0].items())
    assert (ends[0] / "optimizer.pt").read_bytes() != (ends[1] / "optimizer.pt").read_bytes(), (
        "inner states differ between replicas"
    )

    launchers = cluster.start(2, **fields)
    step = cluster.stop_between(launchers)
    assert cluster.run(2, **fields) == wanted, "bit-equal"
    assert_every_sample_once(cluster, PAIR)
    assert "checkpoint: copying" not in cluster.logs(), "inner states may differ, so nothing is copied"
    assert weights(cluster.run_dir(0)) == weights(cluster.run_dir(1)) == weights(cluster.run_dir(0, "straight"))

    # A host with an empty disk receives the inner state of its peer.
    shutil.rmtree(cluster.run_dir(1, "lost"))
    recovered = cluster.run(2, run="lost", **fields)
    assert f"checkpoint: copying step {step} to the hosts that lack it" in cluster.logs("lost")
    assert recovered[:step] == wanted[:step] and recovered[-1] == pytest.approx(wanted[-1], rel=0.03)


def whole_weights(model: str, adapter: Path) -> dict[str, torch.Tensor]:
    """Return the weights of the model with the adapter merged into them, as transformers and peft load both."""
    loaded: Any = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), str(adapter))
    return loaded.merge_and_unload().state_dict()


def mean_of_updates(
    cluster: Cluster, run: str, tokens: list[int]
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return the mean of the workers' merged weights, and the weights merged from the means of A and of B."""
    spec = read_spec(cluster.run_dir(0, run) / "spec.yml", {}, "")
    parts = [load_file(newest(cluster, host, run) / "trained.safetensors") for host in range(len(tokens))]
    shares = [count / sum(tokens) for count in tokens]
    parts.append(
        {name: sum(share * part[name] for share, part in zip(shares, parts, strict=True)) for name in parts[0]}
    )
    found = []
    for part in parts:
        model: Any = load_model(spec, CPU)
        assert not model.load_state_dict(part, strict=False).unexpected_keys
        found.append(model.merge_and_unload().state_dict())
    mean = {name: sum(share * one[name] for share, one in zip(shares, found, strict=False)) for name in found[0]}
    return mean, found[-1]


@pytest.mark.long
def test_averaging_stops_resumes_and_averages(cluster: Cluster) -> None:
    fields = LONG | {"strategy": "averaging"}
    cluster.run(2, run="straight", **fields)
    assert_every_sample_once(cluster, PAIR, "straight")
    results = [result(cluster, "straight", host) for host in (0, 1)]
    assert results[0]["eval_loss"] == results[1]["eval_loss"] and results[0]["parts"] == results[1]["parts"]
    assert results[0]["adapter_sha256"] == results[1]["adapter_sha256"]
    assert [part["ranks"] for part in results[0]["parts"]] == [[0], [1]]
    tokens = [part["trained_tokens"] for part in results[0]["parts"]]
    assert sum(tokens) == results[0]["trained_tokens"]
    assert results[0]["adapter_rank"] == 16
    assert "the adapter of 2 workers has rank 16 (lora_r 8), the exact mean" in cluster.logs("straight")
    wanted, _ = mean_of_updates(cluster, "straight", tokens)
    averaged = cluster.run_dir(0, "straight") / "adapter"
    found = whole_weights(cluster.spec["model"], averaged)
    for name, mean in wanted.items():
        torch.testing.assert_close(found[name], mean, rtol=0, atol=1e-5)
    # The adapter, loaded and merged with itself, has the loss that the run measured.
    part = {"run": "straight", "folder": str(cluster.run_dir(0, "straight"))}
    request = {"parts": [part, part | {"run": "twin"}], "method": "cat", "weights": [], "density": 0.5}
    request |= {"target": str(cluster.folder / "merged")}
    merged = merge.merge(merge.read_request(request))
    assert merged["rank"] == 2 * 16
    assert merged["eval_loss"] == pytest.approx(results[0]["eval_loss"], rel=1e-3)

    launchers = cluster.start(2, **fields)
    cluster.at_step(3)
    (cluster.run_dir(1) / "stop").touch()  # requested on one host, applied on both
    assert cluster.wait(launchers) == [0, 0], cluster.logs()
    assert [cluster.state(host, host)["status"] for host in (0, 1)] == ["stopped", "stopped"]
    assert not (cluster.run_dir() / "result.json").exists()
    assert cluster.wait(cluster.start(2, **fields)) == [0, 0], cluster.logs()
    assert_every_sample_once(cluster, PAIR)
    assert weights(cluster.run_dir(0)) == weights(cluster.run_dir(0, "straight")), "bit-equal"


@pytest.mark.slow
@pytest.mark.long
def test_averaging_to_a_lower_rank(cluster: Cluster) -> None:
    """The best approximation of rank 8 is nearer to the exact mean than the means of the factors are."""
    fields = LONG | {"strategy": "averaging", "averaging_rank": 8, "max_steps": 10}
    cluster.run(2, **fields)
    results = [result(cluster, host=host) for host in (0, 1)]
    assert results[0]["adapter_sha256"] == results[1]["adapter_sha256"]
    assert results[0]["adapter_rank"] == 8
    wanted, apart = mean_of_updates(cluster, "r", [part["trained_tokens"] for part in results[0]["parts"]])
    base = AutoModelForCausalLM.from_pretrained(cluster.spec["model"]).state_dict()

    def distance(weights: dict[str, torch.Tensor]) -> float:
        squares = [
            ((weights[name] - mean).square().sum(), (mean - base[name]).square().sum()) for name, mean in wanted.items()
        ]
        error, norm = (float(sum(values)) for values in zip(*squares, strict=True))
        return (error / norm) ** 0.5

    error = distance(whole_weights(cluster.spec["model"], cluster.run_dir(0) / "adapter"))
    assert error == pytest.approx(results[0]["averaging_error"], rel=1e-2)
    assert error < distance(apart)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize(("lora_r", "quantize"), [(8, "none"), (0, "none"), (8, "nf4")])
def test_replicas_of_several_ranks(lora_r: int, quantize: str, cluster: Cluster) -> None:
    """Two hosts of two ranks each: the outer step is across hosts; inside a host, FSDP gives the same result as DDP."""
    if quantize == "nf4":
        pytest.importorskip("bitsandbytes")
    fields = LONG | {"max_steps": 10, "local_steps": 5, "total_batch_size": 8, "strategy": "diloco", "lora_r": lora_r}
    fields |= {"checkpoint_interval": 5, "quantize": quantize}

    def digests(run: str) -> list[str]:
        return [result(cluster, run, host)["adapter_sha256" if lora_r else "model_sha256"] for host in (0, 1)]

    wanted = cluster.run(2, 2, run="ddp", **fields)
    assert_every_sample_once(cluster, FOUR, "ddp")
    assert len(set(digests("ddp"))) == 1

    fields |= {"replica_strategy": "fsdp"}
    assert cluster.run(2, 2, **fields) == pytest.approx(wanted, rel=1e-4)
    assert_every_sample_once(cluster, FOUR)
    ended = digests("r")
    assert len(set(ended)) == 1
    undo_end(*(cluster.run_dir(host) for host in (0, 1)))
    assert cluster.run(2, 2, **fields) == pytest.approx(wanted, rel=1e-4)
    assert "resuming from step 5 of 10" in cluster.logs()
    assert digests("r") == ended


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.skipif(not CAN_UNSHARE, reason="network namespaces are unavailable (unshare --net)")
def test_bytes_on_the_wire(model_folder: Path, dataset: Path, tmp_path: Path) -> None:
    """Per local_steps steps, diloco sends the bytes of one DDP step, half in 16 bits; averaging sends nothing."""
    fields = {"seq_length": 64, "total_batch_size": 4, "batch_size": 2, "lora_r": 128, "lr": 1e-2, "local_steps": 5}
    about = {"model": str(model_folder), "dataset": str(dataset), "steps": 15, "warm": 5}
    replicas: list[dict[str, str]] = [{"strategy": "diloco", "comm_dtype": wire} for wire in ("32", "bf16")]
    several = [about | {"fields": fields | more} for more in (*replicas, {"strategy": "averaging"})]
    wide = str(llama(tmp_path / "wide", model_folder, **WIDE))
    sharded_fields = fields | {"strategy": "fsdp", "lora_r": 0}
    several.append(about | {"model": wide, "fields": sharded_fields})
    launch = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"]
    launch += ["--master-addr=127.0.0.1", f"--master-port={free_port()}"]
    hosts = " & ".join(f'"$@" --node-rank={host} benchmarks/speed_one.py trainyard "$about"' for host in (1, 0))
    shell = f"ip link set lo up; about=$1; shift; {hosts}; code=$?; wait; exit $code"
    command = [*UNSHARE_NETWORK, "sh", "-c", shell, "sh", json.dumps(several), *launch]
    environment = os.environ | {"PYTHONPATH": str(TOP), "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(command, env=environment, cwd=TOP, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    full, half, none, sharded = json.loads(done.stdout.strip().splitlines()[-1])
    model = load_model(make_spec({"model": str(model_folder)} | fields, "here"), CPU)
    adapters = sum(p.numel() for p in model.parameters() if p.requires_grad)
    exact = 2 * 4 * adapters / 5  # the bytes of both hosts pass over the same lo; 2(N-1)/N is 1 for two hosts
    assert exact <= full["wire_bytes"] <= 1.02 * exact
    # These adapters are so small that the other values, such as counts, are noticeable.
    assert exact / 2 <= half["wire_bytes"] <= 1.1 * exact / 2
    assert none["wire_bytes"] < 0.01 * exact
    spec = make_spec({"model": wide} | sharded_fields, "here")
    planned = 2 * plan_of(spec).comm_bytes(spec, shape_of(spec), Layout((1, 1)), gloo=True)
    assert sharded["wire_bytes"] == pytest.approx(planned, rel=0.03), "gloo's reduce-scatter is not used"
