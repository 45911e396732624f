"""The tables of the tools whose files can be imported, which are data: `tables/TOOL.yml`. `Row` says what a name of one can mean."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from trainer.config.fields import as_text
from trainyard.import_file.handlers import FUNCTIONS, drop_adapter
from trainyard.import_file.translation import Row, Rows, Translation

NAMES = ("deepspeed", "accelerate", "transformers", "trl", "axolotl", "llama-factory")
_FOLDER = Path(__file__).parent / "tables"


@dataclass(frozen=True)
class Tool:
    """A tool whose files can be imported.

    Attributes:
        defaults: values of fields where the defaults of the tool differ from those of the run spec.
        adapters: the name that asks for adapters, and its values that do; empty: the fields say it.
    """

    name: str  # as users write it
    rows: Rows  # the meaning of its names
    defaults: Mapping[str, Any] = field(default_factory=dict)
    adapters: Mapping[str, str] = field(default_factory=dict)
    trains: bool = True  # whether its files describe a training, with rows of a step

    def finish(self, found: Translation) -> None:
        """Decide what several names decide together."""
        if found.seen.get("wandb_project"):
            found.set_default("loggers", ["wandb"], "a file with wandb_project")
        if self.adapters and as_text(found.seen.get(self.adapters["name"])) not in self.adapters["values"].split():
            drop_adapter(found, f"{self.adapters['name']} asks for no adapter", self.name)

    def set_defaults(self, found: Translation) -> None:
        """Set the fields that no name has set."""
        for name, value in self.defaults.items():
            if name == "epochs" and found.values.get("max_steps"):
                continue  # which decides
            twice = value == "2 * lora_r"
            found.set_default(name, 2 * found.values.get("lora_r", 8) if twice else value, self.name)


@functools.cache
def tool_named(name: str) -> Tool:
    """Return the tool of this name, one of `NAMES`."""
    given = _read(name)
    own = {each: given[each] for each in ("defaults", "adapters", "trains") if each in given}
    return Tool(given["name"], _rows(given), **own)


@functools.cache
def rows_of(name: str) -> Rows:
    """Return the rows of a table."""
    return _rows(_read(name))


def _read(name: str) -> dict[str, Any]:
    given: dict[str, Any] = yaml.safe_load((_FOLDER / f"{name}.yml").read_text(encoding="utf-8"))
    return given


def _rows(given: Mapping[str, Any]) -> dict[str, Row]:
    """Return the rows of a table, or of a section of one: those of the table that it includes, and its own."""
    rows = dict(rows_of(given["include"])) if "include" in given else {}
    weak, harmless = (
        {name: as_text(each) for name, each in given.get(kind, {}).items()} for kind in ("weak", "harmless")
    )
    missing = {name: method for method, names in given.get("missing", {}).items() for name in names.split()}
    for target, names in given.get("fields", {}).items():
        rows |= {name: Row("field", target) for name in names.split()}
    for function, names in given.get("functions", {}).items():
        rows |= {name: Row("function", function, function=FUNCTIONS[function]) for name in names.split()}
    for kind in ("unused", "impossible", "missing"):
        for reason, names in given.get(kind, {}).items():
            # A method that trainyard lacks may also be one of the values of a name, see `values`.
            rows |= {name: Row(kind, reason, harmless=tuple(harmless.get(name, "").split())) for name in names.split()}  # type: ignore[arg-type]
    for name, fields in given.get("values", {}).items():
        words: dict[str, dict[str, Any]] = {word: {} for word in as_text(fields.get("nothing", "")).split()}
        for target, values in fields.items():
            for value, listed in values.items() if target != "nothing" else ():
                for word in as_text(listed).split():
                    words.setdefault(word, {})[target] = value
        kind = "missing" if name in missing else "field"
        rows[name] = Row(kind, missing.get(name, ""), words, tuple(weak.get(name, "").split()))  # type: ignore[arg-type]
    rows |= {name: Row("section", rows=_rows(each)) for name, each in given.get("sections", {}).items()}
    return rows | {f"{given['prefix']}{name}": row for name, row in rows.items()} if "prefix" in given else rows
