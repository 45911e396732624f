"""Greedy answers of a finished run to prompts of its dataset: what a deployed copy of the model must answer.

`RUN_DIR/deploy/answers.json` keeps them; it belongs to the digest of the weights.
"""

import datetime
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from trainer.config import RunSpec
from trainer.data.samples import Sample, read_dataset
from trainer.files import to_json, write_atomic

COUNT = 20  # prompts
MAX_TOKENS = 28  # tokens of an answer; Ollama aborts an answer that repeats one token 30 times
MAX_PROMPT = 2000  # characters
_TEXT_WORDS = 12  # of a sample of plain text
_ROLES = ("system", "user", "assistant")


def greedy_answers(spec: RunSpec, run_dir: Path, weights: str) -> dict[str, Any]:
    """Return the prompts and answers of a run; compute them if they are not there.

    Args:
        weights: digest of the adapter or the model.

    Returns:
        `weights`; `created`, the date; `max_tokens`; `bos`, text of the token before a raw prompt; `prompts`, each with
        `messages` or `prompt`; `answers`, one text for each.

    Raises:
        UserError: the dataset cannot be read.
    """
    file = run_dir / "deploy" / "answers.json"
    try:
        known = json.loads(file.read_text())
        if known["weights"] == weights:
            return dict(known)
    except (OSError, ValueError, LookupError, TypeError):
        pass
    prompts = choose_prompts(read_dataset(spec))
    answers, bos = _generate(spec, run_dir, prompts)
    record = {
        "weights": weights,
        "created": datetime.datetime.now().replace(microsecond=0).isoformat(),
        "max_tokens": MAX_TOKENS,
        "bos": bos,
        "prompts": prompts,
        "answers": answers,
    }
    file.parent.mkdir(exist_ok=True)
    write_atomic(file, to_json(record, indent=1))
    return record


def choose_prompts(samples: Iterable[Sample], count: int = COUNT) -> list[dict[str, Any]]:
    """Return up to `count` different prompts, spread evenly over the samples."""
    found: dict[str, dict[str, Any]] = {}
    for sample in samples:
        prompt = _prompt(sample)
        if prompt:
            found.setdefault(json.dumps(prompt), prompt)
    prompts = list(found.values())
    step = max(1, len(prompts) // count)
    return prompts[::step][:count]


def _prompt(sample: Sample) -> dict[str, Any]:
    """Return the messages before the last answer of a chat, or the first words of a text; empty if there is no prompt."""
    if sample.messages:
        messages: list[Mapping[str, str]] = list(sample.messages)
        while messages and messages[-1]["role"] != "user":
            messages.pop()
        known = all(message["role"] in _ROLES and message["content"].strip() for message in messages)
        size = sum(len(message["content"]) for message in messages)
        return {"messages": [dict(m) for m in messages]} if messages and known and size <= MAX_PROMPT else {}
    text = sample.pieces[0][0] if sample.pieces else ""
    if sample.pieces and sample.pieces[0][1]:
        text = " ".join(text.split(" ")[:_TEXT_WORDS])
    return {"prompt": text} if text.strip() and len(text) <= MAX_PROMPT else {}


def _generate(spec: RunSpec, run_dir: Path, prompts: Iterable[Mapping[str, Any]]) -> tuple[list[str], str]:
    """Return the answer to each prompt, and the text of the token before raw prompts."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    from trainer.data.encode import PLAIN_TEMPLATE

    folder = run_dir / ("adapter" if spec.lora_r else "model")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = tokenizer.chat_template or PLAIN_TEMPLATE
    model: Any = AutoModelForCausalLM.from_pretrained(spec.model if spec.lora_r else folder, dtype=torch.float32)
    if spec.lora_r:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, str(folder)).merge_and_unload()
    model = model.eval()
    ends = model.generation_config.eos_token_id
    config = GenerationConfig(
        do_sample=False,
        max_new_tokens=MAX_TOKENS,
        eos_token_id=tokenizer.eos_token_id if ends is None else ends,
        pad_token_id=tokenizer.pad_token_id or 0,
    )
    model.generation_config = config
    bos = tokenizer.bos_token_id
    answers = []
    for prompt in prompts:
        if "messages" in prompt:
            ids = tokenizer.apply_chat_template(
                prompt["messages"], tokenize=True, add_generation_prompt=True, return_dict=False
            )
        else:
            ids = tokenizer(prompt["prompt"], add_special_tokens=False)["input_ids"]
            ids = ids if bos is None else [bos, *ids]
        with torch.inference_mode():
            out = model.generate(torch.tensor([list(ids)]), attention_mask=torch.ones(1, len(ids), dtype=torch.long))
        answers.append(tokenizer.decode(out[0, len(ids) :], skip_special_tokens=True))
    return answers, tokenizer.bos_token or ""
