"""The default name of a run, and the digest that is a part of it."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.config.fields import metadata
from trainer.config.presets import FORMER_DATASET, OBSERVATORY

if TYPE_CHECKING:
    from trainer.config.run_spec import RunSpec

# Fields that count only if they are set, so that a run of an earlier version keeps its default name.
_LATER_FIELDS = (
    "script",
    "dataset_config",
    "columns",
    "system",
    "distill_alpha",
    "distill_temperature",
    "teacher",
    "gkd_beta",
    "averaging_rank",
    "comm_dtype",
    "shared_seed",
    "data_part",
    "method",
    "grpo_group_size",
    "grpo_max_tokens",
    "grpo_temperature",
    "grpo_beta",
    "grpo_epsilon",
    "grpo_epsilon_high",
    "grpo_iterations",
    "grpo_loss",
    "grpo_scale_rewards",
    "preference_beta",
    "preference_loss",
    "preference_label_smoothing",
    "preference_precompute",
    "kto_desirable_weight",
    "kto_undesirable_weight",
)


def spec_digest(spec: RunSpec) -> str:
    """Return 6 hex digits that identify all fields of a spec that a resumed run must not change."""
    fields = type(spec).model_fields
    # Fields keep their former names here for the same reason.
    fixed = {
        name: value
        for name, value in spec.model_dump(mode="json").items()
        if not metadata(fields[name])["mutable"]
        and not (name in _LATER_FIELDS and value == fields[name].default)
        and not (name == "reward" and not value)  # a list, which as JSON does not equal its default
    }
    if fixed["dataset"] == OBSERVATORY and (fixed.get("script") or fixed["fake_data"]):
        fixed["dataset"] = FORMER_DATASET  # they have no dataset, and the default was another
    fixed |= {
        "ignore_keys": fixed.pop("keep_going"),
        "gradient_wire": "32",
        "diloco_wire": "bf16",
    }  # former names and defaults
    fixed["packing"] = bool(fixed["packing"])  # packing was true before it was auto
    return hashlib.sha256(json.dumps(fixed, sort_keys=True).encode()).hexdigest()[:6]


def default_name(spec: RunSpec) -> str:
    """Return the name of the model, or of the script, and the digest of the spec."""
    name = Path(spec.script).stem if spec.script else Path(spec.model).name
    return f"{file_stem(name) or 'run'}-{spec_digest(spec)}"


def file_stem(name: str) -> str:
    """Return a name with only characters that a run, and a file of the store, may have; it may be empty."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-._")[:40]
