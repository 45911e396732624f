"""FSDP and ZeRO under real torchrun: their losses equal those of DDP, also after a kill and on another number of hosts."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor
from trainer_runs import Cluster, Here, losses, undo_end
from transformers import AutoModelForCausalLM, PreTrainedModel

from trainer.common.files import sha256_file
from trainer.distributed.world import World
from trainer.records.checkpoint import HostCheckpoint, _in_place, _owners, complete_checkpoints
from trainer.spec import make_spec
from trainer.strategy import plan_of
from trainer.strategy.base import Batch
from trainer.strategy.fsdp import FSDP

# Two hosts have 2 and 3 rows: one micro-batch and two.
UNEVEN = {"total_batch_size": 5, "batch_size": 2}
FULL = {"lora_r": 0, "lr": 3e-3}
STEPS = {"epochs": 200, "max_steps": 30, "checkpoint_interval": 5}


@pytest.fixture(scope="module")
def curves(tmp_path_factory: pytest.TempPathFactory, model_folder: Path, dataset: Path) -> Iterator[Cluster]:
    """The same runs with ddp: one with LoRA, one with full weights."""
    spec = {"model": model_folder, "dataset": dataset, "seq_length": 64, "lr": 1e-2, "loggers": "none"}
    made = Cluster(tmp_path_factory.mktemp("curves"), spec | UNEVEN | STEPS)
    made.run(1, run="lora")
    made.run(1, run="full", **FULL)
    yield made
    made.end()


# name: fields, number of hosts after the kill, whether the second host has lost its run folder
CASES: dict[str, tuple[dict[str, Any], int, bool]] = {
    "fsdp": ({"strategy": "fsdp"}, 2, True),
    "fsdp, full weights, sharded": ({"strategy": "fsdp"} | FULL, 2, False),
    "fsdp, full weights, more hosts": ({"strategy": "fsdp"} | FULL, 3, False),
    "zero 2": ({"strategy": "deepspeed", "deepspeed_offload": "optimizer"}, 1, True),
    "zero 2, full weights": ({"strategy": "deepspeed"} | FULL, 2, False),
    "zero 3, full weights": ({"strategy": "deepspeed", "deepspeed_stage": 3, "deepspeed_offload": "all"} | FULL, 2, False),
}  # fmt: skip
# Among them are both strategies, LoRA and full weights, a lost folder, and another number of hosts; the others are nightly.
FEW = ("fsdp, full weights, more hosts", "zero 2")


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [case if case in FEW else pytest.param(case, marks=pytest.mark.long) for case in CASES]
)
def test_a_killed_run_resumes_with_the_losses_of_ddp(case: str, cluster: Cluster, curves: Cluster) -> None:
    fields, hosts, lost = CASES[case]
    if fields["strategy"] == "deepspeed":
        pytest.importorskip("deepspeed", reason="the deepspeed extra is not installed")
    full = "lora_r" in fields
    fields = UNEVEN | STEPS | fields
    launchers = cluster.start(2, **fields)
    cluster.at_step(17)
    launchers[0].kill()
    assert all(cluster.wait(launchers)), cluster.logs()
    assert len(losses(cluster.run_dir())) < 30, "the kill was before the end"
    kept = [complete_checkpoints(cluster.run_dir(host) / "checkpoints") for host in (0, 1)]
    assert max(kept[0]) >= 10 and {**kept[0], **kept[1]} == {**kept[1], **kept[0]}
    if lost:
        shutil.rmtree(cluster.run_dir(1))
    resumed = cluster.run(hosts, **fields)
    assert "resuming from step" in (cluster.run_dir() / "logs" / "rank0.log").read_text()
    assert resumed == pytest.approx(losses(curves.run_dir(0, "full" if full else "lora")), abs=1e-3)
    weights = "model/model.safetensors" if full else "adapter/adapter_model.safetensors"
    assert len({sha256_file(cluster.run_dir(host) / weights) for host in range(hosts)}) == 1
    results = [json.loads((cluster.run_dir(host) / "result.json").read_text()) for host in range(hosts)]
    assert len({result["eval_loss"] for result in results}) == 1


@pytest.mark.slow
def test_layers_that_stay_gathered_give_the_losses_of_ddp(cluster: Cluster, curves: Cluster) -> None:
    fields = UNEVEN | STEPS | FULL | {"sharding_strategy": "SHARD_GRAD_OP", "eval_interval": 7}
    found = cluster.run(2, **fields)
    assert "fsdp_shard: gradients" in (cluster.run_dir() / "spec.yml").read_text()
    assert found == pytest.approx(losses(curves.run_dir(0, "full")), abs=1e-3)
    results = [
        json.loads((each / "result.json").read_text()) for each in (cluster.run_dir(), curves.run_dir(0, "full"))
    ]
    assert results[0]["eval_loss"] == pytest.approx(results[1]["eval_loss"], abs=1e-3)


@pytest.mark.slow
@pytest.mark.long
def test_fsdp_shard_host_has_a_full_checkpoint_on_every_host(cluster: Cluster, curves: Cluster) -> None:
    fields = UNEVEN | STEPS | {"strategy": "fsdp", "fsdp_shard": "host", "checkpoint_keep": 1} | FULL
    assert cluster.run(2, 2, **fields) == pytest.approx(losses(curves.run_dir(0, "full")), abs=1e-3)
    kept = [HostCheckpoint.read(cluster.run_dir(host) / "checkpoints" / "step-00000030") for host in (0, 1)]
    assert kept[0].here == kept[1].here and not kept[0].elsewhere
    assert {"__0_0.distcp", "__1_0.distcp", ".metadata"} < set(kept[0].here)


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["fsdp", "pipeline"])
def test_one_rank_trains_as_ddp(strategy: str, here: Here) -> None:
    few = {"max_steps": 4, "checkpoint_interval": 2}
    half = {"precision": "bf16-mixed", "gradient_checkpointing": True}
    for name, fields in {"lora": {}, "full": {"lora_r": 0}, "half": half, "full half": half | {"lora_r": 0}}.items():
        run = name.replace(" ", "-")
        assert here(f"{run}-ddp", **few, **fields) == 0, here.err
        assert here(run, strategy=strategy, **few, **fields) == 0, here.err
        # FSDP also gathers the norms of a block in bfloat16, which autocast does not.
        close = {"rel": 1e-3} if strategy == "fsdp" and "half" in name else {"abs": 1e-5}
        assert here.losses(run) == pytest.approx(here.losses(f"{run}-ddp"), **close)
        assert here.result(run)["eval_loss"] == pytest.approx(here.result(f"{run}-ddp")["eval_loss"], **close)


@pytest.mark.slow
@pytest.mark.parametrize("lora", [16, pytest.param(0, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    "fields",
    [
        {"strategy": "fsdp", "precision": "fp16-mixed"},
        {"strategy": "fsdp", "fsdp_offload": True, "max_grad_norm": 0.5},
        {"strategy": "pipeline", "precision": "fp16-mixed"},
        pytest.param({"strategy": "deepspeed", "precision": "fp16-mixed"}, marks=pytest.mark.long),
        pytest.param(
            {"strategy": "deepspeed", "deepspeed_stage": 3, "precision": "fp16-mixed"}, marks=pytest.mark.long
        ),
    ],
    ids=["fp16", "offload", "pipeline fp16", "zero 2 fp16", "zero 3 fp16"],
)
def test_sharded_ranks_train_as_ddp(fields: dict[str, Any], lora: int, cluster: Cluster, here: Here) -> None:
    """Two ranks, a checkpoint and a resume. fp16 skips the same first steps on both, until its factor of the loss fits."""
    if fields["strategy"] == "deepspeed":
        pytest.importorskip("deepspeed", reason="the deepspeed extra is not installed")
    train_as_ddp(cluster, here, 2e-3 if "precision" in fields else 1e-4, **fields, lora_r=lora)


@pytest.mark.long
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"precision": "bf16-mixed", "fsdp_shard": "gradients"},
        {"fsdp_offload": True, "gradient_checkpointing": True},
    ],
    ids=["float32", "bfloat16, gathered", "offload"],
)
def test_fsdp_shards_weights_in_4_bits(fields: dict[str, Any], cluster: Cluster, here: Here) -> None:
    """Adapters beside them are gathered in float32. In bfloat16, the losses depend on the number of ranks with ddp too."""
    pytest.importorskip("bitsandbytes")
    train_as_ddp(cluster, here, 1e-3 if "precision" in fields else 1e-6, strategy="fsdp", quantize="nf4", **fields)


def train_as_ddp(cluster: Cluster, here: Here, close: float, **fields: Any) -> None:
    """Compare two ranks, which resume from a checkpoint, with ddp on one. `close`: relative difference of the losses."""
    few = UNEVEN | {"checkpoint_interval": 3, "lr": 1e-3, "epochs": 9} | fields
    ddp = {name: value for name, value in few.items() if not name.startswith(("strategy", "fsdp", "deepspeed"))}
    assert here("ddp", **ddp, max_steps=6) == 0, here.err
    cluster.run(2, **few, max_steps=6)
    undo_end(*(cluster.run_dir(host) for host in (0, 1)))
    found = cluster.run(2, **few, max_steps=6)
    assert "resuming from step 3 of 6" in cluster.logs()
    assert found == pytest.approx(here.losses("ddp"), rel=close)
    result = json.loads((cluster.run_dir() / "result.json").read_text())
    assert result["eval_loss"] == pytest.approx(here.result("ddp")["eval_loss"], rel=2e-3)


@pytest.mark.slow
@pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="torch.compile needs a C++ compiler")
@pytest.mark.parametrize(
    "fields",
    [
        pytest.param(
            FULL | {"gradient_checkpointing": True, "eval_split": 0}, marks=pytest.mark.long, id="full weights"
        ),
        pytest.param({}, marks=pytest.mark.long, id="lora"),
        pytest.param(FULL | {"fsdp_shard": "gradients"}, marks=pytest.mark.long, id="gathered"),
        pytest.param({"fsdp_offload": True}, marks=pytest.mark.long, id="offload"),
    ],
)
def test_compiled_layers_of_fsdp_have_the_losses_of_layers_that_are_not(
    fields: dict[str, Any], cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks with as many rows each, so that at most two forms of a layer are compiled: to train and to evaluate."""
    few = {"strategy": "fsdp", "batch_size": 2, "total_batch_size": 4, "balance": "even", "max_steps": 4} | fields
    plain = cluster.run(2, run="plain", **few)
    cache = tmp_path / "inductor"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(cache))
    assert cluster.run(2, run="compiled", torch_compile=True, **few) == pytest.approx(plain, abs=1e-5)
    assert list(cache.rglob("*.so")), "something was compiled"
    results = [json.loads((cluster.run_dir(0, run) / "result.json").read_text()) for run in ("plain", "compiled")]
    assert (results[1]["eval_loss"] or 0) == pytest.approx(results[0]["eval_loss"] or 0, abs=1e-5)


