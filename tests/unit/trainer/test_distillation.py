"""Signals of a teacher: log-probabilities in the dataset, and the loss that compares student and teacher."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from small_models import batch
from tokenizer_kinds import with_logprobs
from torch import nn
from trainer_runs import records, write_jsonl

from trainer.common.errors import UserError
from trainer.data.corpus import Corpus, load_corpus, save_corpus, select
from trainer.data.encode import Encoder, encode_all, encoded_dataset
from trainer.data.logprobs import TOP, LogprobReader, Vocabulary, last_answer
from trainer.data.samples import read_source, source_of
from trainer.data.shapes import to_sample
from trainer.method.module_with_loss import ModelWithLoss
from trainer.method.sft import SFT
from trainer.models.loss import (
    Divergence,
    TeacherLogits,
    TopProbabilities,
    at_places,
    distillation_loss,
    generalized_jsd,
    top_kl,
    top_tokens,
)
from trainer.spec import make_spec

TEMPERATURES = (0.5, 1.0, 2.0)


@pytest.fixture(scope="module")
def taught(tokenizer: Any) -> Corpus:
    """Twelve samples with log-probabilities."""
    rows = [with_logprobs(tokenizer, row, seed) for seed, row in enumerate(records(12))]
    return encoded(tokenizer, rows)


def encoded(tokenizer: Any, rows: list[dict[str, Any]], seq_length: int = 64, train_on: str = "answer") -> Corpus:
    from dataclasses import replace

    read = LogprobReader()
    samples = [replace(to_sample(row), logprobs=read(row)) for row in rows]
    return encode_all(samples, Encoder(tokenizer, seq_length=seq_length, train_on=train_on, logprobs=True))


# Rows -------------------------------------------------------------------------------------------------------------------


def test_every_token_of_an_answer_gets_its_distribution(tokenizer: Any) -> None:
    rows = [with_logprobs(tokenizer, row, seed) for seed, row in enumerate(records(12))]
    corpus = encoded(tokenizer, rows)
    assert corpus.targets and (corpus.targets.matched, corpus.targets.unmatched) == (12, 0)
    position = 0
    for index, row in enumerate(rows):
        span = slice(int(corpus.starts[index]), int(corpus.starts[index + 1]))
        given = row["teacher_logprobs"]
        inside = np.flatnonzero(corpus.targets.taught[span])
        # All tokens with loss but the end of the turn, which the teacher does not report.
        assert len(inside) == len(given) == corpus.trained[span].sum() - 1
        for token, place in zip(corpus.tokens[span][inside], given, strict=True):
            values = corpus.targets.values[position]
            own = float(values[corpus.targets.ids[position].tolist().index(token)])
            assert own == pytest.approx(place["top"][place["token"]])
            assert sorted(values.tolist(), reverse=True) == values.tolist()
            position += 1
    assert position == len(corpus.targets.ids)


def test_a_row_with_other_tokens_trains_on_text_alone_and_is_counted(tokenizer: Any) -> None:
    rows = [with_logprobs(tokenizer, row, seed) for seed, row in enumerate(records(3))]
    other = rows[1]["teacher_logprobs"]
    joined = other[0]["token"] + other[1]["token"]
    rows[1] = rows[1] | {"teacher_logprobs": [{"token": joined, "top": {joined: -0.1}}, *other[2:]]}
    corpus = encoded(tokenizer, [*rows, *records(1, seed=9)])
    assert corpus.targets and (corpus.targets.matched, corpus.targets.unmatched) == (2, 1)
    counts = np.diff(np.concatenate([[0], np.cumsum(corpus.targets.taught)])[corpus.starts])
    assert [bool(count) for count in counts] == [True, False, True, False]


def test_tokens_that_the_student_lacks_and_nulls_are_left_out(tokenizer: Any) -> None:
    row = with_logprobs(tokenizer, records(1)[0], top=3)
    place = row["teacher_logprobs"][0]
    place["top"] |= {"ff" * 50: -0.01, place["token"][:0] + "fe" * 9: None}
    corpus = encoded(tokenizer, [row])
    assert corpus.targets
    assert np.isfinite(corpus.targets.values).sum(1).tolist() == [3] * len(row["teacher_logprobs"])
    empty = row | {"teacher_logprobs": [entry | {"top": {}} for entry in row["teacher_logprobs"]]}
    targets = encoded(tokenizer, [empty]).targets
    assert targets and targets.matched == 1 and not targets.taught.any()


def test_a_truncated_answer_keeps_the_distributions_of_its_tokens(tokenizer: Any) -> None:
    rows = [with_logprobs(tokenizer, row, seed) for seed, row in enumerate(records(12))]
    whole, cut = encoded(tokenizer, rows), encoded(tokenizer, rows, seq_length=24)
    assert whole.targets and cut.targets and cut.report.truncated
    assert 0 < len(cut.targets.ids) == cut.targets.taught.sum() < len(whole.targets.ids)
    assert not (cut.targets.taught & ~cut.trained).any()


def test_the_last_answer_of_a_chat_is_the_teachers(tokenizer: Any) -> None:
    row = with_logprobs(tokenizer, records(1)[0])
    chat = {
        "messages": [
            {"role": "user", "content": "the cat"},
            {"role": "assistant", "content": row["output"]},
            {"role": "user", "content": "a dog"},
            {"role": "assistant", "content": row["output"]},
        ],
        "teacher_logprobs": row["teacher_logprobs"],
    }
    for train_on in ("answer", "all"):
        targets = encoded(tokenizer, [chat], seq_length=512, train_on=train_on).targets
        assert targets and targets.taught.sum() == len(row["teacher_logprobs"])
        assert np.flatnonzero(targets.taught)[0] > len(targets.taught) / 2


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("x", "is str, expected a list"),
        ([1], "token 0 of 'teacher_logprobs' must have token"),
        ([{"token": "61"}], "must have token"),
        ([{"token": "6", "top": {}}], "hexadecimal digits"),
        ([{"token": "zz", "top": {}}], "hexadecimal digits"),
        ([{"token": 5, "top": {}}], "hexadecimal digits"),
        ([{"token": "61" * 1025, "top": {}}], "hexadecimal digits"),
        ([{"token": "61", "top": {"61": "x"}}], "is str, expected a number"),
        ([{"token": "61", "top": {"61": True}}], "is bool, expected a number"),
        ([{"token": "61", "top": {"61": math.nan}}], "finite number of at most 0"),
        ([{"token": "61", "top": {"61": -math.inf}}], "finite number of at most 0"),
        ([{"token": "61", "top": {"61": 0.5}}], "finite number of at most 0"),
        ([{"token": "61", "top": {"61": 10**400}}], "finite number of at most 0"),
        ([{"token": "61", "top": {f"{n:02x}": -1 for n in range(65)}}], "65 entries in top"),
        ([{"token": "61", "top": {}}] * (2**20 + 1), "1048577 tokens"),
    ],
)
def test_invalid_log_probabilities_are_one_line(value: Any, reason: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=reason) as caught:
        LogprobReader()({"teacher_logprobs": value})
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 300
    if len(str(value)) < 10_000:
        path = write_jsonl(tmp_path / "d.jsonl", [*records(1), records(1)[0] | {"teacher_logprobs": value}])
        assert len(read_source(source_of(path))) == 2  # without use for them they do not matter
        with pytest.raises(UserError, match=r"d\.jsonl:2: .*" + reason):
            read_source(source_of(path), logprobs=True)


@given(st.recursive(st.none() | st.booleans() | st.floats() | st.text() | st.integers(), lambda x: st.lists(x) | st.dictionaries(st.sampled_from(["token", "top", "61", "teacher_logprobs"]), x)))  # fmt: skip
def test_any_value_is_read_or_refused(value: Any) -> None:
    try:
        found = LogprobReader()({"teacher_logprobs": value})
    except ValueError:
        return
    assert found is None or found.values.shape == (len(found.chosen), TOP)


def test_extreme_values_stay_finite() -> None:
    found = LogprobReader()({"teacher_logprobs": [{"token": "61", "top": {"61": -(10**400), "62": -1e308, "63": 0}}]})
    assert found and found.values[0, :3].tolist() == [0, -1e4, -1e4]


def test_the_most_probable_tokens_of_many_count() -> None:
    many = {f"{n:02x}": -float(n) for n in range(TOP + 3)}
    found = LogprobReader()({"teacher_logprobs": [{"token": "61", "top": dict(reversed(many.items()))}]})
    assert found and found.values[0].tolist() == [-float(n) for n in range(TOP)]
    assert [found.table[token] for token in found.top[0]] == [bytes([n]) for n in range(TOP)]


def sentencepiece() -> Any:
    """Return a tokenizer in the style of SentencePiece: pieces with ``▁``, and bytes for other characters."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "▁a", "A"]
    model = models.BPE({piece: number for number, piece in enumerate(pieces)}, [("▁", "a")], byte_fallback=True)
    made = Tokenizer(model)
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>")


