"""Filter `settle_machines`: which inventory entries are one machine. Thin: the work is in trainyard/discovery."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from trainyard.discovery.settle import settle


def settle_machines(entries: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """`{entry: {identity, login, aliases}}` -> `machines`, `drop`, `warnings`, `verdict` and `lines` to show."""
    result = settle(
        {name: entry["identity"] for name, entry in entries.items()},
        {name: str(entry["login"]) for name, entry in entries.items()},
        {name: entry["aliases"] for name, entry in entries.items()},
    )
    lines = [f"drop {name}: it is {kept} ({why})" for name, (kept, why) in result.drop.items()]
    return {**asdict(result), "lines": [*lines, *result.warnings, result.verdict]}


class FilterModule:
    """For Ansible."""

    def filters(self) -> dict[str, Any]:
        return {"settle_machines": settle_machines}
