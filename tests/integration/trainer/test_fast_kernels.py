"""Cheaper steps: logits only for tokens with loss, 16-bit communication, 8-bit moments, a 4-bit base, faster kernels."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from run_hosts import free_port
from small_models import assert_equal_work, batch, loss_and_gradient, small_model
from trainer_runs import TOP, WIDE, Here, llama, undo_end

from trainer.common.errors import UserError
from trainer.costs.cost import Layout
from trainer.data.packing import best_fit
from trainer.method.module_with_loss import ModelWithLoss
from trainer.model_files.model_shape import shape_of
from trainer.models.model import fast_kernels, load_model
from trainer.spec import make_spec
from trainer.strategy import plan_of

CPU = torch.device("cpu")


def test_the_head_computes_only_tokens_with_loss(corpus: Any) -> None:
    model = small_model("llama", spread=0.2)
    seen: list[int] = []
    model.lm_head.register_forward_hook(lambda _, __, logits: seen.append(logits.shape[:-1].numel()))
    rows = best_fit(corpus.lengths.tolist(), 64, range(len(corpus)))
    packed = batch(corpus, rows)
    ModelWithLoss(model)(*packed)
    # The model runs without a place for its other outputs, and once with those that have a loss.
    assert seen == [0, int((packed.labels[:, 1:] != -100).sum())]


def test_a_model_without_a_head_module_has_the_same_loss(corpus: Any) -> None:
    model = small_model("llama", spread=0.2)
    rows = [[sample] for sample in range(4)]
    expected = loss_and_gradient(model, [batch(corpus, rows)])
    head, model.get_output_embeddings = model.lm_head, lambda: None
    assert head is not None
    assert_equal_work(loss_and_gradient(model, [batch(corpus, rows)]), expected)


def test_a_single_packed_row_is_exact(corpus: Any) -> None:
    """Flash attention separates the samples of a single row by their positions. sdpa does, too, and needs no GPU."""
    model = small_model("llama", spread=0.2)
    rows = best_fit(corpus.lengths.tolist(), 64, range(len(corpus)))
    expected = loss_and_gradient(model, [batch(corpus, rows)])
    module = ModelWithLoss(model)
    module._single_row = True
    module.zero_grad()
    loss = module(*batch(corpus, rows))
    loss.backward()
    gradients = [p.grad for p in module.parameters() if p.grad is not None]
    assert_equal_work((loss.detach(), gradients), expected)


def test_fast_kernels_require_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = make_spec({"precision": "bf16-mixed"}, "here")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object() if name == "liger_kernel" else None)
    assert fast_kernels(spec, CPU) == []
    assert fast_kernels(spec, torch.device("cuda", 0)) == ["liger"]
    assert fast_kernels(spec.model_copy(update={"kernels": "torch"}), torch.device("cuda", 0)) == []
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    assert fast_kernels(spec, torch.device("cuda", 0)) == ["liger", "flash attention"]
    # Flash attention does not support 32 bits.
    assert fast_kernels(make_spec({}, "here"), torch.device("cuda", 0)) == ["liger"]


@pytest.mark.parametrize("fields", [{"optimizer": "adamw8bit"}, {"quantize": "nf4"}])
def test_without_bitsandbytes(fields: dict[str, Any], here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    assert here(max_steps=1, **fields) == 1
    (name, value), *_ = fields.items()
    assert here.err.strip().splitlines()[-1].startswith(f"error: {name}: {value} needs bitsandbytes (")


def test_four_bits_need_lora() -> None:
    with pytest.raises(UserError, match="quantize: nf4 requires LoRA, got lora_r 0"):
        make_spec({"quantize": "nf4", "lora_r": 0}, "here")


@pytest.mark.slow
def test_a_quantized_run_resumes(here: Here) -> None:
    """With a 4-bit base and 8-bit moments the loss decreases, and a resumed run has the losses of an uninterrupted one."""
    pytest.importorskip("bitsandbytes")
    # bitsandbytes uses 8 bits for parameters of at least 4096 elements.
    fields = {"quantize": "nf4", "optimizer": "adamw8bit", "lora_r": 128, "checkpoint_interval": 3}
    assert here("straight", max_steps=6, **fields) == 0, here.err
    losses = here.losses("straight")
    assert losses[-1] < losses[0]
    newest = here.run_dir("straight") / "checkpoints" / "step-00000006"
    state = torch.load(newest / "optimizer.pt", weights_only=True)["optimizer"]["state"]
    moments = [entry["__bnb_optimizer_quant_state__"]["state1"] for entry in state.values()]
    assert any(moment.dtype == torch.uint8 for moment in moments)
    undo_end(here.run_dir("straight"))
    assert here("straight", max_steps=6, **fields) == 0, here.err
    assert here.losses("straight") == pytest.approx(losses, rel=1e-6)


@pytest.mark.parametrize(("precision", "rest"), [("32-true", torch.float32), ("bf16-mixed", torch.bfloat16)])
def test_the_base_is_in_four_bits(model_folder: Path, precision: str, rest: torch.dtype) -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes")
    fields = {"model": str(model_folder), "quantize": "nf4", "seq_length": 64, "precision": precision}
    model = load_model(make_spec(fields, "here"), CPU)
    packed = [m for m in model.modules() if isinstance(m, bitsandbytes.nn.Linear4bit)]
    assert packed and all(m.weight.dtype == torch.uint8 for m in packed)
    assert all(p.dtype == torch.float32 for p in model.parameters() if p.requires_grad)
    frozen = {p.dtype for p in model.parameters() if not p.requires_grad}
    assert frozen == {torch.uint8, rest}, "the embedding and the norms"


# In a separate network namespace, the counters include only this run.
UNSHARE_NETWORK = ["unshare", "--user", "--map-root-user", "--net"]
CAN_UNSHARE = (
    subprocess.run([*UNSHARE_NETWORK, "ip", "link", "set", "lo", "up"], capture_output=True, check=False).returncode
    == 0
)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.skipif(not CAN_UNSHARE, reason="network namespaces are unavailable (unshare --net)")
def test_bytes_on_the_wire(model_folder: Path, dataset: Path, tmp_path: Path) -> None:
    """Per step and rank, DDP sends 4 B x adapter parameters x 2(N-1)/N, and half of that in bf16; FSDP sends the planned bytes."""
    fields: dict[str, Any] = {"seq_length": 64, "total_batch_size": 4, "batch_size": 2, "lora_r": 128, "lr": 1e-2}
    about = {"model": str(model_folder), "dataset": str(dataset), "steps": 8}
    variants: list[dict[str, Any]] = [{"comm_dtype": wire} for wire in ("32", "bf16")]
    several = [about | {"fields": fields | variant} for variant in variants]
    wide = str(llama(tmp_path / "wide", model_folder, **WIDE))
    variants = [{}, {"lora_r": 0}, *([{"quantize": "nf4"}] if importlib.util.find_spec("bitsandbytes") else [])]
    sharded_fields = [fields | {"strategy": "fsdp"} | variant for variant in variants]
    several += [about | {"model": wide, "fields": each} for each in sharded_fields]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--master-addr=127.0.0.1"]
    torchrun += [f"--master-port={free_port()}", str(TOP / "benchmarks/speed_one.py"), "trainyard"]
    command = [*UNSHARE_NETWORK, "sh", "-c", 'ip link set lo up && exec "$@"', "sh", *torchrun, json.dumps(several)]
    environment = os.environ | {"PYTHONPATH": str(TOP), "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    full, half, *sharded = json.loads(done.stdout.strip().splitlines()[-1])
    model = load_model(make_spec({"model": str(model_folder)} | fields, "here"), CPU)
    adapters = sum(p.numel() for p in model.parameters() if p.requires_grad)
    exact = 2 * 4 * adapters  # the bytes of both ranks pass over the same lo; 2(N-1)/N is 1 for two ranks
    assert exact <= full["wire_bytes"] <= 1.02 * exact
    assert exact / 2 <= half["wire_bytes"] <= 1.02 * exact / 2
    assert half["loss"] == pytest.approx(full["loss"], rel=1e-3)
    for each, found in zip(sharded_fields, sharded, strict=True):
        spec = make_spec({"model": wide} | each, "here")
        planned = 2 * plan_of(spec).comm_bytes(spec, shape_of(spec), Layout((2,)), gloo=True)
        assert found["wire_bytes"] == pytest.approx(planned, rel=0.03), each
