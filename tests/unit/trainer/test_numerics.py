"""Numerics: packing is exact, and the distribution of rows over ranks does not change the gradient."""

import copy
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from small_models import MODELS, SMALL, assert_equal_work, batch, loss_and_gradient, small_model
from torch import nn
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensorMode
from transformers import AutoConfig, AutoModelForCausalLM

from trainer.data.corpus import Corpus
from trainer.data.packing import best_fit, collate
from trainer.data.shares import micro_batches, share
from trainer.distributed.world import World
from trainer.method.method_base import Batch, arranged
from trainer.method.module_with_loss import ModelWithLoss
from trainer.models.model import isolates_packed_samples, load_model
from trainer.models.optim import learning_rate, make_optimizer
from trainer.spec import make_spec
from trainer.strategy import make_strategy

CPU = torch.device("cpu")
ALONE = World(0, 1, 0, 0, CPU)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", list(MODELS))
def test_packed_is_separate(kind: str, attention: str, corpus: Corpus) -> None:
    model = small_model(kind, attention, spread=0.2)
    rows = best_fit(corpus.lengths.tolist(), 64, range(len(corpus)))
    assert max(map(len, rows)) >= 3 and len(rows) >= 4
    separate = loss_and_gradient(model, [batch(corpus, [[sample]]) for sample in range(len(corpus))])
    assert_equal_work(loss_and_gradient(model, [batch(corpus, rows)]), separate)
    assert_equal_work(loss_and_gradient(model, [batch(corpus, [row], 80) for row in rows]), separate)


def test_the_loss_is_that_of_transformers(corpus: Corpus) -> None:
    model = small_model("llama", spread=0.2)
    one = batch(corpus, [[3]])
    ours = ModelWithLoss(model)(*one) / (one.labels != -100).sum()
    torch.testing.assert_close(ours, model(input_ids=one.ids, labels=one.labels).loss, rtol=1e-6, atol=0)


# Models that change the output of their head are among them.
HEADS: dict[str, dict[str, Any]] = MODELS | {
    "gemma2": SMALL | {"intermediate_size": 64, "head_dim": 8, "final_logit_softcapping": 2.0},
    "cohere": SMALL | {"intermediate_size": 64, "logit_scale": 0.3, "pad_token_id": 0, "eos_token_id": 1},
    "granite": SMALL | {"intermediate_size": 64, "logits_scaling": 3.0},
}


# Gemma's numbers exceed the range of float16.
@pytest.mark.parametrize(
    ("kind", "half"),
    [
        (kind, half)
        for kind in HEADS
        for half in ("none", "bfloat16", "float16")
        if (kind, half) != ("gemma2", "float16")
    ],
)
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_the_loss_in_chunks_is_that_of_transformers(
    kind: str, lora: bool, half: str, corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(3)
    config = AutoConfig.for_model(kind, **HEADS[kind], initializer_range=0.2)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    if lora:
        targets = ["c_attn", "lm_head"] if kind == "gpt2" else ["q_proj", "lm_head"]
        model = get_peft_model(model, LoraConfig(target_modules=targets, init_lora_weights=False))
    one = batch(corpus, [[3]])
    monkeypatch.setattr("trainer.models.chunked_loss.LOSS_CHUNK", 7 * 256)
    module = ModelWithLoss(model)
    found = []
    for loss_of in (
        lambda: module(*one) / (one.labels != -100).sum(),
        lambda: model(input_ids=one.ids, labels=one.labels).loss,
    ):
        model.zero_grad()
        with torch.autocast("cpu", getattr(torch, half, torch.bfloat16), enabled=half != "none"):
            loss = loss_of()
        (loss * 1024).backward()  # as the scale of fp16
        found.append((loss.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None]))
    if half == "none":
        assert_equal_work(*found)
        return
    assert len(found[0][1]) == len(found[1][1])
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-3, atol=0)
    for mine, other in zip(found[0][1], found[1][1], strict=True):
        assert float((mine - other).norm()) <= 0.03 * float(other.norm())


