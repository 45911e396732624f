"""Filter `find_duplicates`: find inventory entries that are one machine. The logic is in trainyard/discovery."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from trainyard.discovery.duplicates import find_duplicates as compare


def find_duplicates(entries: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return `machines`, `drop`, `warnings`, `verdict` and the `lines` to print. `entries`: `identity` and `login` of each."""
    logins = {name: str(entry["login"]) for name, entry in entries.items()}
    result = compare({name: entry["identity"] for name, entry in entries.items()}, logins)
    lines = [f"remove {name}: it is the same machine as {kept} ({why})" for name, (kept, why) in result.drop.items()]
    return {**asdict(result), "lines": [*lines, *result.warnings, result.verdict]}


class FilterModule:
    """The filter that finds hosts on the same machine, by its name in templates."""

    def filters(self) -> dict[str, Any]:
        return {"find_duplicates": find_duplicates}
