"""Answers that the student writes while it trains, for the teacher to judge: on-policy distillation.

Agarwal et al., On-Policy Distillation of Language Models, https://arxiv.org/abs/2306.13649. All random numbers are functions of
the seed, the step and the sample: a resumed run and any number of ranks draw the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from trainer.config import RunSpec
from trainer.data.corpus import Corpus
from trainer.data.logprobs import last_answer
from trainer.models.sampling import CompletionWriter, groups_that_fit, uniform

_STEP_KEY, _SAMPLE_KEY = 0x6B6401, 0x6B6402  # separate these random numbers from those of other purposes


def is_on_policy(spec: RunSpec, step: int) -> bool:
    """Return whether the student writes the answers of `step` (from 0), which it does in the fraction gkd_lambda of steps."""
    return bool(spec.gkd_lambda) and float(uniform(1, spec.seed, step, _STEP_KEY)[0]) < spec.gkd_lambda


class Writer:
    """Lets the student regenerate the last answers of samples.

    An answer has at most as many tokens as the one that it replaces, so that the rows keep their size.
    """

    def __init__(self, spec: RunSpec, tokenizer: Any, model: Any, device: torch.device) -> None:
        """`model`: the student, in full."""
        self._spec, self._device = spec, device
        self._writer = CompletionWriter(tokenizer, model, device, spec.distill_temperature)

    def __call__(
        self, corpus: Corpus, rows: Sequence[Sequence[int]], step: int, heartbeat: Callable[[], None]
    ) -> tuple[Corpus, list[list[int]], torch.Tensor]:
        """Write the answers of the samples in `rows`.

        Args:
            rows: sample indices of every row.
            step: from 0.
            heartbeat: called between groups of samples.

        Returns:
            The samples with their new answers as a corpus; its rows; and the weight of every token with loss, float32 [n] in
            the order of the rows: the new answer of a sample weighs as much as all answers that the sample had.
        """
        samples = [sample for row in rows for sample in row]
        spans = [slice(int(corpus.starts[sample]), int(corpus.starts[sample + 1])) for sample in samples]
        tokens, trained = [corpus.tokens[span] for span in spans], [corpus.trained[span] for span in spans]
        answers = [last_answer(each) for each in trained]
        written: list[list[int]] = []
        lengths = [(start, end - start) for start, end in answers]
        places = self._spec.batch_size * self._spec.seq_length  # those of a micro-batch
        for group in groups_that_fit(lengths, places, self._spec.seq_length):
            prompts = [tokens[index][: answers[index][0]].tolist() for index in group]
            keys = [(self._spec.seed, step, samples[index], _SAMPLE_KEY) for index in group]
            written += self._writer.write(prompts, [lengths[index][1] for index in group], keys)
            heartbeat()
        ids = [
            np.concatenate([old[:start], np.array(new, np.int32)])
            for old, (start, _), new in zip(tokens, answers, written, strict=True)
        ]
        masks = [np.arange(len(each)) >= start for each, (start, _) in zip(ids, answers, strict=True)]
        weights: list[np.ndarray] = [
            np.full(len(new), old.sum() / len(new), np.float32) for old, new in zip(trained, written, strict=True)
        ]
        starts = np.cumsum([0, *map(len, ids)], dtype=np.int64)
        indices = iter(range(len(samples)))
        empty = corpus.tokens[:0]
        made = Corpus(np.concatenate([empty, *ids]), np.concatenate([corpus.trained[:0], *masks]), starts)
        # A micro-batch without rows has one place, without loss.
        flat = np.concatenate(weights) if weights else np.zeros(1, np.float32)
        return made, [[next(indices) for _ in row] for row in rows], torch.from_numpy(flat).to(self._device)