@pytest.mark.parametrize("lora", [True, False])
def test_a_compiled_model_has_its_loss_in_chunks(lora: bool, corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its decoder is compiled, and what follows sees seven places at a time."""
    model: Any = small_model("llama").train()
    if lora:
        model = get_peft_model(model, LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    one = batch(corpus, [[3]])
    wanted = (one.labels != -100).sum() * model(input_ids=one.ids, labels=one.labels).loss
    wanted.backward()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    compiled, entropy = torch.compile, torch.nn.functional.cross_entropy
    sizes: list[int] = []
    graphs: list[Any] = []

    def counted(logits: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        sizes.append(len(logits))
        return entropy(logits, *args, **options)

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr("trainer.models.chunked_loss.LOSS_CHUNK", 7 * 256)
    monkeypatch.setattr("torch.nn.functional.cross_entropy", counted)
    monkeypatch.setattr("torch.compile", lambda function: compiled(function, backend=backend))
    module = ModelWithLoss(model, compiled=True)
    for _ in range(2):
        model.zero_grad()
        loss = module(*one)
        loss.backward()
        torch.testing.assert_close(loss, wanted)
        torch.testing.assert_close([p.grad for p in model.parameters() if p.grad is not None], gradients)
    model(input_ids=one.ids[:, :3])
    assert len(graphs) == 1, "the second pass uses the graph again, and passes of others are not compiled"
    assert len(sizes) > 2 and max(sizes) <= 7


def test_a_pass_reads_nothing_from_the_device(corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors without numbers refuse what would wait for a device: a size or a branch that depends on its numbers."""
    monkeypatch.setattr("trainer.models.chunked_loss.LOSS_CHUNK", 7 * 256)
    given = arranged(collate(corpus, [[3, 4], [5]], pad=0, length=None), torch.from_numpy)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **MODELS["llama"])).train()
        module = ModelWithLoss(model)
        given = Batch(*(value if value is None else mode.from_tensor(value) for value in given))
        module(*given).backward()
        with pytest.raises(DynamicOutputShapeException):
            module(*given._replace(places=None))


@pytest.mark.parametrize("kind", list(MODELS))
@pytest.mark.parametrize("spread", [0.02, 0.2])
def test_models_that_isolate_packed_samples_pass_the_check(kind: str, spread: float) -> None:
    model = small_model(kind, spread=spread).train()
    assert isolates_packed_samples(model, 256)
    assert isolates_packed_samples(model.to(torch.bfloat16), 256)
    assert model.training


class Mixing(nn.Module):
    """A model that ignores positions, so that samples of a row attend to each other, as without packing support."""

    def __init__(self, inner: Any, amount: float = 1.0) -> None:
        super().__init__()
        self.inner, self.amount = inner, amount

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor, use_cache: bool) -> Any:
        # Consecutive positions: the second sample attends to the first.
        straight = torch.arange(input_ids.shape[1])[None]
        return self.inner(input_ids=input_ids, position_ids=straight, use_cache=False)


