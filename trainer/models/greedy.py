"""Greedy generation in batches, and the loss of an answer."""

import datetime
import itertools
import math
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from transformers import GenerationConfig

from trainer.data.hf_template import Message
from trainer.data.plain_template import PLAIN_TEMPLATE
from trainer.data.template_process import limited_template
from trainer.models.tokenizer_output import end_ids


class Greedy(NamedTuple):
    """The tokens of an answer without the one that ends it, and whether there was one: otherwise the answer is cut."""

    tokens: list[int]
    ended: bool


def greedy(
    model: Any,
    tokenizer: Any,
    rows: Sequence[Sequence[int]],
    max_tokens: int,
    *,
    batch_size: int = 0,
    deadline: float = math.inf,
) -> list[Greedy]:
    """Return the greedy answer to each prompt.

    A batch is padded on the left. A model that answers differently in a batch answers one prompt at a time.

    Args:
        rows: the tokens of the prompts.
        max_tokens: maximum length of an answer.
        batch_size: prompts of a batch; 0: all.

    Raises:
        TimeoutError: the deadline (of time.monotonic) has passed.
    """
    model.eval()
    ends = end_ids(tokenizer, model.generation_config)
    pad = tokenizer.pad_token_id or 0
    model.generation_config = GenerationConfig(
        do_sample=False, max_new_tokens=max_tokens, eos_token_id=ends or None, pad_token_id=pad
    )

    def generate(some: Sequence[Sequence[int]]) -> list[Greedy]:
        if time.monotonic() > deadline:
            raise TimeoutError("time limit")
        width = max(map(len, some))
        ids = torch.tensor([[pad] * (width - len(row)) + list(row) for row in some])
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in some])
        # Generation stops at its time limit, with answers that are cut.
        limit = None if math.isinf(deadline) else max(0.1, deadline - time.monotonic())
        with torch.inference_mode():
            out = model.generate(ids.to(model.device), attention_mask=mask.to(model.device), max_time=limit)
        if time.monotonic() > deadline:
            raise TimeoutError("time limit")
        return [_to_end(row, ends) for row in out[:, width:].tolist()]

    order = sorted(range(len(rows)), key=lambda index: len(rows[index]))  # little padding
    answers: dict[int, Greedy] = {}
    size = batch_size or len(rows)
    for start in range(0, len(rows), size):
        batch = order[start : start + size]
        answers |= zip(batch, generate([rows[index] for index in batch]), strict=True)
        # The first prompt has the most padding.
        if len(rows[batch[0]]) < len(rows[batch[-1]]) and generate([rows[batch[0]]]) != [answers[batch[0]]]:
            answers |= {index: generate([rows[index]])[0] for index in batch}
    return [answers[index] for index in range(len(rows))]


def _to_end(row: Sequence[int], ends: Sequence[int]) -> Greedy:
    answer = list(itertools.takewhile(lambda token: token not in ends, row))
    return Greedy(answer, len(answer) < len(row))


@torch.inference_mode()
def answer_loss(model: Any, prompt: Sequence[int], answer: Sequence[int]) -> float:
    """Return the mean loss per token of an answer that is not empty."""
    ids = torch.tensor([[*prompt, *answer]], device=model.device)
    logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
    return float(F.cross_entropy(logits, ids[0, len(prompt) :]))


def prompt_rows(tokenizer: Any, chats: Sequence[Sequence[Message]]) -> list[list[int]]:
    """Return the tokens of each chat up to where the answer begins.

    Raises:
        TemplateError: the chat template rejects a chat, or exceeds a limit: code of a rank may have written it.
    """
    if not chats:
        return []
    found = tokenizer.chat_template or PLAIN_TEMPLATE
    source = found.get("default", PLAIN_TEMPLATE) if isinstance(found, dict) else found
    tokens = {name: text for name, text in tokenizer.special_tokens_map.items() if isinstance(text, str)}
    template = limited_template(source, tokens, datetime.datetime.now())
    return [list(tokenizer(template.render(chat), add_special_tokens=False)["input_ids"]) for chat in chats]