def test_layers_that_stay_gathered_are_freed_after_an_evaluation(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    sharded: list[bool] = []

    def loss(self: FSDP, batch: Batch, compute: Any = FSDP.loss) -> torch.Tensor:
        value: torch.Tensor = compute(self, batch)
        layers = [part for part in self.model.modules() if type(part).__name__.endswith("DecoderLayer")]
        sharded.extend(isinstance(weight, DTensor) for layer in layers for weight in layer.parameters())
        return value

    monkeypatch.setattr(FSDP, "loss", loss)
    assert here(strategy="fsdp", fsdp_shard="gradients", max_steps=1, **FULL) == 0, here.err
    assert sharded and all(sharded)


@pytest.mark.slow
def test_a_sharded_model_is_written_in_parts(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only one part's weights are in memory at a time. transformers reads the parts as the model of ddp."""
    few = {"max_steps": 2, "lora_r": 0, "lr": 1e-3}
    assert here("ddp", **few) == 0, here.err
    monkeypatch.setattr("trainer.loop.final_export.EXPORT_PART", 20_000)
    held: list[int] = []
    monkeypatch.setattr(
        "transformers.PreTrainedModel.save_pretrained",
        lambda self, folder, state_dict, save=PreTrainedModel.save_pretrained: (
            held.append(sum(value.nbytes for value in state_dict.values())),
            save(self, folder, state_dict=state_dict),
        ),
    )
    for strategy in ("fsdp", "pipeline"):
        held.clear()
        assert here(strategy, strategy=strategy, **few) == 0, here.err
        folder = here.run_dir(strategy) / "model"
        parts = sorted(folder.glob("*.safetensors"))
        assert len(parts) == len(held) > 3 and parts[-1].name == f"model-{len(held):05d}-of-{len(held):05d}.safetensors"
        largest = max(value.nbytes for part in parts for value in load_file(part).values())
        assert max(held) <= max(20_000, largest)
        expected = AutoModelForCausalLM.from_pretrained(here.run_dir("ddp") / "model").state_dict()
        found = AutoModelForCausalLM.from_pretrained(folder).state_dict()
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5, msg=name)
        assert here.result(strategy)["model_sha256"] and not list(folder.glob(".part*"))


@pytest.mark.slow
def test_half_precision_weights_train_as_with_ddp(here: Here, tmp_path: Path) -> None:
    """FSDP loads the weights in the precision of the model's files and converts its shard as ddp converts all weights."""
    half = tmp_path / "half"
    shutil.copytree(here.model, half)
    AutoModelForCausalLM.from_pretrained(here.model, dtype=torch.bfloat16).save_pretrained(half)
    here.model = half
    spec = make_spec({"model": str(half), "strategy": "fsdp", "seq_length": 64}, "here")
    full = spec.model_copy(update={"lora_r": 0})
    module = plan_of(spec).load_module(full, World(0, 1, 0, 0, torch.device("cpu")))
    assert {parameter.dtype for parameter in module.parameters()} == {torch.bfloat16}
    few = {"max_steps": 4, "checkpoint_interval": 2}
    for name, fields in {"lora": {}, "full": {"lora_r": 0}, "mixed": {"precision": "bf16-mixed"}}.items():
        for strategy in ("ddp", "fsdp"):
            assert here(f"{name}-{strategy}", strategy=strategy, **few, **fields) == 0, here.err
        assert here.losses(f"{name}-fsdp") == pytest.approx(here.losses(f"{name}-ddp"), rel=1e-3)
    exported = load_file(here.run_dir("full-fsdp") / "model" / "model.safetensors")
    assert {value.dtype for value in exported.values()} == {torch.float32}


@pytest.mark.slow
@pytest.mark.parametrize("lora", [0, pytest.param(16, marks=pytest.mark.long)])
def test_a_rank_of_zero_3_reads_only_its_shard(lora: int, cluster: Cluster, here: Here, tmp_path: Path) -> None:
    """The files of each host have no numbers where the shard of the other rank is. The run stops and resumes."""
    pytest.importorskip("deepspeed", reason="the deepspeed extra is not installed")
    half = tmp_path / "half"
    shutil.copytree(here.model, half)
    AutoModelForCausalLM.from_pretrained(here.model, dtype=torch.bfloat16).save_pretrained(half)
    here.model = half
    few = UNEVEN | {"lora_r": lora, "lr": 1e-3, "max_steps": 6, "checkpoint_interval": 3, "packing": False, "epochs": 9}
    assert here("ddp", **few) == 0, here.err
    for rank in (0, 1):
        folder = cluster.run_dir(rank).parents[1] / "model"
        shutil.copytree(half, folder)
        tensors = load_file(folder / "model.safetensors")
        for value in tensors.values():
            size = math.ceil(value.numel() / 2)
            value.view(-1)[slice(size, None) if rank == 0 else slice(size)] = math.nan
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    fields = few | {"strategy": "deepspeed", "deepspeed_stage": 3, "model": "./model"}
    assert cluster.run(2, **fields) == pytest.approx(here.losses("ddp"), rel=1e-3)
    undo_end(*(cluster.run_dir(host) for host in (0, 1)))
    assert cluster.run(2, **fields) == pytest.approx(here.losses("ddp"), rel=1e-3)
    assert "resuming from step 3 of 6" in cluster.logs()
    result = json.loads((cluster.run_dir() / "result.json").read_text())
    assert result["eval_loss"] == pytest.approx(here.result("ddp")["eval_loss"], rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields", [{}, {"lora_r": 0}, {"fsdp_shard": "gradients"}], ids=["adapter", "sharded", "gathered"]
)
def test_fsdp_resumes_bit_equal(fields: dict[str, Any], here: Here) -> None:
    fields = {"strategy": "fsdp", "max_steps": 6, "checkpoint_interval": 3} | fields
    assert here("straight", **fields) == here(**fields) == 0, here.err
    undo_end(here.run_dir())
    assert here(**fields) == 0, here.err
    assert "resuming from step 3 of 6" in here.out
    assert here.losses() == here.losses("straight")


# Sharded checkpoints, as find_checkpoint sees them ----------------------------------------------------------------------

ALL = {name: {"bytes": 1, "sha256": name} for name in ("state.json", "part0", "part1")}


def part(rank: int) -> HostCheckpoint:
    """Return the part of a sharded checkpoint on the host of `rank`, one of two."""
    here = {name: about for name, about in ALL.items() if name in ("state.json", f"part{rank}")}
    return HostCheckpoint(here, {name: about for name, about in ALL.items() if name not in here}, (rank,))


def test_parts_form_one_checkpoint() -> None:
    assert part(0).digest == part(1).digest == HostCheckpoint(ALL, {}, ()).digest
    assert _owners([part(0), part(1)]) == {"state.json": 0, "part0": 0, "part1": 1}
    assert _owners([None, part(0), None]) == {"state.json": 1, "part0": 1, "part1": None}, "a part is missing"


@pytest.mark.parametrize(
    ("holders", "in_place"),
    [
        ([part(0), part(1)], True),
        ([part(1), part(0)], False),
        ([part(0), part(1), None], False),
        ([part(0), part(1), part(1)], False),
        ([HostCheckpoint(ALL, {}, ())] * 3, True),
        ([HostCheckpoint(ALL, {}, (0, 1)), None], False),
    ],
)
def test_every_host_has_its_part(holders: list[HostCheckpoint | None], in_place: bool) -> None:
    assert _in_place(holders) == in_place
