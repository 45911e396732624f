"""The run spec: its schema, other names of its fields, and flags. `trainer.spec` builds and checks a spec. Importable without torch."""
# ruff: noqa: F401  the names that other packages import from here

from trainer.config.aliases import ALIASES, MUTABLE, SUGGESTED, is_known, plain_name, resolve_aliases, suggest
from trainer.config.flags import describe, expects, parse_flags, table
from trainer.config.presets import FORMER_DATASET, OBSERVATORY, PRESETS, SMOLLM2, SMOLLM2_ON_HUB, TINY, TINY_RUN
from trainer.config.run_spec import FIELDS, RunSpec
from trainer.config.yaml_text import parse_mapping, read_yaml