def test_the_bytes_of_a_vocabulary_with_byte_tokens() -> None:
    tokenizer = sentencepiece()
    known = tokenizer.get_vocab()
    table = [b" a", b"A", b"\n", b"</s>", b"\xf0", b"nothing"]
    wanted = [known["▁a"], known["A"], known["<0x0A>"], known["</s>"], known["<0xF0>"], -1]
    assert Vocabulary(tokenizer).ids_of(table)[:-1].tolist() == wanted
    # The token of the byte 0x41 and the piece A are the same text.
    chosen = LogprobReader()({"teacher_logprobs": [{"token": "41", "top": {"41": -0.1, "20": -3}}]})
    assert chosen
    for number in (known["A"], known["<0x41>"]):
        found = Vocabulary(tokenizer).match(chosen, [5, number, 2], [False, True, True])
        assert found and found[0] == 1 and found[1][0, :2].tolist() == [known["A"], known["▁"]]
    assert Vocabulary(tokenizer).match(chosen, [5, 6, 2], [False, True, True]) is None
    assert Vocabulary(tokenizer).match(chosen, [5, 6, 2], [False] * 3) is None


def test_the_targets_survive_the_cache_and_the_split(taught: Corpus, tmp_path: Path) -> None:
    assert taught.targets
    save_corpus(taught, tmp_path / "c.npz")
    again = load_corpus(tmp_path / "c.npz")
    assert again and again.digest() == taught.digest() and again.targets and again.targets.matched == 12
    plain = Corpus(taught.tokens, taught.trained, taught.starts)
    assert plain.digest() != taught.digest()
    drawn = select(taught, [3, 7, 3])
    first, last = (int(taught.targets.taught[: taught.starts[place]].sum()) for place in (3, 4))
    third = taught.targets.ids[first:last]
    assert drawn.targets and np.array_equal(drawn.targets.ids[: len(third)], third)
    assert np.array_equal(drawn.targets.ids[-len(third) :], third)


