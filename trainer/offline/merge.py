"""Merge the adapters or models of several runs into one, evaluated beside each part, or let them vote on answers.

``python -m trainer merge`` reads a request as JSON from standard input and prints the result as one JSON line.
"""

import json
import re
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from trainer.common.errors import UserError, first_line
from trainer.common.files import atomic_folder, sha256_file, sha256_tree, to_json, write_atomic
from trainer.common.finite import all_finite
from trainer.common.inputs import RUN_FILES, refuse_special_files
from trainer.config import RunSpec
from trainer.data.corpus import Corpus, preferred, select
from trainer.data.encode import encoded_dataset
from trainer.data.order import held_out
from trainer.data.packing import IGNORED, collate
from trainer.method.module_with_loss import ModelWithLoss
from trainer.model_files.base_digest import base_digest
from trainer.model_files.base_weights import load_causal_model
from trainer.models.adapter_merge import LogitCheck, adapted_model, merge_into_base, saved_model, untie_different
from trainer.models.greedy import answer_loss, greedy, prompt_rows
from trainer.models.model import load_tokenizer
from trainer.models.tokenizer_output import add_end_token, add_old_rope_keys, end_ids, save_tokenizer
from trainer.offline import answer_request
from trainer.spec import read_spec

MERGED = "merged"  # name of the merged adapter in memory


@dataclass(frozen=True)
class Part:
    """One of the runs. `folder` holds its spec.yml, and its adapter/ or model/."""

    run: str
    folder: Path
    spec: RunSpec

    @property
    def weights(self) -> Path:
        return self.folder / ("adapter" if self.spec.lora_r else "model")

    @property
    def adapter(self) -> tuple[int, bool]:
        """The rank of its adapter, which is not that of the spec after strategy=averaging, and whether it adapts experts. Raises UserError."""
        path = self.weights / "adapter_config.json"
        try:
            config = json.loads(path.read_text(encoding="utf-8"))
            return int(config["r"]), bool(config.get("target_parameters"))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"merge: {path}: cannot read the rank of the adapter: {first_line(error)}") from None

    @cached_property
    def base(self) -> tuple[str, str]:
        """The digest of the base model's files, empty without them; and the digest at the end of its name in the store, or its name."""
        name = Path(self.spec.model).name
        digest = re.fullmatch(r".*-([0-9a-f]{12})", name)
        return base_digest(self.spec.model), digest[1] if digest else name


@dataclass(frozen=True)
class MergeRequest:
    """What to merge. `parts` are in the order of `weights`; `target` is the run folder of the result."""

    parts: Sequence[Part]
    method: str
    weights: Sequence[float]
    density: float
    target: Path
    prompts: Sequence[Sequence[Mapping[str, str]]] = ()
    max_tokens: int = 128

    @property
    def device(self) -> torch.device:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def read_request(values: Mapping[str, Any]) -> MergeRequest:
    """Return the request; the parts have one base model. Raises UserError if they do not go together."""
    parts = []
    for entry in values["parts"]:
        folder = Path(entry["folder"])
        refuse_special_files(folder, "merge", RUN_FILES)
        spec = read_spec(folder / "spec.yml", {}, str(folder))
        part = Part(entry["run"], folder, spec)
        if not part.weights.is_dir():
            raise UserError(f"merge: run {part.run} has no {part.weights.name} in {folder}: wait until it is finished")
        parts.append(part)
    first = parts[0]
    for part in parts[1:]:
        digests = {part.base[0], first.base[0]}
        if len(digests) > 1 if all(digests) else part.base[1] != first.base[1]:
            raise UserError(
                f"merge: run {part.run} has another base model ({part.spec.model}) than {first.run} ({first.spec.model}): merge runs of "
                "the same model"
            )
    _check_method(str(values["method"]), parts)
    weights = values["weights"] or [1.0] * len(parts)
    total = sum(weights)  # otherwise a soup would have the base as often as this
    return MergeRequest(
        parts=parts,
        method=str(values["method"]),
        weights=[float(weight) / total for weight in weights],
        density=float(values["density"]),
        target=Path(values["target"]),
        prompts=values.get("prompts", ()),
        max_tokens=int(values.get("max_tokens", 128)),
    )


def _check_method(method: str, parts: Sequence[Part]) -> None:
    full = [part.run for part in parts if not part.spec.lora_r]
    if method in ("soup", "vote"):
        return
    if full:
        raise UserError(f"merge: method {method} merges adapters, and run {full[0]} is a full model: use method=soup")
    if experts := next((part.run for part in parts if part.adapter[1]), ""):
        raise UserError(
            f"merge: method {method} cannot merge adapters of experts, which run {experts} has: use method=soup"
        )
    ranks = set() if method == "cat" else {part.adapter[0] for part in parts}
    if len(ranks) > 1:
        raise UserError(f"merge: method {method} needs adapters of one rank, got {sorted(ranks)}: use method=cat")


