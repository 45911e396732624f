"""Write the run spec that files of other tools become, with comments that account for every name of them."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from trainer.common.errors import UserError
from trainer.common.formats import counted, printable
from trainer.common.inputs import user_path
from trainer.config import FIELDS, parse_mapping
from trainer.spec import make_spec, missing_for
from trainyard.import_file.config_file import read_names
from trainyard.import_file.handlers import settle_method
from trainyard.import_file.import_options import ImportOptions
from trainyard.import_file.parallelism import keep_deepspeed, settle_deepspeed, settle_strategy
from trainyard.import_file.tables import NAMES, Tool, tool_named
from trainyard.import_file.translation import Translation


@dataclass(frozen=True)
class Imported:
    """The result of an import."""

    lines: list[str]  # the run spec as YAML
    summary: list[str]  # what a user must look at, in lines


def tool_of(names: dict[str, Any]) -> Tool | None:
    """Return the tool whose names most of a file's names are: of several the first one; None if it has none."""
    known = {each: sum(name.replace("-", "_") in tool_named(each).rows for name in names) for each in NAMES}
    best = max(known, key=lambda each: known[each])
    return tool_named(best) if known[best] else None


def write_spec(options: ImportOptions, check: bool) -> dict[str, Any]:
    """Return the run spec as lines; with `output`, write it, and return what a user must look at. Raises UserError."""
    if not options.files:
        raise UserError("import: name a configuration file of another tool, such as axolotl.yml")
    files = [user_path(file, "import") for file in options.files]
    imported = import_files(files, options.tool, options.ranks)
    if not options.output:
        return {"lines": imported.lines, "summary": imported.summary}
    path = user_path(options.output, "output")
    try:
        if not check:
            with path.open("x", encoding="utf-8") as file:
                file.write("\n".join([*imported.lines, ""]))
    except OSError as error:
        raise UserError(f"output: cannot write {printable(path)}: {error.strerror}") from None
    return {"lines": [*imported.summary, f"{'would write' if check else 'wrote'} {path}"], "file": str(path)}


def import_files(files: Sequence[Path], tool: str = "auto", ranks: int = 0) -> Imported:
    """Translate configuration files of other tools that describe one run together.

    `tool`: the tool of the files, of `NAMES`, or auto. `ranks`: number of ranks in the original run; 0: unknown. Raises
    UserError: a file cannot be read, belongs to no tool or asks for a method that trainyard lacks, or two names of one
    field have different values.
    """
    found = Translation(files[0], ranks)
    tools = []
    for file in files:
        names = read_names(file)
        chosen = tool_of(names) if tool == "auto" else tool_named(tool)
        if chosen is None:
            listed = ", ".join(tool_named(each).name for each in NAMES)
            raise UserError(f"import: {printable(file)} has no name of {listed}: set --tool")
        tools.append(chosen)
        found.where, found.seen = file, names
        if chosen.name == "DeepSpeed":
            found.values["strategy"], found.origins["strategy"] = (
                "deepspeed",
                [f"{printable(file.name)} is a file of DeepSpeed"],
            )
            keep_deepspeed(found, names, "")
        else:
            found.read(names, chosen.rows)
            chosen.finish(found)
    if found.missing:
        asked = [f"{method} ({', '.join(names)})" for method, names in found.missing.items()]
        raise UserError(f"import: {printable(files[0])} asks for what trainyard lacks: {'; '.join(asked)}")
    settle_deepspeed(found)
    found.settle_weak()
    settle_strategy(found)
    if any(each.name == "TRL" or found.values.get("method") == "grpo" for each in tools):
        settle_method(found)
    for each in tools:
        each.set_defaults(found)
    if found.accumulation or any(each.trains for each in tools):
        found.count_rows(tools[0].name)
    spec = make_spec(found.values, f"the spec from {printable(files[0])}")
    for name, missing in [(name, missing_for(spec, name)) for name in found.values]:
        if missing:
            found.drop(name, f"{name} has no effect {missing[0]}", unused=True)
    return _written(found, files, tools)


def _written(found: Translation, files: Sequence[Path], tools: Sequence[Tool]) -> Imported:
    """Write the spec. Raises UserError if its fields cannot be combined."""
    where = ", ".join(f"{printable(file.name)} ({tool.name})" for file, tool in zip(files, tools, strict=True))
    lines = [f"# Run spec from {where}, written by trainyard import."]
    for name in FIELDS:
        if name in found.values:
            lines += _field(name, found.values[name], found.origins[name])
    for title, entries in (
        ("Without effect here", _by_reason(found.unused)),
        ("Cannot be done", _by_reason(found.impossible)),
        ("Unknown names", found.unknown),
        ("Not set in the file", [", ".join(found.unset)] if found.unset else []),
    ):
        if entries:
            lines += ["", f"# {title}:", *(line for entry in entries for line in _wrapped(entry))]
    source = f"the spec from {printable(files[0])}"
    make_spec(parse_mapping("\n".join(lines), source), source)
    return Imported(lines, _summary(found))


def _field(name: str, value: Any, origins: Sequence[str]) -> list[str]:
    """Return the lines of a field: its value, with the names that set it after it or above it."""
    style = None if isinstance(value, list | dict) else False  # None: [a, b] on one line
    text = yaml.safe_dump(
        {name: value}, sort_keys=False, allow_unicode=True, width=10**9, default_flow_style=style
    ).splitlines()
    short = [origin.removesuffix(f": {text[0].partition(': ')[2]}") for origin in origins]
    if len(text) == 1 and len(short) == 1:
        return [f"{text[0]}  # {short[0]}"]
    return [*(line for origin in origins for line in _wrapped(origin, "# ")), *text]


def _by_reason(names: dict[str, list[str]]) -> list[str]:
    return [f"{', '.join(each)}: {reason}" for reason, each in names.items() if each]


def _wrapped(text: str, prefix: str = "#   ") -> list[str]:
    """Return a comment in lines of a readable length."""
    return textwrap.wrap(
        text,
        120,
        initial_indent=prefix,
        subsequent_indent=f"{prefix}  ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def _summary(found: Translation) -> list[str]:
    lines = [f"{counted(len(found.values), 'field')} set"]
    lines += [f"cannot be done: {line}" for line in _by_reason(found.impossible)]
    lines += [f"unknown name: {line}" for line in found.unknown]
    if "model" not in found.values or "dataset" not in found.values:
        lines.append("the files name no model or no dataset: set model and dataset")
    return lines
