"""A training loop over transformers and peft alone, as simple as can be: the trainer has to agree with it.

It imports nothing of the trainer, packs nothing, and runs in one process. All that it reads of a run is the order: the samples
of every step, as the run recorded them.
"""

import json
import math
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

# The rows of every step; a row is the places of its samples in the dataset.
Steps: TypeAlias = tuple[tuple[tuple[int, ...], ...], ...]

WORDS = ["the", "node", "of", "a", "cluster", "reads", "its", "rows", "and", "sends", "gradients", "to", "all", "ranks", "after", "a", "step;", "why", "does", "it", "wait?"]  # fmt: skip


@dataclass(frozen=True)
class Work:
    """What to train, for every side that is compared. The settings are fields of the run spec; `dataset` has chats only."""

    model: str
    dataset: str
    lora_r: int
    lr: float
    lora_alpha: float = 16.0
    weight_decay: float = 0.1
    max_grad_norm: float = 1.0
    batch_size: int = 2
    seed: int = 7
    steps: Steps = ()

    def fields(self) -> dict[str, Any]:
        """Return the settings as fields of the run spec, which refuses a setting of an adapter if there is none."""
        left_out = {"steps"} if self.lora_r else {"steps", "lora_alpha"}
        return {name: value for name, value in asdict(self).items() if name not in left_out}

    @property
    def chats(self) -> list[list[dict[str, str]]]:
        """The messages of every sample of the dataset."""
        return [json.loads(line)["messages"] for line in Path(self.dataset).read_text("utf-8").splitlines()]


def write_chats(file: Path, count: int) -> Path:
    """Write chats with one to three answers and different lengths."""
    draw = random.Random(1)

    def text() -> str:
        return " ".join(draw.choices(WORDS, k=draw.randint(1, 10)))

    with file.open("w") as lines:
        for _ in range(count):
            roles = ("user", "assistant") * draw.randint(1, 3)
            lines.write(json.dumps({"messages": [{"role": role, "content": text()} for role in roles]}) + "\n")
    return file


def recorded_steps(run_dir: Path) -> Steps:
    """Return the order of a run over all of its ranks. The rows of a step are sorted, because every rank records its own."""
    steps: dict[int, list[tuple[int, ...]]] = {}
    for file in sorted((run_dir / "samples").glob("rank*.jsonl")):
        for line in file.read_text().splitlines():
            record = json.loads(line)
            steps.setdefault(record["step"], []).extend(tuple(row) for row in record["rows"])
    assert sorted(steps) == list(range(1, len(steps) + 1)), f"{run_dir}: a step has no record"
    return tuple(tuple(sorted(steps[step])) for step in sorted(steps))


def initial_model(work: Work) -> Any:
    """Return the model in 32 bits, with the adapter that the seed defines."""
    torch.manual_seed(work.seed)
    model = AutoModelForCausalLM.from_pretrained(work.model, dtype=torch.float32)
    if not work.lora_r:
        return model
    lora = {"r": work.lora_r, "lora_alpha": work.lora_alpha, "target_modules": "all-linear"}
    return get_peft_model(model, LoraConfig(**lora, task_type="CAUSAL_LM"))


def _batch(samples: Sequence[Any], pad: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return ids, attention mask and labels of samples, int64 [samples, T] each; labels are -100 without loss."""
    ids = [torch.tensor(sample["input_ids"]) for sample in samples]
    trained = [torch.tensor(sample["assistant_masks"]) == 1 for sample in samples]
    labels = [torch.where(mask, tokens, -100) for tokens, mask in zip(ids, trained, strict=True)]

    def padded(parts: list[torch.Tensor], value: int) -> torch.Tensor:
        return torch.nn.utils.rnn.pad_sequence(parts, batch_first=True, padding_value=value)

    return padded(ids, pad), padded([torch.ones_like(tokens) for tokens in ids], 0), padded(labels, -100)


def train_plain(work: Work, out: Path) -> list[float]:
    """Train, write the weights into `out`, and return the loss of every step: the mean over its tokens with loss."""
    tokenizer = AutoTokenizer.from_pretrained(work.model)
    options = {"return_dict": True, "return_assistant_tokens_mask": True}
    encoded = [tokenizer.apply_chat_template(chat, **options) for chat in work.chats]
    pad = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    model = initial_model(work).train()
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    decayed, others = [w for w in weights if w.ndim > 1], [w for w in weights if w.ndim < 2]
    groups = [{"params": decayed, "weight_decay": work.weight_decay}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=work.lr)
    losses = []
    for step, rows in enumerate(work.steps):
        samples = [encoded[index] for row in rows for index in row]
        parts = [_batch(samples[i : i + work.batch_size], pad) for i in range(0, len(samples), work.batch_size)]
        tokens = sum(int((labels[:, 1:] != -100).sum()) for _, _, labels in parts)
        losses.append(0.0)
        for ids, mask, labels in parts:
            logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, :-1]
            loss = F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), reduction="sum") / tokens
            loss.backward()
            losses[-1] += loss.item()
        torch.nn.utils.clip_grad_norm_(weights, work.max_grad_norm)
        for group in optimizer.param_groups:
            group["lr"] = work.lr * (1 + math.cos(math.pi * step / len(work.steps))) / 2
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(out)
    return losses


def loss_difference(one: Sequence[float], two: Sequence[float]) -> float:
    """Return the largest difference between the losses of the same step; NaN if one is NaN."""
    return float(torch.tensor([first - second for first, second in zip(one, two, strict=True)]).abs().max())


def weight_difference(one: Path, two: Path) -> float:
    """Return the largest difference between the weights in two folders; infinite if their names or shapes differ, NaN if a
    weight is NaN.

    For an adapter, the weights are what it adds to those of the model. Single elements of its factors differ more: AdamW divides a
    gradient by its size, so rounding decides the step of an element whose gradient is near 0.
    """
    first, second = _saved(one), _saved(two)
    if {name: weight.shape for name, weight in first.items()} != {name: w.shape for name, w in second.items()}:
        return math.inf
    # The maximum of a tensor is NaN if one value is; that of Python is not.
    return float(torch.stack([(weight - second[name]).abs().max() for name, weight in first.items()]).max())


def _saved(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    found = {name: weight.float() for file in folder.glob("*.safetensors") for name, weight in load_file(file).items()}
    assert found, f"no weights in {folder}"
    config = folder / "adapter_config.json"
    if not config.exists():
        return found
    about = json.loads(config.read_text())
    return {
        name: about["lora_alpha"] / about["r"] * found[name.replace("lora_A", "lora_B")] @ weight
        for name, weight in found.items()
        if "lora_A" in name
    }
