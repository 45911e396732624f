"""Greedy answers of a finished run to prompts of its dataset: what a deployed copy of the model must answer.

`RUN_DIR/deploy/answers.json` keeps them; it belongs to the digest of the weights. A run that has a small model completely
in one process writes it when it ends. For other runs, the first deployment computes the answers.
"""

import dataclasses
import datetime
import itertools
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.common.errors import first_line
from trainer.common.files import to_json, write_atomic

if TYPE_CHECKING:
    from torch import nn

    from trainer.config import RunSpec
    from trainer.data.shapes import Sample

COUNT = 20  # prompts
MAX_TOKENS = 28  # tokens of an answer; Ollama aborts an answer that repeats one token 30 times
MAX_PROMPT = 2000  # characters
MAX_SAMPLES = 2000  # of each dataset, from which the prompts are chosen
MAX_PARAMETERS = 200_000_000  # of a model that answers at the end of its run, on the CPU
TIME_LIMIT = 30.0  # s at the end of a run, after which no further batch starts
_TEXT_WORDS = 12  # of a sample of plain text
_ROLES = ("system", "user", "assistant")


def greedy_answers(spec: "RunSpec", run_dir: Path, weights: str, count: int = COUNT) -> dict[str, Any]:
    """Return the prompts and answers of a run; compute them if they are missing.

    `weights`: digest of the adapter or the model. `count`: maximum number of prompts, if they are missing. Raises
    UserError: the dataset cannot be read.

    Returns:
        `weights`; `created`, the date; `max_tokens`; `bos`, text of what the tokenizer puts before a raw prompt; `stop`, text of the token that
        ends an answer where it is not the tokenizer's own end, or empty; `prompts`, each with `messages` or `prompt`; `answers`,
        one text for each.
    """
    if known := known_answers(run_dir, weights):
        return known
    prompts = choose_prompts(_samples(spec), count)
    return _write(run_dir, weights, prompts, *(_load(spec, run_dir) if prompts else (None, None)))


def known_answers(run_dir: Path, weights: str) -> dict[str, Any] | None:
    """Return the answers that a run keeps; None if it has none of these weights."""
    try:
        known = json.loads(_file(run_dir).read_text(encoding="utf-8"))
        # The answers of earlier versions did not stop at the end of a turn.
        return dict(known) if known["weights"] == weights and "stop" in known else None
    except (OSError, ValueError, LookupError, TypeError):
        return None


def keep_answers(spec: "RunSpec", model: "nn.Module", run_dir: Path, weights: str) -> None:
    """Write the answers at the end of a run. Never fails; a failure is printed. A large model is left to the first deployment.

    The model is read again from its files: in this process, its weights may be quantized or rounded to 16 bits.
    `model`: the model of the run, for its size. `weights`: digest of the adapter or the model.
    """
    if spec.fake_data or sum(parameter.numel() for parameter in model.parameters()) > MAX_PARAMETERS:
        return
    try:
        prompts = choose_prompts(_samples(spec))
        if prompts:
            _write(run_dir, weights, prompts, *_load(spec, run_dir), time.monotonic() + TIME_LIMIT)
    except Exception as error:
        print(f"warning: no greedy answers ({first_line(error)}): the first deployment computes them")


def _file(run_dir: Path) -> Path:
    return run_dir / "deploy" / "answers.json"


def _samples(spec: "RunSpec") -> "Iterable[Sample]":
    """Yield the first samples of every dataset."""
    # These imports take longer than all else where the answers are known.
    from trainer.config.methods import METHODS
    from trainer.data.samples import iter_source
    from trainer.data.shapes import with_system_in_first_question

    for source in spec.sources:
        for sample in itertools.islice(iter_source(source, data=METHODS[spec.method].data), MAX_SAMPLES):
            prepend = spec.system == "prepend"
            messages = with_system_in_first_question(sample.messages) if prepend else sample.messages
            yield dataclasses.replace(sample, messages=tuple(messages))


