"""What is done with the names of other tools that a table alone cannot translate: one function a kind, named in the tables."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from trainer.config.fields import as_text, is_off
from trainyard.import_file.parallelism import deepspeed, fsdp_config, fsdp_words, reshard
from trainyard.import_file.record_shapes import entries, factory_datasets
from trainyard.import_file.translation import HOSTS, Row, Translation, accumulation, is_empty, whole_number

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
    "deepspeed": deepspeed,
    "each_epoch": each_epoch,
    "entries": entries,
    "factory_datasets": factory_datasets,
    "fsdp": fsdp_words,
    "fsdp_config": fsdp_config,
    "interval": interval,
    "plugins": plugins,
    "pretraining": pretraining,
    "processes": processes,
    "reshard": reshard,
    "rows_of_a_rank": rows_of_a_rank,
    "run_name": run_name,
    "stage": stage,
    "targets": targets,
    "text_column": text_column,
    "timeout": timeout,
    "warmup": warmup,
}
