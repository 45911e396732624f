"""The names and values given with ``-e``: fields of the run spec, launch options and variables of the project."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from trainer.common.errors import UserError, nearest
from trainer.common.formats import printable
from trainer.common.inputs import user_path
from trainer.config import FIELDS, RunSpec, read_yaml, resolve_aliases, suggest
from trainer.config.tool_files import read_tool_files
from trainer.spec import MAX_LISTED, and_more, check_given, idle_options, make_spec
from trainyard.project_folder import shared_folder
from trainyard.run import launch_options as options

MAX_VALUES = 1_000_000  # in one variable; the state of a session with a thousand hosts has fewer


def known_variables(top: Path) -> set[str]:
    """Return the names that the project reads besides the run spec's fields.

    These are the launch options, the variables of group_vars/all below `top`, and those of every role's argument_specs.
    """
    names = set(options.names()) | _group_variables(top)
    for path in sorted(shared_folder().glob("roles/*/meta/argument_specs.yml")):
        specs = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
        for entry in (specs.get("argument_specs") or {}).values():
            names |= set(entry.get("options") or {})
    return names


def _group_variables(top: Path) -> set[str]:
    files = sorted((top / "group_vars" / "all").glob("*.yml"))
    return {str(name) for path in files for name in yaml.safe_load(path.read_text(encoding="utf-8")) or {}}


def unknown(names: Iterable[str], fields: Iterable[str], variables: Iterable[str]) -> list[str]:
    """Return the names that are neither a field, nor a variable of the project, nor one of Ansible's own."""
    fields, variables = set(fields), set(variables)
    return [name for name in names if name not in fields and name not in variables and not name.startswith("ansible_")]


def check_pairs(extra_vars: Mapping[str, Any]) -> None:
    """Check that every ``-e`` has a name and a value. Raises UserError."""
    if "_raw_params" in extra_vars:
        raise UserError(
            f"-e {printable(extra_vars['_raw_params'])}: takes NAME=VALUE; quote a value that contains spaces twice: -e 'run=\"a b\"'"
        )


def check_names(names: Iterable[str], top: Path, more: Iterable[str] = (), *, of_run: bool = True) -> None:
    """Check that the project defines all names given with ``-e``.

    `top`: the project's folder. `more`: further known names. `of_run`: whether the fields of the run spec are known
    names. Raises UserError: unknown names, each with the nearest known one.
    """
    known = known_variables(top) | set(more)
    if strange := unknown(names, FIELDS if of_run else (), known):
        from trainyard.import_file.hints import meaning  # only a mistake needs the tables

        def near(name: str) -> str:
            return (meaning(name) or suggest(name, sorted(known))) if of_run else nearest(name, known)

        lines = [f"-e {printable(name, 80)}: unknown name{near(name)}" for name in strange[:MAX_LISTED]]
        raise UserError("; ".join(lines + and_more(strange)))


def read_run_spec(
    file: str,
    extra_vars: Mapping[str, Any],
    top: Path,
    report: Callable[[str], None] = lambda line: None,
    *,
    source: str = "-e",
    more: Iterable[str] = (),
) -> RunSpec:
    """Read the run spec from a YAML file (or none) with the extra variables on top.

    Args:
        extra_vars: all variables given with ``-e``, by name. Launch options and project variables are left out.
        top: the project's folder, whose variables are known names.
        report: receives a line for each name of another tool that is translated.
        source: origin of the extra variables, for error messages.
        more: further names that an unknown one may have meant.

    Raises UserError: an unknown name (with the nearest known one), or a bad value.
    """
    check_pairs(extra_vars)
    of_file, named = read_tool_files(read_yaml(user_path(file, "spec")) if file else {}), read_tool_files(extra_vars)
    base, notes = resolve_aliases(of_file, source=printable(file))
    given, further = resolve_aliases(named, base, source=source)
    check_names(given, top, more)
    if file:
        hint = "; `trainyard import` turns a file of another tool into a run spec"
        make_spec(base, file if base.keys() <= FIELDS.keys() else f"{file}{hint}")
    spec = make_spec(base | {name: given[name] for name in given if name in FIELDS}, source)
    check_given(spec, base, file)
    check_given(spec, given, source)
    if idle := sorted(FIELDS.keys() & _group_variables(top)):
        notes.append(
            f"group_vars: without effect there: {', '.join(idle)}: give fields of the run spec with -e, or in the file of spec"
        )
    for note in notes + further + idle_options(of_file | named):
        report(note)
    return spec


def plain_data(value: Any) -> Any:
    """Return data of Ansible as Python's own types, without the tags that Ansible attaches to it.

    Raises:
        UserError: it has too many values, such as those that a few nested aliases of YAML stand for, or is nested too
            deeply.
    """
    try:
        return _plain(value, itertools.count(1))
    except RecursionError:
        raise UserError("a variable is nested too deeply, or contains itself through an alias (*name)") from None


def _plain(value: Any, values: Iterator[int]) -> Any:
    if next(values) > MAX_VALUES:
        raise UserError(f"a variable holds more than {MAX_VALUES} values: it may repeat itself with aliases (*name)")
    if isinstance(value, Mapping):
        return {str(name): _plain(content, values) for name, content in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry, values) for entry in value]
    for kind in (str, int, float):  # bool is an int, and has no subclass
        if isinstance(value, kind) and not isinstance(value, bool):
            return kind(value)
    return value