def _write(
    run_dir: Path,
    weights: str,
    prompts: list[dict[str, Any]],
    model: Any,
    tokenizer: Any,
    deadline: float = float("inf"),
) -> dict[str, Any]:
    from trainer.data.text_tokenizer import first_tokens
    from trainer.models.tokenizer_output import other_end

    record = {
        "weights": weights,
        "created": datetime.datetime.now().replace(microsecond=0).isoformat(),
        "max_tokens": MAX_TOKENS,
        "bos": tokenizer.decode(first_tokens(tokenizer)) if prompts else "",
        "stop": other_end(tokenizer) if prompts else "",
        "prompts": prompts,
        "answers": answer(model, tokenizer, prompts, deadline) if prompts else [],
    }
    _file(run_dir).parent.mkdir(exist_ok=True)
    write_atomic(_file(run_dir), to_json(record, indent=1))
    return record


def choose_prompts(samples: "Iterable[Sample]", count: int = COUNT) -> list[dict[str, Any]]:
    """Return up to `count` different prompts, spread evenly over the samples."""
    found: dict[str, dict[str, Any]] = {}
    for sample in samples:
        prompt = _prompt(sample)
        if prompt:
            found.setdefault(json.dumps(prompt), prompt)
    prompts = list(found.values())
    step = max(1, len(prompts) // count)
    return prompts[::step][:count]


def _prompt(sample: "Sample") -> dict[str, Any]:
    """Return the messages before the last answer of a chat, or the first words of a text; empty if there is no prompt."""
    if sample.messages:
        messages: list[Mapping[str, str]] = list(sample.messages)
        while messages and messages[-1]["role"] != "user":
            messages.pop()
        # A server gets the role and the content of each message, and no more.
        known = all(
            message["role"] in _ROLES and message["content"].strip() and message.keys() <= {"role", "content"}
            for message in messages
        )
        size = sum(len(message["content"]) for message in messages)
        return {"messages": [dict(m) for m in messages]} if messages and known and size <= MAX_PROMPT else {}
    text = sample.pieces[0][0] if sample.pieces else ""
    if sample.pieces and sample.pieces[0][1]:
        words = text.split(" ")  # at most half of them: the model generates the rest
        text = " ".join(words[: min(_TEXT_WORDS, max(1, len(words) // 2))])
    return {"prompt": text} if text.strip() and len(text) <= MAX_PROMPT else {}


def _load(spec: "RunSpec", run_dir: Path) -> tuple[Any, Any]:
    """Return the model and the tokenizer of a finished run, on the CPU.

    An adapter is not merged: the answers of a merged model are compared with these.
    """
    import torch
    from transformers import AutoTokenizer

    from trainer.model_files.base_weights import load_causal_model
    from trainer.models.adapter_merge import adapted_model

    folder = run_dir / ("adapter" if spec.lora_r else "model")
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    if spec.lora_r:
        return adapted_model(spec, folder).get_base_model(), tokenizer
    return load_causal_model(str(folder), dtype=torch.float32), tokenizer


def answer(
    model: Any, tokenizer: Any, prompts: Sequence[Mapping[str, Any]], deadline: float = float("inf")
) -> list[str]:
    """Return the greedy answer to each prompt; all prompts are one batch.

    Raises:
        TimeoutError: the deadline (of time.monotonic) has passed.
        TemplateError: the chat template rejects a prompt, or exceeds a limit.
    """
    from trainer.data.text_tokenizer import first_tokens, token_ids
    from trainer.models.greedy import greedy, prompt_rows

    chats = iter(prompt_rows(tokenizer, [prompt["messages"] for prompt in prompts if "messages" in prompt]))
    first = first_tokens(tokenizer)
    rows = [
        next(chats) if "messages" in prompt else [*first, *token_ids(tokenizer, prompt["prompt"])] for prompt in prompts
    ]
    found = greedy(model, tokenizer, rows, MAX_TOKENS, deadline=deadline)
    return [str(tokenizer.decode(each.tokens, skip_special_tokens=True)) for each in found]
