"""The loss that compares student and teacher."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from small_models import batch
from torch import nn
from trainer_runs import records

from trainer.data.corpus import Corpus
from trainer.data.encode import Encoder, encode_all
from trainer.data.shapes import to_sample
from trainer.method.method_base import places_of
from trainer.method.module_with_loss import ModelWithLoss
from trainer.method.sft import SFT
from trainer.models.loss import Divergence, distillation_loss

TEMPERATURES = (0.5, 1.0, 2.0)


@pytest.fixture(scope="module")
def corpus(tokenizer: Any) -> Corpus:
    """Twelve samples."""
    return encode_all([to_sample(row) for row in records(12)], Encoder(tokenizer, seq_length=64, train_on="answer"))


# The loss ---------------------------------------------------------------------------------------------------------------


def direct_loss(model: nn.Module, teacher: nn.Module, corpus: Corpus, divergence: Divergence) -> torch.Tensor:
    """Return the loss as it is defined, with one sample per forward pass and float64."""
    total = torch.zeros((), dtype=torch.float64)
    for index in range(len(corpus)):
        span = slice(int(corpus.starts[index]), int(corpus.starts[index + 1]))
        ids = torch.from_numpy(corpus.tokens[span]).long()
        logits = model(input_ids=ids[None]).logits[0].double()
        with torch.no_grad():
            said = teacher(input_ids=ids[None]).logits[0].double()
        for place in np.flatnonzero(corpus.trained[span]):
            text = -F.log_softmax(logits[place - 1], -1)[ids[place]]
            wanted = F.softmax(said[place - 1] / divergence.temperature, -1)
            student = F.log_softmax(logits[place - 1] / divergence.temperature, -1)
            kl = (wanted * (wanted.log() - student)).sum()
            total = total + (1 - divergence.alpha) * text + divergence.alpha * kl
    return total


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("alpha", [0.3, 1.0])
def test_packed_rows_and_micro_batches_give_the_loss_and_gradient_of_single_samples(
    alpha: float, temperature: float, corpus: Corpus, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoModelForCausalLM

    monkeypatch.setattr("trainer.models.loss.LOSS_CHUNK", 2**14)  # several chunks
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    torch.manual_seed(5)
    teacher = AutoModelForCausalLM.from_config(model.config).eval()
    judge, divergence = ModelWithLoss(teacher).eval(), Divergence(alpha, temperature)
    wanted = direct_loss(model, teacher, corpus, divergence)
    wanted.backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    for parts in ([[[0, 1, 2], [3, 4]], [[5, 6, 7, 8], [9, 10, 11]]], [[[index]] for index in range(12)]):
        model.zero_grad()
        module = ModelWithLoss(model, method=SFT(divergence))
        total = 0.0
        for rows in parts:
            made = batch(corpus, rows)
            with torch.no_grad():
                said = judge.selected_logits(made.ids, made.positions, places_of(made))
            loss = module(*made[:3], said)
            loss.backward()
            total += float(loss.detach())
        assert total == pytest.approx(float(wanted.detach()), rel=1e-5)
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            torch.testing.assert_close(parameter.grad, gradient, rtol=1e-3, atol=2e-5 * float(gradient.abs().max()))


def test_a_batch_without_loss(corpus: Corpus, model_folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    module = ModelWithLoss(AutoModelForCausalLM.from_pretrained(model_folder), method=SFT(Divergence(0.7)))
    made = batch(corpus, [])
    said = module.selected_logits(made.ids, made.positions, places_of(made)).detach()
    loss = module(*made[:3], said)
    loss.backward()
    assert float(loss.detach()) == 0 and all(p.grad is None or not p.grad.any() for p in module.parameters())


# The divergence of trl's GKD -----------------------------------------------------------------------------------------------


def ours(
    student: torch.Tensor, teacher: torch.Tensor, labels: torch.Tensor, beta: float, temperature: float
) -> torch.Tensor:
    """Return the divergence summed over the tokens with a label, through the loss of a micro-batch."""
    return distillation_loss(
        student.flatten(0, 1), labels.flatten(), teacher.flatten(0, 1), Divergence(1.0, temperature, beta)
    )


@pytest.mark.parametrize("chunk", [2**24, 200], ids=["one chunk", "many chunks"])
def test_loss_and_gradient_are_those_of_trl(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    from trl.experimental.gkd import GKDTrainer

    def theirs(*given: Any) -> Any:
        names = ("student_logits", "teacher_logits", "labels", "beta", "temperature")
        return GKDTrainer.generalized_jsd_loss(**dict(zip(names, given, strict=True)), reduction="sum")

    monkeypatch.setattr("trainer.models.loss.LOSS_CHUNK", chunk)
    torch.manual_seed(2)
    labels = torch.randint(0, 97, (3, 11))
    labels[torch.rand(3, 11) < 0.3] = -100
    teacher = torch.randn(3, 11, 97) * 3
    for beta, temperature in itertools.product((0.0, 0.1, 0.5, 0.9, 1.0), TEMPERATURES):
        student, found = torch.randn(3, 11, 97) * 3, []
        for compute in (ours, theirs):
            logits = student.clone().requires_grad_()
            loss = compute(logits, teacher, labels, beta, temperature)
            loss.backward()
            assert logits.grad is not None
            found.append((loss.detach(), logits.grad.clone()))
        torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-5)


def test_vocabularies_that_are_padded_differently() -> None:
    torch.manual_seed(3)
    student, teacher, labels = torch.randn(1, 4, 12), torch.randn(1, 4, 9), torch.tensor([[1, 2, -100, 3]])
    wanted = ours(student[..., :9], teacher, labels, 0.5, 1.0)
    torch.testing.assert_close(ours(student, teacher, labels, 0.5, 1.0), wanted)
    wanted = ours(teacher, student[..., :9], labels, 0.5, 1.0)
    torch.testing.assert_close(ours(teacher, student, labels, 0.5, 1.0), wanted)


def test_alpha_mixes_text_and_divergence() -> None:
    torch.manual_seed(3)
    student, teacher, labels = torch.randn(4, 9), torch.randn(4, 9), torch.tensor([1, 2, -100, 3])
    text = F.cross_entropy(student, labels, ignore_index=-100, reduction="sum")
    divergence = ours(student[None], teacher[None], labels[None], 0.3, 2.0)
    mixed = distillation_loss(student, labels, teacher, Divergence(0.2, 2.0, 0.3))
    torch.testing.assert_close(mixed, 0.8 * text + 0.2 * divergence)