def merge(request: MergeRequest) -> dict[str, Any]:
    """Merge the parts, evaluate all, and write the result into the run folder.

    Returns `eval_loss` of the result, `base_loss`, `parts` with the `run` and `eval_loss` of each, `rank`, and the path
    of the `adapter` or `model` with its digest. Raises UserError: the parts do not fit together, or the result is not
    finite; DiskError: the disk is full or not writable.
    """
    if request.method == "soup":
        return _soup(request)
    first = request.parts[0]
    model = _adapted(request)
    names = [f"part{number}" for number in range(len(request.parts))]
    options = {"density": request.density} if request.method.endswith("ties") else {}
    torch.manual_seed(first.spec.seed)  # dare drops weights at random
    try:
        model.add_weighted_adapter(names, list(request.weights), MERGED, combination_type=request.method, **options)
    except ValueError as error:
        raise UserError(f"merge: {first_line(error)}: use method=cat, or runs with the same lora_targets") from None
    corpus, module = _held_out(request), _loss_of(model, request)
    with model.disable_adapter():
        base_loss = evaluate(module, corpus, first.spec)
    losses = []
    for name in (*names, MERGED):
        model.set_adapter(name)
        losses.append(evaluate(module, corpus, first.spec))
    if not all_finite(model.parameters()):
        raise UserError("merge: the merged weights are not finite: use other weights, or leave a run out")
    rank = int(model.peft_config[MERGED].r)
    check = LogitCheck(model, torch.float32)  # MERGED is the active adapter
    with atomic_folder(request.target / "adapter", "merge") as aside:
        model.save_pretrained(aside, selected_adapters=[MERGED], save_embedding_layers=False)
        for file in list((aside / MERGED).iterdir()):  # peft writes a named adapter into a folder of its own
            file.rename(aside / file.name)
        (aside / MERGED).rmdir()
        save_tokenizer(load_tokenizer(str(first.weights)), aside)
        if (ends := first.weights / "generation_config.json").is_file():
            shutil.copy(ends, aside)
        model.load_adapter(str(aside), "saved")
        model.set_adapter("saved")
        check(model)
    spec = first.spec.model_copy(
        update={"run": request.target.name, "lora_r": rank, "lora_alpha": float(rank)} if rank else {}
    )
    return _finish(request, spec, "adapter", losses, base_loss) | {"rank": rank}


def _soup(request: MergeRequest) -> dict[str, Any]:
    """Average the full weights of all parts, each with its adapter merged into the base."""
    first, corpus = request.parts[0], _held_out(request)
    base_loss = evaluate(_loss_of(_base(first), request), corpus, first.spec)
    total: dict[str, torch.Tensor] = {}
    losses = []
    for part, weight in zip(request.parts, request.weights, strict=True):
        model = _full_model(part)
        losses.append(evaluate(_loss_of(model, request), corpus, first.spec))
        for name, value in model.state_dict().items():
            if not value.is_floating_point():
                continue
            share = value.detach().float().cpu() * weight
            total[name] = total[name] + share if name in total else share
    untie_different(model, total)
    model.load_state_dict(total, strict=False)
    if not all_finite(model.parameters()):
        raise UserError("merge: the merged weights are not finite: use other weights, or leave a run out")
    losses.append(evaluate(_loss_of(model, request), corpus, first.spec))
    with atomic_folder(request.target / "model", "merge") as aside:
        tokenizer = load_tokenizer(str(first.weights))
        add_end_token(model.generation_config, tokenizer)
        model.save_pretrained(aside)
        add_old_rope_keys(aside)
        save_tokenizer(tokenizer, aside)
        LogitCheck(model, torch.float32)(saved_model(aside))
    spec = first.spec.model_copy(update={"run": request.target.name, "lora_r": 0})
    return _finish(request, spec, "model", losses, base_loss)


def _finish(
    request: MergeRequest, spec: RunSpec, kind: str, losses: Sequence[float | None], base_loss: float | None
) -> dict[str, Any]:
    """Write spec.yml and result.json of the merged run; return the result."""
    final = request.target / kind
    result = {
        "run": request.target.name,
        "status": "finished",
        "method": request.method,
        "weights": list(request.weights),
        "parts": [{"run": part.run, "eval_loss": loss} for part, loss in zip(request.parts, losses, strict=False)],
        "base_loss": base_loss,
        "eval_loss": losses[-1],
        kind: str(final),
        f"{kind}_sha256": sha256_tree(final),
    }
    write_atomic(request.target / "spec.yml", spec.to_yaml())
    write_atomic(request.target / "result.json", to_json(result, indent=1))
    return result


def equal_parts(parts: Sequence[Part]) -> list[list[int]]:
    """Return the numbers of the parts with the same weights, from 0, together: a merge of these changes nothing."""
    same: dict[tuple[str, ...], list[int]] = {}
    for number, part in enumerate(parts):
        files = sorted(part.weights.glob("*.safetensors"))
        same.setdefault(tuple(f"{file.name} {sha256_file(file)}" for file in files), []).append(number)
    return [numbers for numbers in same.values() if len(numbers) > 1]


