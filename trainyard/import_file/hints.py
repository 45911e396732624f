"""What an unknown name means where it is one of another tool: a hint for the user."""

from __future__ import annotations

import difflib

from trainer.config import FIELDS, SUGGESTED, plain_name
from trainyard.import_file.tables import rows_of

_HANDLED = {
    "interval": "eval_interval or checkpoint_interval",
    "run_name": "run",
    "targets": "lora_targets",
    "text_column": "columns",
    "timeout": "collective_timeout",
    "warmup": "warmup",
}


def meaning(name: str) -> str:
    """Return a hint such as ``; did you mean 'lr'?``, or an empty string for a name of no other tool."""
    plain = plain_name(name)
    if plain in SUGGESTED:
        return f"; did you mean {SUGGESTED[plain]!r}?"
    known = {name: row for table in ("opendiloco", "axolotl", "llama-factory") for name, row in rows_of(table).items()}
    close = difflib.get_close_matches(plain, [*FIELDS, *known], 1, 0.8)
    row = None if close and close[0] in FIELDS else known.get(plain) or known.get(close[0] if close else "")
    if row is None or row.kind == "unused":
        return ""
    if row.kind in ("impossible", "missing"):
        return f"; trainyard lacks it: {row.text}"
    field = next((field for fields in row.words.values() for field in fields), row.text)
    field = _HANDLED.get(field, "") if row.kind == "function" else field
    return f"; did you mean {field!r}?" if field else ""
