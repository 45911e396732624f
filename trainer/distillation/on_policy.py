"""Answers that the student writes while it trains, for the teacher to judge: on-policy distillation.

Agarwal et al., On-Policy Distillation of Language Models, https://arxiv.org/abs/2306.13649. All random numbers are functions of
the seed, the step and the sample: a resumed run and any number of ranks draw the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from trainer.config import RunSpec
from trainer.data.corpus import Corpus
from trainer.data.logprobs import last_answer
from trainer.models.tokenizer_output import end_ids

_STEP_KEY, _SAMPLE_KEY = 0x6B6401, 0x6B6402  # separate these random numbers from those of other purposes


def _uniform(count: int, *key: int) -> np.ndarray:
    """Return numbers from 0 up to 1, float64 [count], that depend only on `key`."""
    return np.random.Philox(np.random.SeedSequence([*key])).random_raw(count) / 2.0**64


def is_on_policy(spec: RunSpec, step: int) -> bool:
    """Return whether the student writes the answers of `step` (from 0), which it does in the fraction gkd_lambda of steps."""
    return bool(spec.gkd_lambda) and float(_uniform(1, spec.seed, step, _STEP_KEY)[0]) < spec.gkd_lambda


class _Sampler(LogitsProcessor):
    """Leaves one token of each row, drawn by the inverse of the cumulated probabilities."""

    def __init__(self, uniform: torch.Tensor, width: int, tokens: int, temperature: float) -> None:
        """Args:
        uniform: numbers from 0 up to 1, float64 [rows, tokens to write].
        width: tokens of the prompts.
        tokens: tokens of the tokenizer; the model may have more.
        """
        self._uniform, self._width, self._tokens, self._temperature = uniform, width, tokens, temperature

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        place = input_ids.shape[1] - self._width
        shares = (scores[:, : self._tokens].double() / self._temperature).softmax(-1).cumsum(-1)
        drawn = self._uniform[:, place : place + 1] * shares[:, -1:]
        token = torch.searchsorted(shares, drawn, right=True).clamp(max=shares.shape[1] - 1)
        return torch.full_like(scores, -torch.inf).scatter(1, token, 0.0)


class Writer:
    """Lets the student regenerate the last answers of samples.

    An answer has at most as many tokens as the one that it replaces, so that the rows keep their size.
    """

    def __init__(self, spec: RunSpec, tokenizer: Any, model: Any, device: torch.device) -> None:
        """`model`: the student, in full."""
        self._spec, self._device, self._count = spec, device, len(tokenizer)
        self._model = model.get_base_model() if hasattr(model, "get_base_model") else model
        self._ends = {*end_ids(tokenizer, self._model.generation_config), tokenizer.eos_token_id} - {None}
        # Without the model's own settings, such as a penalty for repetition: they would change what the student learns from.
        self._config = GenerationConfig(
            do_sample=False,
            use_cache=True,
            eos_token_id=sorted(self._ends) or None,
            pad_token_id=tokenizer.pad_token_id or 0,
        )

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
        for group in self._groups(answers):
            prompts = [tokens[index][: answers[index][0]].tolist() for index in group]
            limits = [answers[index][1] - answers[index][0] for index in group]
            written += self._write(prompts, limits, [samples[index] for index in group], step)
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
        places = iter(range(len(samples)))
        empty = corpus.tokens[:0]
        made = Corpus(np.concatenate([empty, *ids]), np.concatenate([corpus.trained[:0], *masks]), starts)
        # A micro-batch without rows has one place, without loss.
        flat = np.concatenate(weights) if weights else np.zeros(1, np.float32)
        return made, [[next(places) for _ in row] for row in rows], torch.from_numpy(flat).to(self._device)

    def _groups(self, answers: Sequence[tuple[int, int]]) -> Iterator[list[int]]:
        """Yield the indices of samples that are written at once, in order, with at most the places of a micro-batch."""
        length = self._spec.seq_length
        group: list[int] = []
        prompt = limit = 0
        for index, (start, end) in enumerate(answers):
            prompt, limit = max(prompt, start), max(limit, end - start)
            full = (len(group) + 1) * (prompt + limit) > self._spec.batch_size * length
            if group and (full or prompt + limit > length):
                yield group
                group, prompt, limit = [], start, end - start
            group.append(index)
        if group:
            yield group

    def _write(self, prompts: list[list[int]], limits: list[int], samples: list[int], step: int) -> list[list[int]]:
        """Return the tokens that the student writes after each prompt, at most `limits` of them."""
        width, most = max(map(len, prompts)), max(limits)
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        draws = np.stack([_uniform(most, self._spec.seed, step, sample, _SAMPLE_KEY) for sample in samples])
        sampler = _Sampler(torch.from_numpy(draws).to(self._device), width, self._count, self._spec.distill_temperature)
        own = self._model.generation_config
        self._model.generation_config = self._config
        try:
            with torch.no_grad():
                out = self._model.generate(
                    ids.to(self._device),
                    attention_mask=mask.to(self._device),
                    max_new_tokens=most,
                    logits_processor=LogitsProcessorList([sampler]),
                )
        finally:
            self._model.generation_config = own
        return [self._cut(row[:limit]) for row, limit in zip(out[:, width:].tolist(), limits, strict=True)]

    def _cut(self, ids: list[int]) -> list[int]:
        """Return the tokens up to the first one that ends an answer."""
        return ids[: next((place for place, token in enumerate(ids, 1) if token in self._ends), len(ids))]
