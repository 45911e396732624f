"""Completions that a model writes while it trains. Their random numbers are functions of keys such as seed, step and sample.

So a resumed run, and any number of ranks, draw the same.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from trainer.models.tokenizer_output import end_ids


def uniform(count: int, *key: int) -> np.ndarray:
    """Return numbers from 0 up to 1, float64 [count], that depend only on `key`."""
    return np.random.Philox(np.random.SeedSequence([*key])).random_raw(count) / 2.0**64


class TokenSampler(LogitsProcessor):
    """Leaves one token of each row, drawn by the inverse of the cumulated probabilities."""

    def __init__(self, draws: torch.Tensor, width: int, tokens: int, temperature: float) -> None:
        """Args:
        draws: numbers from 0 up to 1, float64 [rows, tokens to write].
        width: tokens of the prompts.
        tokens: tokens of the tokenizer; the model may have more.
        """
        self._draws, self._width, self._tokens, self._temperature = draws, width, tokens, temperature

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        place = input_ids.shape[1] - self._width
        shares = (scores[:, : self._tokens].double() / self._temperature).softmax(-1).cumsum(-1)
        drawn = self._draws[:, place : place + 1] * shares[:, -1:]
        token = torch.searchsorted(shares, drawn, right=True).clamp(max=shares.shape[1] - 1)
        return torch.full_like(scores, -torch.inf).scatter(1, token, 0.0)


class CompletionWriter:
    """Writes completions with a model that trains, without the model's own settings, such as a penalty for repetition."""

    def __init__(self, tokenizer: Any, model: Any, device: torch.device, temperature: float) -> None:
        """`model`: in full, with its adapters."""
        self._device, self._count, self._temperature = device, len(tokenizer), temperature
        self._model = model.get_base_model() if hasattr(model, "get_base_model") else model
        self.ends = {*end_ids(tokenizer, self._model.generation_config), tokenizer.eos_token_id} - {None}
        self._config = GenerationConfig(
            do_sample=False,
            use_cache=True,
            eos_token_id=sorted(self.ends) or None,
            pad_token_id=tokenizer.pad_token_id or 0,
        )

    def write(
        self, prompts: Sequence[Sequence[int]], limits: Sequence[int], keys: Sequence[tuple[int, ...]]
    ) -> list[list[int]]:
        """Return the tokens that the model writes after each prompt, at most `limits` of them, with the one that ends them.

        `keys`: what the random numbers of every completion depend on.
        """
        width, most = max(map(len, prompts)), max(limits)
        ids = torch.tensor([[0] * (width - len(prompt)) + [*prompt] for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        draws = torch.from_numpy(np.stack([uniform(most, *key) for key in keys])).to(self._device)
        sampler = TokenSampler(draws, width, self._count, self._temperature)
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
        return ids[: next((place for place, token in enumerate(ids, 1) if token in self.ends), len(ids))]


def groups_that_fit(lengths: Sequence[tuple[int, int]], places: int, longest: int) -> Iterator[list[int]]:
    """Yield the indices of completions that are written at once, in order.

    `lengths`: tokens of the prompt, and at most of the completion. `places`: tokens of a group, with padding, at most.
    `longest`: tokens of a row at most; with padding, too.
    """
    group: list[int] = []
    prompt = limit = 0
    for index, (start, new) in enumerate(lengths):
        prompt, limit = max(prompt, start), max(limit, new)
        if group and ((len(group) + 1) * (prompt + limit) > places or prompt + limit > longest):
            yield group
            group, prompt, limit = [], start, new
        group.append(index)
    if group:
        yield group
