"""What may be said with ``-e``: the run spec's fields and the project's own variables. Pure Python, no Ansible."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import yaml

# What the doors read besides: names that Ansible keeps for plays and tasks, so that no file of variables may hold them.
PLAY = frozenset({"hosts", "retries"})


def known_variables(top: Path) -> set[str]:
    """Return the names of the project's variables: those of group_vars/all and of every role's argument_specs."""
    names = set(PLAY)
    for path in sorted((top / "group_vars" / "all").glob("*.yml")):
        names |= set(yaml.safe_load(path.read_text()) or {})
    for path in sorted((top / "roles").glob("*/meta/argument_specs.yml")):
        specs = yaml.safe_load(path.read_text()) or {}
        for entry in (specs.get("argument_specs") or {}).values():
            names |= set(entry.get("options") or {})
    return names


def unknown(names: Iterable[str], fields: Iterable[str], variables: Iterable[str]) -> list[str]:
    """Return the names that nothing reads: no field, no variable of ours, none of Ansible's own."""
    fields, variables = set(fields), set(variables)
    return [name for name in names if name not in fields and name not in variables and not name.startswith("ansible_")]
