"""Answers that the student writes itself: their steps, their prompts, and their probabilities."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_distillation import taught

from trainer.data.corpus import Corpus
from trainer.distillation.on_policy import Writer, is_on_policy
from trainer.models.sampling import Sampler
from trainer.spec import make_spec

__all__ = ["taught"]


def test_the_fraction_of_on_policy_steps() -> None:
    def steps(share: float, seed: int = 1) -> list[bool]:
        spec = make_spec({"teacher": "t", "distill_alpha": 1, "gkd_lambda": share, "seed": seed}, "test")
        return [is_on_policy(spec, step) for step in range(400)]

    assert not any(steps(0)) and all(steps(1))
    assert 160 < sum(steps(0.5)) < 240 and steps(0.5) == steps(0.5) != steps(0.5, seed=2)
    assert all(more or not less for less, more in zip(steps(0.3), steps(0.6), strict=True))


@pytest.fixture(scope="module")
def writer(model_folder: Path, tokenizer: Any) -> Any:
    from transformers import AutoModelForCausalLM

    fields = {"teacher": "t", "distill_alpha": 1, "gkd_lambda": 1, "seq_length": 64, "batch_size": 2}
    model = AutoModelForCausalLM.from_pretrained(model_folder).eval()
    model.generation_config.repetition_penalty = 5.0  # settings of the model must not count
    return Writer(make_spec(fields, "test"), tokenizer, model, torch.device("cpu"))


def test_written_answers_depend_on_the_step_and_the_sample_alone(writer: Any, taught: Corpus) -> None:
    def write(rows: list[list[int]], step: int = 3) -> list[list[int]]:
        made, new_rows, weights = writer(taught, rows, step, lambda: None)
        assert [len(row) for row in rows] == [len(row) for row in new_rows]
        assert made.trained.sum() == len(weights)
        # The weight of every new answer is the former weight of all tokens with loss of the sample.
        counts = taught.trained_counts()[[sample for row in rows for sample in row]]
        assert float(weights.sum()) == pytest.approx(float(counts.sum()), rel=1e-5)
        spans = [slice(int(a), int(b)) for a, b in itertools.pairwise(made.starts)]
        for span, sample in zip(spans, (s for row in rows for s in row), strict=True):
            old = slice(int(taught.starts[sample]), int(taught.starts[sample + 1]))
            first = int(np.flatnonzero(made.trained[span])[0])
            assert np.array_equal(made.tokens[span][:first], taught.tokens[old][:first])
            assert not taught.trained[old][:first].any() and taught.trained[old][first]
            assert first < span.stop - span.start <= old.stop - old.start
        return [made.tokens[span].tolist() for span in spans]

    alone = [write([[sample]])[0] for sample in range(12)]
    packed = write([[0, 1, 2], [3, 4], [5, 6, 7, 8], [9, 10, 11]])
    assert packed == alone
    assert write([[5]], step=4)[0] != alone[5]
    made, rows, weights = writer(taught, [], 3, lambda: None)
    assert len(made) == 0 and rows == [] and weights.tolist() == [0]


def test_written_tokens_have_the_probabilities_of_the_student(writer: Any, tokenizer: Any) -> None:
    from transformers import LogitsProcessorList

    logits = torch.randn(1, len(tokenizer) + 3, generator=torch.Generator().manual_seed(1)) * 3
    count = 4000
    uniform = torch.from_numpy(np.random.default_rng(1).random((count, 1)))
    for temperature in (1.0, 2.0):
        sampler = LogitsProcessorList([Sampler(uniform, 5, len(tokenizer), temperature)])
        drawn = sampler(torch.zeros(count, 5), logits.expand(count, -1)).argmax(-1)
        wanted = (logits[0, : len(tokenizer)] / temperature).softmax(-1)
        found = torch.bincount(drawn, minlength=len(tokenizer)) / count
        likely = wanted > 0.02
        assert likely.sum() > 3 and len(found) == len(tokenizer)
        assert float((found - wanted)[likely].abs().max()) < 0.025
