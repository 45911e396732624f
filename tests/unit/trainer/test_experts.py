"""Models with experts: where adapters go, and the auxiliary loss of their config; and samples whose rotary embedding depends on their length."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tables import table
from transformers import AutoConfig, AutoModelForCausalLM, FalconConfig, FalconForCausalLM

from trainer.common.errors import UserError
from trainer.data.packing import lay_out
from trainer.method import Batch
from trainer.method.method_base import arranged
from trainer.method.module_with_loss import ModelWithLoss
from trainer.models.model import add_lora, isolates_packed_samples
from trainer.models.router_loss import RouterLoss
from trainer.spec import make_spec

SIZES = table("experts")["sizes"]
OTHERS: dict[str, dict[str, Any]] = table("experts")["others"]  # every second layer of qwen3_moe is dense


def model_of(kind: str, **more: Any) -> Any:
    torch.manual_seed(1)
    config = AutoConfig.for_model(kind, **SIZES | OTHERS.get(kind, {}) | more)
    return AutoModelForCausalLM.from_config(config)


def adapted(kind: str, **fields: Any) -> tuple[set[str], str]:
    """Return the names of the matrices with an adapter, without the numbers of layers, and what the run says of others."""
    spec = make_spec({"lora_r": 4, "seq_length": 64, **fields}, "here")
    model = model_of(kind)
    ids = torch.arange(40)[None]
    before = model(input_ids=ids).logits
    found: Any = add_lora(spec, model)
    made = found(input_ids=ids, labels=ids)
    torch.testing.assert_close(made.logits, before, rtol=0, atol=1e-5)
    made.loss.backward()
    assert all(weight.grad is not None for name, weight in found.named_parameters() if ".lora_B." in name)
    base = found.base_model
    names = [*base.targeted_module_names, *(name.removesuffix(".weight") for name in base.targeted_parameter_names)]
    return {name.partition("layers.")[2].partition(".")[2] for name in names}, found.left_out


ALL = "all-linear"


@pytest.mark.parametrize(("kind", "targets", "wanted", "missing"), table("experts")["where_adapters_are"])
def test_adapters_are_where_the_targets_say(kind: str, targets: str, wanted: list[str], missing: str) -> None:
    found, line = adapted(kind, lora_targets=targets)
    assert set(wanted) <= found
    assert (f"no adapter in {missing}" in line if missing.endswith(": ") else missing in line) if missing else not line


def test_chunks_of_attention_are_parts_of_a_row() -> None:
    assert isolates_packed_samples(model_of("llama"), 128) and not isolates_packed_samples(model_of("llama4_text"), 128)


def test_layers_that_write_their_own_product_are_no_routers() -> None:
    falcon = FalconForCausalLM(FalconConfig(vocab_size=128, hidden_size=32, num_hidden_layers=1, num_attention_heads=4))
    model: Any = add_lora(make_spec({"lora_r": 4, "lora_targets": ALL}, "here"), falcon)
    found = {name.rpartition(".")[2] for name in model.base_model.targeted_module_names}
    assert found == {"query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"} and not model.left_out


def test_what_cannot_have_an_adapter() -> None:
    _, line = adapted("gpt_oss", lora_targets=ALL, lora_dropout=0.1)
    assert line.startswith("lora_targets: no adapter in experts.down_proj, experts.gate_up_proj, mlp.router: ")
    with pytest.raises(UserError, match=r"^lora_dropout: the adapters of the experts of "):
        adapted("qwen3_moe", lora_targets=ALL, lora_dropout=0.1)
    with pytest.raises(UserError, match=r"^lora_targets: router: no layer of "):
        adapted("llama4_text", lora_targets="router,q_proj")


# Losses -------------------------------------------------------------------------------------------------------------------


def batch_of(lengths: list[list[int]]) -> Batch:
    """Return a micro-batch with rows of samples of these lengths, whose last halves carry loss."""
    draw = torch.Generator().manual_seed(4)
    rows = [
        [
            (torch.randint(1, 128, (n,), generator=draw).numpy(), (torch.arange(n) >= n // 2).numpy())
            for n in row
        ]
        for row in lengths
    ]  # fmt: skip
    return arranged(lay_out(rows, 0, None), torch.from_numpy)


def by_hand(config: Any, model: Any, batch: Batch) -> torch.Tensor:
    """Return the mean cross entropy, plus the weighted auxiliary loss of Switch Transformers over the tokens of all layers."""
    real = batch.positions >= 0
    seen: list[torch.Tensor] = []
    hooks = [
        part.register_forward_hook(lambda _, __, output: seen.append(output[0]))
        for part in model.modules()
        if "Router" in type(part).__name__
    ]
    found = model(input_ids=batch.ids, attention_mask=real.long(), use_cache=False)
    for hook in hooks:
        hook.remove()
    choices, chances = [], []
    for logits in seen:
        chance = logits[real.flatten()].softmax(-1)
        choices.append(F.one_hot(chance.topk(config.num_experts_per_tok).indices, chance.shape[-1]).float().sum(1))
        chances.append(chance)
    balance = (torch.cat(choices).mean(0) * torch.cat(chances).mean(0)).sum() * chances[0].shape[-1]
    loss = F.cross_entropy(found.logits[:, :-1].flatten(0, 1), batch.labels[:, 1:].flatten())
    return loss + config.router_aux_loss_coef * balance


@pytest.mark.parametrize("recomputing", [False, True])
@pytest.mark.parametrize("kind", ["qwen3_moe", "qwen2_moe", "mixtral", "olmoe", "gpt_oss", "granitemoe"])
def test_the_auxiliary_loss_is_that_of_the_config(kind: str, recomputing: bool) -> None:
    model = model_of(kind, router_aux_loss_coef=0.3)
    if recomputing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    batch = batch_of([[30], [11], [17]])
    wanted = by_hand(model.config, model, batch)
    wanted.backward()
    gradients = {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}
    model.zero_grad()
    module = ModelWithLoss(model)
    labels = int((batch.labels[:, 1:] != -100).sum())
    loss = module(*batch) / labels
    loss.backward()
    torch.testing.assert_close(loss, wanted, rtol=1e-5, atol=0)
    for name, weight in model.named_parameters():
        if name in gradients:
            torch.testing.assert_close(weight.grad, gradients[name], rtol=1e-4, atol=1e-6)
    assert not module.router_loss.left_out
    real = batch.positions >= 0
    theirs = model(
        input_ids=batch.ids, attention_mask=real.long(), labels=batch.labels, output_router_logits=True, use_cache=False
    )
    torch.testing.assert_close(loss, theirs.loss, rtol=1e-5, atol=0)
    with torch.no_grad():  # an evaluation is the cross entropy alone
        assert float(module(*batch)) / labels < float(loss) - 0.1


def test_an_auxiliary_loss_that_is_left_out_is_said() -> None:
    for kind, more, wanted in (
        ("llama4_text", {}, "router_aux_loss_coef 0.001"),
        ("deepseek_v3", {"aux_loss_alpha": 0.01}, "aux_loss_alpha 0.01"),
        ("llama", {}, ""),
        ("qwen3_moe", {"router_aux_loss_coef": 0.0}, ""),
    ):
        assert RouterLoss(model_of(kind, **more)).left_out == wanted


LONG = {"original_max_position_embeddings": 16, "rope_theta": 10000.0}
ROPES: dict[str, dict[str, Any]] = {
    "phi3": {"original_max_position_embeddings": 16, "rope_parameters": LONG | {"rope_type": "longrope", "long_factor": [1.0, 4.0, 9.0, 16.0], "short_factor": [1.0] * 4}},
    "llama": {"max_position_embeddings": 16, "rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}},
}  # fmt: skip


@pytest.mark.parametrize("kind", ROPES)
def test_a_sample_has_the_loss_of_its_own_length(kind: str) -> None:
    model = model_of(kind, **ROPES[kind])
    lengths = [9, 40, 16, 25]
    draw = batch_of([[n] for n in lengths])
    samples = [(draw.ids[i, :n], draw.labels[i, :n]) for i, n in enumerate(lengths)]
    wanted = 0.0
    for ids, labels in samples:
        fresh = model_of(kind, **ROPES[kind])  # dynamic frequencies keep the longest text
        logits = fresh(input_ids=ids[None]).logits[0, :-1]
        wanted += float(F.cross_entropy(logits, labels[1:], reduction="sum"))
    module = ModelWithLoss(model)
    made = [[(ids.numpy(), (labels >= 0).numpy())] for ids, labels in samples]
    packed = [[made[0][0], made[1][0]], [made[2][0], made[3][0]]]
    for rows in (made, made[::-1], packed, [[each for row in made for each in row]]):
        whole = float(module(*arranged(lay_out(rows, 0, None), torch.from_numpy)))
        assert whole == pytest.approx(wanted, rel=1e-5)
    assert float(model(input_ids=samples[0][0][None], labels=samples[0][1][None]).loss) == pytest.approx(
        float(fresh_loss(kind, samples[0])), rel=1e-5
    )


def fresh_loss(kind: str, sample: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    loss: torch.Tensor = model_of(kind, **ROPES[kind])(input_ids=sample[0][None], labels=sample[1][None]).loss
    return loss