# Models -----------------------------------------------------------------------------------------------------------------


def _base(part: Part) -> Any:
    return load_causal_model(part.spec.model, dtype=torch.float32)


def _adapted(request: MergeRequest) -> Any:
    """Return the base model with the adapters of all parts, named part0, part1, ..."""
    from peft import PeftModel

    model = PeftModel.from_pretrained(_base(request.parts[0]), str(request.parts[0].weights), adapter_name="part0")
    for number, part in enumerate(request.parts[1:], 1):
        model.load_adapter(str(part.weights), adapter_name=f"part{number}")
    return model.eval()


def _full_model(part: Part) -> Any:
    if not part.spec.lora_r:
        return load_causal_model(str(part.weights), dtype=torch.float32)
    return merge_into_base(adapted_model(part.spec, part.weights))


# Evaluation -------------------------------------------------------------------------------------------------------------


def _held_out(request: MergeRequest) -> Corpus:
    """Return the held-out samples of the first run; of preferences, the answers that are to be learned."""
    spec = request.parts[0].spec
    corpus = encoded_dataset(spec, load_tokenizer(str(request.parts[0].weights)), request.target)
    return preferred(select(corpus, sorted(held_out(spec, len(corpus), corpus.sources))))


def _loss_of(model: Any, request: MergeRequest) -> ModelWithLoss:
    return ModelWithLoss(model.to(request.device)).eval()


@torch.no_grad()
def evaluate(module: ModelWithLoss, corpus: Corpus, spec: RunSpec) -> float | None:
    """Return the mean loss per token, one sample per row; None without samples."""
    if not len(corpus):
        return None
    device = next(module.parameters()).device
    config: Any = module.model.config
    pad = getattr(config, "pad_token_id", None) or 0
    loss = tokens = 0.0
    for start in range(0, len(corpus), spec.batch_size):
        rows = [[index] for index in range(start, min(start + spec.batch_size, len(corpus)))]
        ids, positions, labels = (
            torch.from_numpy(array).to(device) for array in collate(corpus, rows, pad=pad, length=None)
        )
        loss += float(module(ids, positions, labels))
        tokens += int((labels[:, 1:] != IGNORED).sum())
    return loss / max(1.0, tokens)


# Votes ------------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def vote(request: MergeRequest) -> dict[str, Any]:
    """Let every part answer every prompt; the answer that most parts give wins, and among equals the likeliest one.

    Returns:
        `answers`: of every prompt the winning `text`, its `votes`, its mean log-probability per token over all parts
        (`logprob`), and `from`, the run that gave it. They are also written to answers.jsonl of the run folder.
    """
    tokenizer = load_tokenizer(str(request.parts[0].weights))
    prompts = prompt_rows(tokenizer, request.prompts)
    answers: list[list[list[int]]] = [[] for _ in prompts]
    for part in request.parts:
        model = _full_model(part).to(request.device).eval()
        end = end_ids(tokenizer, model.generation_config)[-1:]  # that of the template
        found = greedy(model, tokenizer, prompts, request.max_tokens, batch_size=1)
        for said, given in zip(found, answers, strict=True):
            given.append([*said.tokens, *(end if said.ended else [])])
    scores = [[0.0] * len(given) for given in answers]
    for part in request.parts:
        model = _full_model(part).to(request.device).eval()
        for number, (prompt, given) in enumerate(zip(prompts, answers, strict=True)):
            for index, answer in enumerate(given):
                scores[number][index] -= answer_loss(model, prompt, answer) / len(request.parts) if answer else 0.0
    winners = []
    for given, score in zip(answers, scores, strict=True):
        votes = Counter(map(tuple, given))
        best = max(range(len(given)), key=lambda index: (votes[tuple(given[index])], score[index]))
        text = tokenizer.decode(given[best], skip_special_tokens=True)
        winner = {"text": text, "votes": votes[tuple(given[best])], "logprob": score[best]}
        winners.append(winner | {"from": request.parts[best].run})
    request.target.mkdir(parents=True, exist_ok=True)
    path = request.target / "answers.jsonl"
    chats = [
        [*chat, {"role": "assistant", "content": won["text"]}]
        for chat, won in zip(request.prompts, winners, strict=True)
    ]
    lines = [to_json({"messages": chat, **won}) for chat, won in zip(chats, winners, strict=True)]
    write_atomic(path, "".join(line + "\n" for line in lines))
    unanimous = sum(answer["votes"] == len(request.parts) for answer in winners)
    return {"answers": len(winners), "unanimous": unanimous, "path": str(path), "first": winners[:5]}


def main() -> int:
    """Carry out the request on standard input."""
    return answer_request(_answer)


def _answer(values: Mapping[str, Any]) -> dict[str, Any]:
    request = read_request(values)
    result = vote(request) if request.method == "vote" else merge(request)
    return result | {"equal": equal_parts(request.parts)}
