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

# Fields that always count, as in the first version. Any other counts only if it asks for something, so that it renames no earlier run.
_FIRST_FIELDS = (
    "model backend dataset dataset_split keep_going fake_data train_on seq_length packing epochs max_steps batch_size "
    "gradient_accumulation total_batch_size lr schedule warmup weight_decay max_grad_norm lora_r lora_alpha quantize lora_dropout "
    "lora_targets precision optimizer kernels gradient_checkpointing torch_compile strategy fsdp_shard local_steps outer_lr "
    "outer_momentum replica_hosts replica_strategy seed eval_split"
)


def spec_digest(spec: RunSpec) -> str:
    """Return 6 hex digits that identify all fields of a spec that a resumed run must not change."""
    fields, first = type(spec).model_fields, _FIRST_FIELDS.split()
    # Fields keep their former names here for the same reason.
    fixed = {
        name: value
        for name, value in spec.model_dump(mode="json").items()
        if not metadata(fields[name])["mutable"] and (name in first or getattr(spec, name) != fields[name].default)
    }
    if fixed["dataset"] == OBSERVATORY and (fixed.get("script") or fixed["fake_data"]):
        fixed["dataset"] = FORMER_DATASET  # they have no dataset, and the default was another
    # Former names and defaults.
    fixed |= {"ignore_keys": fixed.pop("keep_going"), "gradient_wire": "32", "diloco_wire": "bf16"}
    fixed["packing"] = bool(fixed["packing"])  # packing was true before it was auto
    return hashlib.sha256(json.dumps(fixed, sort_keys=True).encode()).hexdigest()[:6]


def default_name(spec: RunSpec) -> str:
    """Return the name of the model, or of the script, and the digest of the spec."""
    name = Path(spec.script).stem if spec.script else Path(spec.model).name
    return f"{file_stem(name) or 'run'}-{spec_digest(spec)}"


def file_stem(name: str) -> str:
    """Return a name with only characters that a run, and a file of the store, may have; it may be empty."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-._")[:40]
