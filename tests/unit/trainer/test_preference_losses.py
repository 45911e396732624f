"""Losses, gradients and metrics of the methods that learn from preferences, against those of TRL's trainers on equal batches."""

import math
import random
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tables import table
from trainer_runs import words
from transformers import AutoConfig, AutoModelForCausalLM

from trainer.config import RunSpec
from trainer.data.corpus import Corpus
from trainer.data.encode import Encoder, encode_all
from trainer.data.preferences import to_record
from trainer.method import Batch, Work, method_of
from trainer.method.kto import _partners
from trainer.method.module_with_loss import ModelWithLoss
from trainer.models.model import add_lora, lora_config
from trainer.spec import make_spec

PAIRS, PAD = 6, 2


def records(kind: str) -> list[dict[str, Any]]:
    draw = random.Random(4)
    if kind == "labels":
        return [
            {"prompt": f"{words(draw, 6)} ", "completion": words(draw, 12), "label": index % 3 > 0}
            for index in range(PAIRS)
        ]
    return [
        {"prompt": f"{words(draw, 6)} ", "chosen": words(draw, 9), "rejected": words(draw, 12)} for _ in range(PAIRS)
    ]


def corpus_of(kind: Any, tokenizer: Any) -> Corpus:
    samples = [to_record(kind, row) for row in records(kind)]
    return encode_all(samples, Encoder(tokenizer, seq_length=64, train_on="answer", data=kind))


def spec_of(method: str, **fields: Any) -> RunSpec:
    return make_spec(
        {
            "method": method,
            "dataset": "x.jsonl",
            "lora_r": 4,
            "lora_targets": "q_proj,v_proj,up_proj",
            "seq_length": 64,
            **fields,
        },
        "here",
    )


class Alone:
    """What a method asks of the loop, on one rank."""

    def __init__(self, module: ModelWithLoss) -> None:
        self.module = module

    def batch(self, work: Work, rows: Any) -> Batch:
        return self.module.method.batch(work, rows, PAD, None, torch.from_numpy)

    def score(self, batch: Batch) -> float:
        with torch.no_grad():
            return float(self.module(*batch))

    def sum(self, values: list[float]) -> list[float]:
        return values

    def waiting(self, note: str) -> None:
        pass


def work_of(corpus: Corpus, parts: list[list[list[int]]]) -> Work:
    rows = [row for part in parts for row in part]
    return Work(corpus, rows, parts, len(rows), len(rows), 0)


