"""The run spec: its schema, other names of its fields, flags, and reading it from files. Importable without torch."""

from trainer.config.aliases import (
    ALIASES,
    DEPRECATED,
    MUTABLE,
    SUGGESTED,
    is_known,
    plain_name,
    resolve_aliases,
    suggest,
)
from trainer.config.flags import describe, expects, parse_flags, table
from trainer.config.load import changed_fields, make_spec, parse_mapping, read_spec, read_yaml
from trainer.config.presets import EMBEDDED_DATASET, OBSERVATORY, PRESETS, SMOLLM2, TINY
from trainer.config.run_spec import FIELDS, RunSpec

__all__ = [
    "ALIASES",
    "DEPRECATED",
    "EMBEDDED_DATASET",
    "FIELDS",
    "MUTABLE",
    "OBSERVATORY",
    "PRESETS",
    "SMOLLM2",
    "SUGGESTED",
    "TINY",
    "RunSpec",
    "changed_fields",
    "describe",
    "expects",
    "is_known",
    "make_spec",
    "parse_flags",
    "parse_mapping",
    "plain_name",
    "read_spec",
    "read_yaml",
    "resolve_aliases",
    "suggest",
    "table",
]
