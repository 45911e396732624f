"""Generation in batches, and the loss of an answer."""

import datetime
import itertools
import math
import time
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from transformers import GenerationConfig

from trainer.data.hf_template import ChatTemplate, Message
from trainer.data.plain_template import PLAIN_TEMPLATE
from trainer.data.text_tokenizer import TextTokenizer
from trainer.models.tokenizer_output import end_ids

_COMPARED = 8  # tokens with which a batch is compared with a prompt alone


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
    temperature: float = 0.0,
    seeds: Sequence[int] = (),
) -> list[Greedy]:
    """Return the greedy answer to each prompt, or one that is drawn.

    A batch is padded on the left. A model that answers differently in a batch answers one prompt at a time. Raises
    TimeoutError: the deadline (of time.monotonic) has passed.

    Args:
        rows: the tokens of the prompts.
        max_tokens: maximum length of an answer.
        batch_size: prompts of a batch; 0: all.
        temperature: 0: greedy answers. Otherwise the batches are those of consecutive prompts, so that the same batch with the
            same seeds has the same answers in any call.
        seeds: with a temperature, a number for each prompt.
    """
    model.eval()
    ends = end_ids(tokenizer, model.generation_config)
    pad = tokenizer.pad_token_id or 0
    common = {"eos_token_id": ends or None, "pad_token_id": pad}
    model.generation_config = GenerationConfig(do_sample=False, max_new_tokens=max_tokens, **common)
    drawn = GenerationConfig(do_sample=True, temperature=temperature or 1.0, max_new_tokens=max_tokens, **common)

    def generate(some: Sequence[Sequence[int]], how: GenerationConfig | None = None) -> list[Greedy]:
        if time.monotonic() > deadline:
            raise TimeoutError("time limit")
        width = max(map(len, some))
        ids = torch.tensor([[pad] * (width - len(row)) + list(row) for row in some])
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in some])
        # Generation stops at its time limit, with answers that are cut.
        limit = None if math.isinf(deadline) else max(0.1, deadline - time.monotonic())
        with torch.inference_mode():
            more = {"generation_config": how} if how else {}
            out = model.generate(ids.to(model.device), attention_mask=mask.to(model.device), max_time=limit, **more)
        if time.monotonic() > deadline:
            raise TimeoutError("time limit")
        return [_to_end(row, ends) for row in out[:, width:].tolist()]

    def draw(batch: Sequence[int]) -> list[Greedy]:
        torch.manual_seed(zlib.crc32(repr([seeds[index] for index in batch]).encode()))
        return generate([rows[index] for index in batch], drawn)

    if temperature:
        size = batch_size or len(rows)
        batches = [range(len(rows))[start : start + size] for start in range(0, len(rows), size)]
        return [
            answer
            for batch in batches
            for answer in (
                draw(batch)
                if _same_in_a_batch(generate, [rows[index] for index in batch], common)
                else [draw([index])[0] for index in batch]
            )
        ]
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


def _same_in_a_batch(generate: Any, rows: Sequence[Sequence[int]], common: dict[str, Any]) -> bool:
    """Return whether the shortest prompt, which has the most padding, has the same first greedy tokens alone."""
    if len({len(row) for row in rows}) < 2:
        return True
    short = GenerationConfig(do_sample=False, max_new_tokens=_COMPARED, **common)
    place = min(range(len(rows)), key=lambda index: len(rows[index]))
    return bool(generate(rows, short)[place] == generate([rows[place]], short)[0])


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
    """Return the tokens of each chat up to where the answer begins. Raises TemplateError: the chat template rejects a chat."""
    if not chats:
        return []
    text = TextTokenizer.of(tokenizer)
    template = ChatTemplate(text.template or PLAIN_TEMPLATE, text.tokens, datetime.datetime.now())
    return [text.tokenize(template.render(chat))[0] for chat in chats]