def our_loss(module: ModelWithLoss, work: Work) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the mean loss of an update and the gradients of the trained weights by name."""
    module.zero_grad()
    rank = Alone(module)
    prepared = module.method.prepare(work, rank)
    total = torch.zeros(())
    for rows in prepared.parts:
        loss = module(*rank.batch(prepared, rows)) / prepared.total
        loss.backward()
        total = total + loss.detach()
    return total, {name: p.grad.clone() for name, p in module.model.named_parameters() if p.grad is not None}


def load(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder)


@pytest.fixture
def adapted(model_folder: Path) -> Any:
    """The model with an adapter that changes what it computes."""
    torch.manual_seed(5)
    model = add_lora(spec_of("dpo"), load(model_folder))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.3)
    return model.train()


def trl(kind: str, folder: Path, tokenizer: Any, work: Path, model: Any, **options: Any) -> Any:
    """Return a trainer of TRL whose model has the trained weights of `model`; its reference is the model of the folder."""
    from datasets import Dataset

    if kind == "orpo":
        from trl.experimental.orpo import ORPOConfig as Config
        from trl.experimental.orpo import ORPOTrainer as Trainer
    elif kind == "kto":
        from trl import KTOConfig as Config  # type: ignore[assignment]
        from trl import KTOTrainer as Trainer  # type: ignore[assignment]
    else:
        from trl import DPOConfig as Config  # type: ignore[assignment]
        from trl import DPOTrainer as Trainer  # type: ignore[assignment]
    lora = lora_config(spec_of("dpo")) if hasattr(model, "peft_config") else None
    common = {"per_device_train_batch_size": PAIRS, "gradient_checkpointing": False, "max_length": 64}
    arguments = Config(output_dir=str(work), report_to=[], use_cpu=True, bf16=False, **(common | options))
    data = Dataset.from_list(records("labels" if kind == "kto" else "pairs"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = Trainer(load(folder), args=arguments, train_dataset=data, processing_class=tokenizer, peft_config=lora)
    mine = dict(model.named_parameters())
    with torch.no_grad():
        for name, parameter in made.model.named_parameters():
            if parameter.requires_grad:
                parameter.copy_(mine[name])
    made.model.train()
    return made


def trl_loss(made: Any, inputs: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    made.model.zero_grad()
    loss = made.compute_loss(made.model, inputs)
    loss.backward()
    return loss.detach(), {n: p.grad.clone() for n, p in made.model.named_parameters() if p.grad is not None}


def sequences(corpus: Corpus, sample: int) -> list[tuple[list[int], list[int]]]:
    """Return (prompt, answer) of the sequences of a sample, as token ids."""
    found = []
    for span in corpus.sequences(sample):
        tokens, first = corpus.tokens[span].tolist(), int(np.argmax(corpus.trained[span]))
        found.append((tokens[:first], tokens[first:]))
    return found


def pair_inputs(made: Any, corpus: Corpus) -> dict[str, torch.Tensor]:
    examples = []
    for sample in range(len(corpus)):
        (prompt, chosen), (same, rejected) = sequences(corpus, sample)
        assert prompt == same
        examples.append({"prompt_ids": prompt, "chosen_ids": chosen, "rejected_ids": rejected})
    return made.data_collator(examples)


def assert_equal(one: tuple[Any, dict[str, torch.Tensor]], two: tuple[Any, dict[str, torch.Tensor]]) -> None:
    torch.testing.assert_close(one[0], two[0], rtol=1e-5, atol=1e-5)
    assert one[1].keys() == two[1].keys() and one[1]
    assert max(float(gradient.abs().max()) for gradient in one[1].values()) > 1e-3
    for name, gradient in one[1].items():
        torch.testing.assert_close(gradient, two[1][name], rtol=1e-4, atol=1e-5, msg=name)


ALL = [[[index] for index in range(PAIRS)]]
PARTS = [[[0], [1], [2], [3]], [[4], [5]], []]  # a rank without rows passes an empty micro-batch


@pytest.mark.parametrize(("loss", "smoothing"), table("preference_losses")["dpo_equals"], ids=lambda value: str(value))
def test_dpo_equals_trl(
    loss: str, smoothing: float, adapted: Any, model_folder: Path, tokenizer: Any, tmp_path: Path
) -> None:
    spec = spec_of("dpo", preference_loss=loss, preference_label_smoothing=smoothing, preference_beta=0.3)
    module = ModelWithLoss(adapted, method=method_of(spec).create(spec))
    corpus = corpus_of("pairs", tokenizer)
    made = trl("dpo", model_folder, tokenizer, tmp_path, adapted, loss_type=[loss], beta=0.3, label_smoothing=smoothing)
    theirs = trl_loss(made, pair_inputs(made, corpus))
    assert_equal(our_loss(module, work_of(corpus, ALL)), theirs)
    module.method.take_metrics(method_of(spec).sums)
    assert_equal(our_loss(module, work_of(corpus, PARTS)), theirs)
    sums = dict(zip(method_of(spec).sums, module.method.take_metrics(method_of(spec).sums), strict=True))
    for name, value in method_of(spec).means(sums).items():
        assert value == pytest.approx(made._metrics["train"][name][0], rel=1e-4, abs=1e-5), name


def with_references(module: ModelWithLoss, corpus: Corpus) -> Corpus:
    """Return the corpus with the log-probabilities of the model as it is now."""
    work = work_of(corpus, PARTS)
    values = [module.method.reference_values(work, rows, Alone(module)) for rows in work.parts]
    assert [len(each) for each in values] == [4, 2, 0]
    return replace(corpus, references=np.concatenate(values))


def test_dpo_of_full_weights_equals_trl(model_folder: Path, tokenizer: Any, tmp_path: Path) -> None:
    spec = spec_of("dpo", lora_r=0)
    module = ModelWithLoss(load(model_folder), method=method_of(spec).create(spec))
    corpus = with_references(module, corpus_of("pairs", tokenizer))
    torch.manual_seed(6)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
    made = trl("dpo", model_folder, tokenizer, tmp_path, module.model)
    assert_equal(our_loss(module, work_of(corpus, PARTS)), trl_loss(made, pair_inputs(made, corpus)))


@pytest.mark.parametrize("method", ["dpo", "kto"])
def test_a_precomputed_reference_is_that_of_the_adapter_switched_off(method: str, adapted: Any, tokenizer: Any) -> None:
    spec = spec_of(method)
    module = ModelWithLoss(adapted, method=method_of(spec).create(spec))
    plain = corpus_of("labels" if method == "kto" else "pairs", tokenizer)
    off = our_loss(module, work_of(plain, PARTS))
    with adapted.disable_adapter():
        corpus = with_references(module, plain)
    assert_equal(our_loss(module, work_of(corpus, PARTS)), off)


def test_the_reference_has_no_dropout(adapted: Any, tokenizer: Any) -> None:
    spec = spec_of("dpo")
    module = ModelWithLoss(adapted, method=method_of(spec).create(spec))
    seen = []
    adapted.register_forward_hook(lambda model, *_: seen.append((model.training, torch.is_grad_enabled())))
    our_loss(module, work_of(corpus_of("pairs", tokenizer), ALL))
    assert [grad for _, grad in seen] == [True, False] and module.training


DROPOUT: dict[str, dict[str, Any]] = table("preference_losses")["dropout"]


@pytest.mark.parametrize("recomputing", [False, True])
@pytest.mark.parametrize("kind", DROPOUT)
def test_a_policy_has_no_dropout(kind: str, recomputing: bool, tokenizer: Any) -> None:
    sizes = {"vocab_size": 512, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes | DROPOUT[kind]))
    if recomputing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    spec = spec_of("dpo", lora_targets="all-linear", gradient_checkpointing=recomputing)
    module = ModelWithLoss(add_lora(spec, model.train()), method=method_of(spec).create(spec))
    module.eval()
    module.train()
    work = work_of(corpus_of("pairs", tokenizer), ALL)
    assert float(our_loss(module, work)[0]) == pytest.approx(math.log(2), abs=1e-5)
    module.method = method_of(spec_of("sft")).create(spec_of("sft"))
    module.train()
    ids = torch.arange(40)[None]
    values = [module.selected_logits(ids, ids, torch.arange(40)) for _ in range(2)]
    assert not torch.allclose(*values)  # sft keeps it


def test_orpo_equals_trl(adapted: Any, model_folder: Path, tokenizer: Any, tmp_path: Path) -> None:
    spec = spec_of("orpo", preference_beta=0.3)
    module = ModelWithLoss(adapted, method=method_of(spec).create(spec))
    corpus = corpus_of("pairs", tokenizer)
    made = trl("orpo", model_folder, tokenizer, tmp_path, adapted, beta=0.3)
    inputs: dict[str, Any] = {}
    for number, name in enumerate(("chosen", "rejected")):
        found = [sequences(corpus, sample)[number] for sample in range(PAIRS)]
        width = max(len(prompt) + len(answer) for prompt, answer in found)
        lay = lambda rows, fill: torch.tensor([[*row, *[fill] * (width - len(row))] for row in rows])  # noqa: B023, E731
        inputs[f"{name}_input_ids"] = lay([prompt + answer for prompt, answer in found], PAD)
        inputs[f"{name}_attention_mask"] = lay([[1] * len(prompt + answer) for prompt, answer in found], 0)
        inputs[f"{name}_labels"] = lay([[-100] * len(prompt) + answer for prompt, answer in found], -100)
    theirs = trl_loss(made, inputs)
    assert_equal(our_loss(module, work_of(corpus, ALL)), theirs)
    assert_equal(our_loss(module, work_of(corpus, PARTS)), theirs)


def test_kto_equals_trl(adapted: Any, model_folder: Path, tokenizer: Any, tmp_path: Path) -> None:
    spec = spec_of("kto", preference_beta=0.3, kto_desirable_weight=1.5, kto_undesirable_weight=0.7)
    module = ModelWithLoss(adapted, method=method_of(spec).create(spec))
    corpus = corpus_of("labels", tokenizer)
    assert corpus.desirable is not None
    made = trl(
        *("kto", model_folder, tokenizer, tmp_path, adapted), beta=0.3, desirable_weight=1.5, undesirable_weight=0.7
    )
    examples = []
    for sample in range(PAIRS):
        ((prompt, answer),) = sequences(corpus, sample)
        ((_, other),) = sequences(corpus, int(_partners(PAIRS)[sample]))
        label = bool(corpus.desirable[sample])
        examples.append({"prompt_ids": prompt, "completion_ids": answer, "KL_completion_ids": other, "label": label})
    theirs = trl_loss(made, made.data_collator(examples))
    assert_equal(our_loss(module, work_of(corpus, ALL)), theirs)
    module.method.take_metrics(method_of(spec).sums)
    assert_equal(our_loss(module, work_of(corpus, PARTS)), theirs)
    sums = dict(zip(method_of(spec).sums, module.method.take_metrics(method_of(spec).sums), strict=True))
    means = method_of(spec).means(sums)
    assert means.keys() >= {"kl", "rewards/margins"}
    for name, value in means.items():
        assert value == pytest.approx(made._metrics["train"][name][0], rel=1e-4, abs=1e-5), name


def test_partners_are_a_permutation_without_fixed_points() -> None:
    for count in (2, 3, 50):
        found = _partners(count)
        assert sorted(found) == list(range(count)) and not (found == np.arange(count)).any()