def test_too_few_matches_stop_the_run(tokenizer: Any, tmp_path: Path) -> None:
    rows = [with_logprobs(tokenizer, row, seed) for seed, row in enumerate(records(9))]
    odd = [{"token": "ff", "top": {"ff": -0.1}}]

    def load(name: str, rows: list[Any], **fields: Any) -> Corpus:
        spec = make_spec(
            {"dataset": str(write_jsonl(tmp_path / name, rows)), "model": "m", "seq_length": 64} | fields, "test"
        )
        return encoded_dataset(spec, tokenizer, tmp_path)

    half = [row | {"teacher_logprobs": odd} if index < 4 else row for index, row in enumerate(rows)]
    targets = load("half.jsonl", half, distill_alpha=0.5).targets
    assert targets and (targets.matched, targets.unmatched) == (5, 4)
    assert load("half.jsonl", half).targets is None
    assert load("half.jsonl", half, distill_alpha=0.5).digest() != load("half.jsonl", half).digest()
    most = [row | {"teacher_logprobs": odd} if index < 5 else row for index, row in enumerate(rows)]
    with pytest.raises(UserError, match=r"differ from those of the model in 5 of 9 answers") as caught:
        load("most.jsonl", most, distill_alpha=0.5)
    assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match="no row of the dataset has teacher_logprobs"):
        load("none.jsonl", records(3), distill_alpha=0.5)


# The loss ---------------------------------------------------------------------------------------------------------------


def probabilities(corpus: Corpus, rows: list[list[int]], width: int) -> TopProbabilities:
    assert corpus.targets
    return TopProbabilities(*map(torch.from_numpy, corpus.targets.lay_out(rows, corpus.starts, width)))


