"""What models answer to questions, and how likely the reference answers are to them.

``python -m trainer evaluate`` reads a request as JSON from standard input and prints the result as one JSON line. The controller
judges the answers: those of a server are judged in the same way.
"""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trainer.common.errors import UserError
from trainer.common.inputs import RUN_FILES, refuse_special_files
from trainer.config import RunSpec
from trainer.data.shapes import with_system_in_first_question
from trainer.data.text_tokenizer import first_tokens, token_ids
from trainer.model_files.base_weights import load_causal_model
from trainer.models.adapter_merge import adapted_model
from trainer.models.greedy import answer_loss, greedy, prompt_rows
from trainer.models.model import load_tokenizer
from trainer.models.tokenizer_output import end_ids
from trainer.offline import answer_request
from trainer.spec import make_spec, read_spec


@dataclass(frozen=True)
class EvaluatedModel:
    """A model to evaluate: the result of the run in `folder`, or the base model of that run; or `model`, which belongs to no run."""

    folder: Path
    base: bool
    model: str = ""

    def load(self) -> tuple[Any, Any, RunSpec]:
        """Return the model, its tokenizer and the spec of the run. Raises UserError.

        On the CPU the weights are float32; on a GPU they are as in their files.
        """
        if self.model:
            spec = make_spec({"model": self.model, "fake_data": True}, "the request")
        else:
            spec = read_spec(self.folder / "spec.yml", {}, str(self.folder))
        weights = self.folder / ("adapter" if spec.lora_r else "model")
        if not self.base and not weights.is_dir():
            raise UserError(f"evaluate: run {self.folder.name} has no {weights.name}: wait until it is finished")
        gpu = torch.cuda.is_available()
        dtype = "auto" if gpu else torch.float32
        if self.base:
            model = load_causal_model(spec.model, dtype=dtype)
        elif spec.lora_r:
            model = adapted_model(spec, weights, dtype).get_base_model()
        else:
            model = load_causal_model(str(weights), dtype=dtype)
        tokenizer = load_tokenizer(spec.model if self.base else str(weights))
        return model.to("cuda" if gpu else "cpu").eval(), tokenizer, spec


def evaluate(
    model: Any,
    tokenizer: Any,
    spec: RunSpec,
    questions: Sequence[Mapping[str, Any]],
    max_tokens: int,
    batch_size: int,
    temperature: float = 0.0,
    seeds: Sequence[int] = (),
    as_text: bool = False,
) -> dict[str, Any]:
    """Return the answers of a model, and the losses of the reference answers.

    Args:
        spec: of the run, or of the model.
        questions: each with its `messages` and a `reference`, which may be empty.
        max_tokens: maximum length of an answer.
        batch_size: questions that are answered together.
        temperature: see `greedy`.
        seeds: see `greedy`.
        as_text: ask without the chat template, as a run was trained.

    Returns:
        `seconds` of the generation; `answers`, for each question its `text`, number of `tokens`, whether it is `cut`, and the
        `loss` of the reference, a mean per token in nats, with its `loss_tokens`; None and 0 without a reference.

    Raises UserError: the chat template cannot be rendered.
    """
    prepend = spec.system == "prepend"
    chats = [with_system_in_first_question(q["messages"]) if prepend else q["messages"] for q in questions]
    end = end_ids(tokenizer, model.generation_config)[-1:]  # that of the template
    if as_text:
        texts = [chat[-1]["content"].rstrip() for chat in chats]
        rows = [[*first_tokens(tokenizer), *token_ids(tokenizer, text)] for text in texts]
        end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    else:
        rows = prompt_rows(tokenizer, chats)
    losses: list[tuple[float | None, int]] = []
    for row, question in zip(rows, questions, strict=True):
        reference = question["reference"]
        answer = [*token_ids(tokenizer, f" {reference}" if as_text else reference), *end] if reference else []
        losses.append((answer_loss(model, row, answer), len(answer)) if answer else (None, 0))
    started = time.monotonic()
    found = greedy(model, tokenizer, rows, max_tokens, batch_size=batch_size, temperature=temperature, seeds=seeds)
    seconds = time.monotonic() - started
    answers = [
        {
            "text": str(tokenizer.decode(said.tokens, skip_special_tokens=True)),
            "tokens": len(said.tokens),
            "cut": not said.ended,
            "loss": loss,
            "loss_tokens": tokens,
        }
        for said, (loss, tokens) in zip(found, losses, strict=True)
    ]
    return {"seconds": seconds, "answers": answers}


def trained_on_text(folder: Path) -> bool:
    """Return whether most samples of the run in a folder were plain text, without a chat template."""
    try:
        data = json.loads((folder / "result.json").read_text(encoding="utf-8"))["data"]
        return bool(2 * data.get("texts", 0) > data["samples"])
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return False


def main() -> int:
    """Carry out the request on standard input."""
    return answer_request(_answer)


def _answer(request: Mapping[str, Any]) -> dict[str, Any]:
    subject = EvaluatedModel(Path(request["folder"]), bool(request["base"]), str(request.get("model", "")))
    refuse_special_files(subject.folder, "evaluate", RUN_FILES)
    size, length = int(request["batch_size"]), int(request["max_tokens"])
    how = {"temperature": float(request.get("temperature", 0.0)), "seeds": request.get("seeds", [])}
    as_text = not subject.model and trained_on_text(subject.folder)
    return evaluate(*subject.load(), request["questions"], length, size, **how, as_text=as_text)
