"""What is done with the names of other tools that a table alone cannot translate: one function a kind, named in the tables."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from trainer.config.fields import as_text, is_off
from trainyard.import_file.parallelism import deepspeed, fsdp_config, fsdp_words, reshard
from trainyard.import_file.record_shapes import entries, factory_datasets, first_columns
from trainyard.import_file.translation import HOSTS, Row, Translation, accumulation, is_empty, whole_number

ALL_STEPS = 0.999999  # of the steps: 1 is one step
_LONGEST = 30 * 24 * 3600  # seconds that a run can wait


def run_name(found: Translation, key: str, value: Any) -> None:
    """Name the run after the whole path of the output folder: its last part is often `out` or `sft`."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", str(value)).strip("-._")[-64:].lstrip("-._")
    if name:
        found.weak.append(("run", key, value, name))
    else:
        found.refuse(key, value, "expected a path of letters and digits")


def timeout(found: Translation, key: str, value: Any) -> None:
    """Handle a timeout. What is longer than a run can wait means none."""
    try:
        found.set("collective_timeout", min(float(value), _LONGEST), key, value)
    except (TypeError, ValueError, OverflowError):
        found.refuse(key, value, "expected a number of seconds")


def warmup(found: Translation, key: str, value: Any) -> None:
    """Handle a ratio and a number of steps, of which the number decides if it is not 0."""
    if as_text(value) in ("0", "0.0"):
        found.weak.append(("warmup", key, value, 0.0))
    elif key.endswith("ratio") and as_text(found.seen.get("warmup_steps")) not in ("0", "0.0", "", "none"):
        found.ignore(key, value, "warmup_steps decides")
    elif key.endswith("ratio") and as_text(value) in ("1", "1.0"):
        found.set("warmup", ALL_STEPS, key, value, "all steps")
    else:
        found.set("warmup", value, key, value)


def interval(found: Translation, key: str, value: Any) -> None:
    """Handle a number of steps, which transformers ignores where the strategy says epoch."""
    field, strategies = {
        "eval_steps": ("eval_interval", ("eval_strategy", "evaluation_strategy")),
        "save_steps": ("checkpoint_interval", ("save_strategy",)),
    }[key.rpartition(".")[2].replace("-", "_")]
    if "epoch" in [as_text(found.seen.get(name)) for name in strategies]:
        found.ignore(key, value, f"{strategies[0]}: epoch")
    else:
        found.set(field, value, key, value)


def each_epoch(found: Translation, key: str, value: Any) -> None:
    """Handle a number of times in an epoch: a run counts steps, or does it after each epoch."""
    field = "eval_interval" if key.startswith("eval") else "checkpoint_interval"
    if is_off(value):
        found.ignore(key, value, "it asks for nothing")
    elif whole_number(value) == 1:
        found.set(field, "epoch", key, value)
    else:
        found.refuse(key, value, f"{field} is a number of steps, or epoch: set it")


def text_column(found: Translation, key: str, value: Any) -> None:
    """Handle the column of the text."""
    if value == "text":
        found.ignore(key, value, "the default")
    else:
        found.set("columns", {"text": value}, key, value)


def targets(found: Translation, key: str, value: Any) -> None:
    """Handle the layers of the adapters: names; a regular expression is none."""
    names = value if isinstance(value, list) else [word.strip() for word in str(value).split(",")]
    every = found.seen.get("lora_target_linear")
    if any(set("*[](|\\^$") & set(str(name)) for name in names):
        found.refuse(key, value, "lora_targets takes names of layers, no regular expressions: all-linear is used")
    elif not is_off(every) and not is_empty(every):
        found.ignore(key, value, "lora_target_linear names all layers")
    else:
        found.set("lora_targets", ["all-linear"] if names == ["all"] else names, key, value)


def rows_of_a_rank(found: Translation, key: str, value: Any) -> None:
    """Handle `batch_size` of axolotl: the rows of one rank in a step."""
    rows, micro = whole_number(value), whole_number(found.seen.get("micro_batch_size")) or 1
    if not rows or rows % micro:
        found.refuse(key, value, "expected a multiple of micro_batch_size")
    elif found.seen.get("gradient_accumulation_steps"):
        found.ignore(key, value, "gradient_accumulation_steps decides")
    else:
        found.accumulation[key] = rows // micro


def pretraining(found: Translation, key: str, value: Any) -> None:
    """Handle a dataset of plain text, of which every token is trained."""
    entries(found, key, value)
    found.set("train_on", "all", key, "all")


def plugins(found: Translation, key: str, value: Any) -> None:
    """Handle the list of plugins of axolotl, each by its last word."""
    for plugin in value if isinstance(value, list) else [value]:
        name = str(plugin).rpartition(".")[2]
        if name in ("DiffusionPlugin", "LLMCompressorPlugin", "KDPlugin"):
            found.apply(Row("missing", f"what the plugin {name} does"), key, plugin)
        else:
            found.refuse(key, plugin, "plugins of axolotl do not run here; kernels=auto takes the kernels of Liger")


# What a config of TRL has for one of its trainers alone: names, and losses.
_TRAINERS = {
    "grpo": "num_generations reward_funcs reward_weights epsilon epsilon_high num_iterations scale_rewards dapo grpo dr_grpo",
    "kto": "desirable_weight undesirable_weight kto",
    "dpo": "beta precompute_ref_log_probs max_prompt_length f_divergence_type sigmoid ipo hinge robust",
    "sft": "nll chunked_nll",
}
_LOSS_FIELDS = {"dpo": "preference_loss", "grpo": "grpo_loss"}
_REWARDS = {"think_format_reward": {"use": "format"}, "accuracy_reward": {"use": "exact", "column": "solution"}}


