"""The run spec: its schema, other names of its fields, and flags. `trainer.spec` builds and checks a spec. Importable without torch."""

from trainer.config.aliases import (
    ALIASES,
    MUTABLE,
    SUGGESTED,
    is_known,
    plain_name,
    resolve_aliases,
    suggest,
)
from trainer.config.flags import describe, expects, parse_flags, table
from trainer.config.presets import FORMER_DATASET, OBSERVATORY, PRESETS, SMOLLM2, SMOLLM2_ON_HUB, TINY, TINY_RUN
from trainer.config.run_spec import FIELDS, RunSpec
from trainer.config.yaml_text import parse_mapping, read_yaml

__all__ = [
    "ALIASES",
    "FIELDS",
    "FORMER_DATASET",
    "MUTABLE",
    "OBSERVATORY",
    "PRESETS",
    "SMOLLM2",
    "SMOLLM2_ON_HUB",
    "SUGGESTED",
    "TINY",
    "TINY_RUN",
    "RunSpec",
    "describe",
    "expects",
    "is_known",
    "parse_flags",
    "parse_mapping",
    "plain_name",
    "read_yaml",
    "resolve_aliases",
    "suggest",
    "table",
]