def direct_loss(model: nn.Module, corpus: Corpus, divergence: Divergence) -> torch.Tensor:
    """Return the loss as it is defined, with one sample per forward pass and float64."""
    assert corpus.targets
    total, position = torch.zeros((), dtype=torch.float64), 0
    for index in range(len(corpus)):
        span = slice(int(corpus.starts[index]), int(corpus.starts[index + 1]))
        ids = torch.from_numpy(corpus.tokens[span]).long()
        logits = model(input_ids=ids[None]).logits[0].double()
        for place in np.flatnonzero(corpus.trained[span]):
            text = -F.log_softmax(logits[place - 1], -1)[ids[place]]
            if corpus.targets.taught[span][place]:
                values = torch.from_numpy(corpus.targets.values[position]).double()
                chosen = torch.from_numpy(corpus.targets.ids[position]).long()[values > -torch.inf]
                teacher = F.softmax(values[values > -torch.inf] / divergence.temperature, -1)
                student = F.log_softmax(logits[place - 1] / divergence.temperature, -1)[chosen]
                kl = (teacher * (teacher.log() - student)).sum()
                text = (1 - divergence.alpha) * text + divergence.alpha * kl
                position += 1
            total = total + text
    return total


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("alpha", [0.3, 1.0])
def test_packed_rows_and_micro_batches_give_the_loss_and_gradient_of_single_samples(
    alpha: float, temperature: float, taught: Corpus, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoModelForCausalLM

    monkeypatch.setattr("trainer.models.loss.LOSS_CHUNK", 2**14)  # several chunks
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    divergence = Divergence(alpha, temperature)
    wanted = direct_loss(model, taught, divergence)
    wanted.backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    for parts in ([[[0, 1, 2], [3, 4]], [[5, 6, 7, 8], [9, 10, 11]]], [[[index]] for index in range(12)]):
        model.zero_grad()
        module = ModelWithLoss(model, method=SFT(divergence))
        total = 0.0
        for rows in parts:
            made = batch(taught, rows)
            loss = module(*made[:3], probabilities(taught, rows, made.ids.shape[1]))
            loss.backward()
            total += float(loss.detach())
        assert total == pytest.approx(float(wanted.detach()), rel=1e-5)
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            torch.testing.assert_close(parameter.grad, gradient, rtol=1e-3, atol=2e-5 * float(gradient.abs().max()))


def test_a_batch_without_loss_and_one_without_distributions(taught: Corpus, model_folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    module = ModelWithLoss(AutoModelForCausalLM.from_pretrained(model_folder), method=SFT(Divergence(0.7)))
    made = batch(taught, [])
    loss = module(*made[:3], probabilities(taught, [], made.ids.shape[1]))
    loss.backward()
    assert float(loss.detach()) == 0 and all(p.grad is None or not p.grad.any() for p in module.parameters())
    made = batch(taught, [[0], [1]])
    none = probabilities(taught, [[0], [1]], made.ids.shape[1])
    none.values.fill_(-torch.inf)
    module.zero_grad()
    loss = module(*made[:3], none)
    loss.backward()
    assert float(loss.detach()) == pytest.approx(float(module(*made[:3])), rel=1e-6)
    assert all(p.grad is None or p.grad.isfinite().all() for p in module.parameters())


@pytest.mark.parametrize("chunk", [2**24, 20], ids=["one chunk", "many chunks"])
def test_all_tokens_as_the_most_probable_ones_give_the_loss_of_the_logits(
    chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with a teacher whose vocabulary is padded."""
    monkeypatch.setattr("trainer.models.loss.LOSS_CHUNK", chunk)
    torch.manual_seed(2)
    shape, places = torch.Size((2, 6)), torch.tensor([0, 3, 6, 9])
    teacher, targets = torch.randn(4, 12), torch.tensor([1, 5, 2, 9])
    found = []
    for said in (
        TeacherLogits(teacher[:, :10]),
        at_places(shape, places, *top_tokens(teacher, 14, 10)),
    ):
        student = torch.randn(4, 10, generator=torch.Generator().manual_seed(3)).requires_grad_()
        loss = distillation_loss(student, targets, places + 1, said, Divergence(0.4, 2.0))
        loss.backward()  # type: ignore[no-untyped-call]
        found.append((float(loss.detach()), student.grad))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-5)
    torch.testing.assert_close(found[0][1], found[1][1], rtol=1e-5, atol=1e-6)


def test_the_divergence_from_all_probabilities_is_the_divergence_from_the_top() -> None:
    torch.manual_seed(1)
    student, teacher = torch.randn(7, 16), torch.randn(7, 16)
    values, ids = F.log_softmax(teacher, -1).sort(descending=True)
    for temperature in TEMPERATURES:
        wanted = F.kl_div(
            F.log_softmax(student / temperature, -1), F.log_softmax(teacher / temperature, -1), reduction="none", log_target=True
        ).sum(-1)  # fmt: skip
        torch.testing.assert_close(top_kl(student, ids, values, temperature), wanted, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(generalized_jsd(student, teacher, 0.0, temperature), wanted, rtol=1e-5, atol=1e-6)


# The divergence of trl's GKD -----------------------------------------------------------------------------------------------


def ours(
    student: torch.Tensor, teacher: torch.Tensor, labels: torch.Tensor, beta: float, temperature: float
) -> torch.Tensor:
    """Return the divergence summed over the tokens with a label, through the loss of a micro-batch."""
    targets = labels.flatten()
    return distillation_loss(
        student.flatten(0, 1),
        targets,
        torch.arange(len(targets)),
        TeacherLogits(teacher.flatten(0, 1)),
        Divergence(1.0, temperature, beta),
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
    mixed = distillation_loss(student, labels, torch.arange(4), TeacherLogits(teacher), Divergence(0.2, 2.0, 0.3))
    torch.testing.assert_close(mixed, 0.8 * text + 0.2 * divergence)


@pytest.mark.parametrize(
    ("mask", "wanted"),
    [([0, 1, 1], (1, 3)), ([0, 1, 0, 1, 1, 0], (3, 5)), ([1, 1], (0, 2)), ([0, 1], (1, 2))],
)
def test_the_last_answer_of_a_sample(mask: list[int], wanted: tuple[int, int]) -> None:
    assert last_answer(np.array(mask, bool)) == wanted