def _loss(value: Any) -> str:
    return as_text(value[0] if isinstance(value, list) and len(value) == 1 else value)


def trl_method(found: Translation) -> str:
    """Return the method of a config of axolotl, whose `rl` says it, or of TRL."""
    if kind := as_text(found.seen.get("rl") or ""):
        return kind
    names = {str(name).replace("-", "_") for name in found.seen} | {_loss(found.seen.get("loss_type"))}
    method = next((name for name, words in _TRAINERS.items() if names & {*words.split()}), "sft")
    return "kto" if method == "dpo" and "label" in first_columns(found) else method


def beta(found: Translation, key: str, value: Any) -> None:
    found.set("grpo_beta" if trl_method(found) == "grpo" else "preference_beta", value, key, value)


def loss_type(found: Translation, key: str, value: Any) -> None:
    method, word = trl_method(found), _loss(value)
    if word not in _TRAINERS.get(method, "").split():
        found.refuse(key, value, f"method={method} has no such loss")
    elif field := _LOSS_FIELDS.get(method):
        found.set(field, word, key, value)
    else:
        found.ignore(key, value, "the default")


def rewards(found: Translation, key: str, value: Any) -> None:
    """Handle the functions that rate completions: names of TRL, or ``package.module.function``, whose file is the reward."""
    names = value if isinstance(value, list) else [value]
    inner = found.seen.get("trl")
    weights = (inner if isinstance(inner, Mapping) else found.seen).get("reward_weights") or [1] * len(names)
    listed = []
    for name, weight in zip(map(str, names), weights, strict=False):
        folder = name.rpartition(".")[0].replace(".", "/")
        use = _REWARDS.get(name) or {"use": name if name.endswith(".py") else f"{folder}.py"}
        if name in _REWARDS or folder:
            listed.append({**use, "weight": weight})
        if name != "think_format_reward":
            what = (
                "equal texts and numbers, no formulas"
                if name in _REWARDS
                else "the functions of the file whose names begin with reward"
            )
            found.refuse(key, name, f"the reward counts {what}: look at it")
    if listed:
        found.set("reward", listed, key, value)


def settle_method(found: Translation) -> None:
    """Set what TRL's trainers do by default: the method, its learning rate, and the tokens with loss by the shape of the data."""
    method, columns = trl_method(found), first_columns(found)
    if method == "sft" and not columns:
        reason = "TRL trains the completion alone of prompt and completion: set train_on=answer for such data"
        found.refuse("completion_only_loss", "auto", reason)
    elif method == "sft" and {"prompt", "completion"} <= columns:
        found.set_default("train_on", "answer", "TRL for prompt and completion")
    elif method != "sft":
        tool = f"TRL for {method.upper()}"
        found.set_default("method", method, tool)
        found.set_default("lr", 1e-6, tool)
        found.refused.add("train_on")
        if method in ("dpo", "kto"):
            found.set_default("lora_dropout", 0.0, tool)
    if method == "grpo":
        prompt, answer = (
            whole_number(found.seen.get(f"max_{each}_length")) or 512 for each in ("prompt", "completion")
        )
        found.set_default("seq_length", prompt + answer, tool)
        if found.values["seq_length"] > answer:
            found.set_default("grpo_max_tokens", answer, tool)
        if "reward" not in found.values:
            found.set_default("reward", ["exact"], "trainyard")
            found.refuse("reward_funcs", "", "the file names no rewards: set reward")


def stage(found: Translation, key: str, value: Any) -> None:
    """Handle the kind of training of LLaMA-Factory: supervised, on plain text, or on preferences."""
    word = as_text(value)
    if word == "dpo" and as_text(found.seen.get("pref_loss")) == "orpo":
        word = "orpo"
    if word == "pt":
        found.set("train_on", "all", key, value)
        found.set_default("packing", True, "LLaMA-Factory for stage pt")
    elif word in ("dpo", "orpo", "kto"):
        found.set("method", word, key, value)
    elif word == "sft":
        found.ignore(key, value, "supervised fine-tuning")
    else:
        found.apply(Row("missing", "training on preferences or rewards"), key, value)


def processes(found: Translation, key: str, value: Any) -> None:
    """Handle the number of ranks, by which the micro-batches of one are multiplied."""
    found.ranks = found.ranks or whole_number(value)
    found.ignore(key, value, HOSTS)


def drop_adapter(found: Translation, reason: str, tool: str) -> None:
    """Train all weights: names of an adapter have no effect in the tool."""
    for name in ("lora_r", "lora_alpha", "lora_dropout", "lora_targets"):
        found.unused.setdefault(reason, []).extend(found.origins.pop(name, []))
        found.values.pop(name, None)
    found.set_default("lora_r", 0, tool)
    found.refused |= {"lora_alpha", "lora_dropout", "lora_targets"}


FUNCTIONS: Mapping[str, Callable[[Translation, str, Any], None]] = {
    "accumulation": accumulation,
    "beta": beta,
    "deepspeed": deepspeed,
    "each_epoch": each_epoch,
    "entries": entries,
    "factory_datasets": factory_datasets,
    "fsdp": fsdp_words,
    "fsdp_config": fsdp_config,
    "interval": interval,
    "loss_type": loss_type,
    "plugins": plugins,
    "pretraining": pretraining,
    "processes": processes,
    "reshard": reshard,
    "rewards": rewards,
    "rows_of_a_rank": rows_of_a_rank,
    "run_name": run_name,
    "stage": stage,
    "targets": targets,
    "text_column": text_column,
    "timeout": timeout,
    "warmup": warmup,
}