@pytest.mark.parametrize("kind", list(MODELS))
@pytest.mark.parametrize("spread", [0.02, 0.2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_models_that_mix_samples_fail_the_check(kind: str, spread: float, dtype: torch.dtype) -> None:
    assert not isolates_packed_samples(Mixing(small_model(kind, spread=spread).to(dtype)), 256)


@pytest.mark.parametrize("shares", [[1], [1, 1], [3, 1], [1, 2, 4], [0, 1]])
@pytest.mark.parametrize("micro", [1, 2, 5])
def test_any_shares_give_one_gradient(shares: list[int], micro: int, corpus: Corpus, model_folder: Any) -> None:
    """Also with micro-batches of another size on each rank."""
    spec = make_spec({"seq_length": 64, "model": str(model_folder), "lora_r": 4}, "")
    rows = best_fit(corpus.lengths.tolist(), 64, range(len(corpus)))
    tokens = int(corpus.trained_counts().sum())
    model = load_model(spec, CPU)
    torch.manual_seed(5)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    reference = loss_and_gradient(copy.deepcopy(model), [batch(corpus, rows)])
    total, gradients = torch.zeros(()), None
    for rank in range(len(shares)):
        strategy = make_strategy(spec, ALONE, ModelWithLoss(copy.deepcopy(model)))
        parts = micro_batches(rows[share(len(rows), shares, rank)], micro + rank)
        for place, part in enumerate(parts):
            total += strategy.backward(batch(corpus, part), tokens, last=place == len(parts) - 1)
        mine = [p.grad * tokens for p in strategy.plain.parameters() if p.requires_grad]
        gradients = mine if gradients is None else [a + b for a, b in zip(gradients, mine, strict=True)]
    assert_equal_work((total, gradients or []), reference)


def test_a_step_clips_and_returns_the_norm_before_clipping(corpus: Corpus, model_folder: Any) -> None:
    norms = {}
    for limit in (0.0, 1e-3):
        spec = make_spec({"seq_length": 64, "model": str(model_folder), "lora_r": 4, "max_grad_norm": limit}, "")
        strategy = make_strategy(spec, ALONE, ModelWithLoss(load_model(spec, CPU)))
        strategy.backward(batch(corpus, [[0, 1]]), int(corpus.trained_counts()[:2].sum()), last=True)
        seen: list[float] = []
        trained = [p for p in strategy.plain.parameters() if p.requires_grad]
        hook = strategy.optimizer.register_step_pre_hook(  # type: ignore[attr-defined]
            lambda *_, trained=trained, seen=seen: seen.append(
                float(torch.cat([p.grad.flatten() for p in trained]).norm())
            )
        )
        norms[limit] = strategy.step(1e-3), seen[0]
        hook.remove()
        assert all(float(p.grad.abs().max()) == 0 for p in trained), "gradients are cleared for the next step"
    assert norms[0.0][0] == pytest.approx(norms[0.0][1], rel=1e-5)
    assert norms[1e-3][0] == pytest.approx(norms[0.0][0], rel=1e-5)
    assert norms[1e-3][1] == pytest.approx(1e-3, rel=1e-2)


def test_trained_weights_are_float32_and_a_frozen_base_is_not_in_the_optimizer(model_folder: Any) -> None:
    spec = make_spec({"seq_length": 64, "model": str(model_folder), "precision": "bf16-mixed"}, "")
    model = load_model(spec, CPU)
    kinds = {p.requires_grad: p.dtype for p in model.parameters()}
    assert kinds == {True: torch.float32, False: torch.bfloat16}
    optimizer = make_optimizer(spec, model.parameters())
    assert all("lora" in name for name, p in model.named_parameters() if p.requires_grad)
    count = sum(p.requires_grad for p in model.parameters())
    assert sum(len(group["params"]) for group in optimizer.param_groups) == count
    full = load_model(
        make_spec({"seq_length": 64, "model": str(model_folder), "precision": "bf16-mixed", "lora_r": 0}, ""), CPU
    )
    assert {(p.requires_grad, p.dtype) for p in full.parameters()} == {(True, torch.float32)}


def test_new_adapters_are_equal_on_every_rank(model_folder: Any) -> None:
    spec = make_spec({"seq_length": 64, "model": str(model_folder)}, "")
    torch.rand(7)
    one = load_model(spec, CPU).state_dict()
    torch.rand(3)
    two = load_model(spec, CPU).state_dict()
    assert all(torch.equal(one[name], two[name]) for name in one)
    other = load_model(make_spec({"seq_length": 64, "model": str(model_folder), "seed": 2}, ""), CPU).state_dict()
    assert not all(torch.equal(one[name], other[name]) for name in one)


# The learning rate and the weight decay ------------------------------------------------------------------------------


def curve(steps: int, **fields: Any) -> list[float]:
    spec = make_spec({"model": "m", "lr": 1.0} | fields, "")
    return [learning_rate(spec, step, steps) for step in range(steps)]


@pytest.mark.parametrize("warmup", [10, 0.1], ids=["steps", "share"])
def test_warmup_then_decay(warmup: float) -> None:
    cosine, linear, flat = (curve(100, warmup=warmup, schedule=name) for name in ("cosine", "linear", "constant"))
    for values in (cosine, linear, flat):
        assert values[:10] == pytest.approx([0.1 * (step + 1) for step in range(10)])
    assert flat[9:] == [1.0] * 91
    assert linear[9:] == pytest.approx([1 - place / 91 for place in range(91)])
    assert cosine[54] == pytest.approx(0.5, abs=0.02), "half of the peak"
    assert 0 < cosine[-1] < linear[-1] < 0.02


@given(
    st.integers(1, 300),
    st.sampled_from(["cosine", "linear", "constant"]),
    st.floats(0, 0.999) | st.integers(0, 400).map(float),
)
def test_the_rate_is_positive_and_never_above_the_peak(steps: int, schedule: str, warmup: float) -> None:
    values = curve(steps, schedule=schedule, warmup=warmup)
    assert all(0 < value <= 1 + 1e-12 for value in values)
    peak = values.index(max(values))
    assert values[:peak] == sorted(values[:peak])
    assert values[peak:] == sorted(values[peak:], reverse=True)


def test_weight_decay_applies_to_trained_matrices() -> None:
    part = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4))
    part[2].requires_grad_(False)
    optimizer = make_optimizer(make_spec({"weight_decay": 0.1}, ""), part.parameters())
    assert [(len(group["params"]), group["weight_decay"]) for group in optimizer.param_groups] == [(1, 0.1), (3, 0.0)]


def test_decay_applies_without_a_gradient() -> None:
    part = nn.Linear(2, 2)
    before = part.weight.detach().clone(), part.bias.detach().clone()
    optimizer = make_optimizer(make_spec({"weight_decay": 0.5, "lr": 0.1}, ""), part.parameters())
    for parameter in part.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    assert torch.allclose(part.weight, before[0] * 0.95)
    assert torch.equal(part.bias, before[1])
