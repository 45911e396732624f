"""Filter that returns a file of the packages trainyard and trainer, which a role installs on a host."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import trainyard


def package_text(name: str) -> str:
    """Return the text of a file, such as trainyard/remote/queue_phases.py."""
    return (Path(trainyard.__path__[0]).parent / name).read_text(encoding="utf-8")


class FilterModule:
    """The filter, by its name in templates."""

    def filters(self) -> dict[str, Any]:
        return {"package_text": package_text}
