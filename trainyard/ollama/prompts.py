"""Read the prompts that the teachers answer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.common.errors import UserError
from trainer.common.formats import printable
from trainer.common.inputs import path_kind, user_path
from trainer.config import RunSpec
from trainer.data.dataset_files import is_hub_id
from trainer.data.record_keys import ABOUT_ANSWERS
from trainer.data.samples import read_records, source_of
from trainer.data.shapes import to_sample
from trainyard.ollama.distill_options import AnswerOptions
from trainyard.ollama.filters import prompt_text


def read_prompts(path: Path, system: str = "", spec: RunSpec | None = None) -> list[list[dict[str, str]]]:
    """Return the chats of a dataset of prompts, each up to its last user message, without repeats.

    Args:
        path: a file, a folder or a hub id as of a run's `dataset`, in the trainer's shapes with or without the answer, or
            of objects with `prompt`.
        system: system message for chats that have none.
        spec: with `columns`, `dataset_split` and `dataset_config` of the prompts.

    Raises UserError: the dataset cannot be read, or a record has no prompt.
    """
    if not path_kind(path) and not is_hub_id(str(path)):
        raise UserError(f"prompts: no such file: {printable(path)}: give a file or folder of this machine, or a hub id")
    source = spec.model_copy(update={"dataset": str(path)}).sources[0] if spec else source_of(path)
    chats: dict[str, list[dict[str, str]]] = {}
    try:
        for where, record in read_records(source):
            try:
                chat = _chat(record, source.columns)
            except ValueError as error:
                raise UserError(f"{where.removeprefix('dataset: ')}: {error}") from None
            if system and chat[0]["role"] != "system":
                chat.insert(0, {"role": "system", "content": system})
            chats.setdefault(json.dumps(chat, sort_keys=True), chat)
    except UserError as error:
        raise UserError(f"prompts: {str(error).removeprefix('dataset: ')}") from None
    if not chats:
        raise UserError(f'prompts: {path} is empty: expected one JSON object per line, such as {{"prompt": "..."}}')
    return list(chats.values())


def _chat(record: Any, columns: Mapping[str, str]) -> list[dict[str, str]]:
    """Return the messages of a record up to its last user message. Raises ValueError."""
    row = record
    if isinstance(record, dict):
        given = {name: value for name, value in record.items() if value is not None}  # tables have null for no answer
        prompt = given.get("prompt")
        if isinstance(prompt, str) and not {"messages", "conversations"} & given.keys():
            prompt = [{"role": "user", "content": prompt}]
        is_chat = isinstance(prompt, list)
        row = {**given, "messages": prompt} if is_chat else {"output": "", "completion": "", **given}
    sample = to_sample(row, columns, ABOUT_ANSWERS)
    if not sample.messages:
        text, trained = sample.pieces[0]
        if trained:
            raise ValueError("is plain text without a prompt: rename 'text' to 'prompt' if the teacher shall answer it")
        return [{"role": "user", "content": text}]
    messages = [{"role": message["role"], "content": str(message.get("content") or "")} for message in sample.messages]
    while messages and messages[-1]["role"] != "user":
        messages.pop()
    if not messages:
        raise ValueError("has no message of a user")
    return messages


def read_evaluation(options: AnswerOptions, spec: RunSpec | None = None) -> list[str]:
    """Return the texts of the evaluation prompts, none without `eval_prompts`. Raises UserError as `read_prompts`."""
    if not options.eval_prompts:
        return []
    path = user_path(options.eval_prompts, "eval_prompts")
    return [prompt_text(chat) for chat in read_prompts(path, spec=spec)]
