"""Makes unlike Linux machines a training cluster. Programs import `Cluster` and `TrainyardError`, see docs/your-code.md."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainer.common.errors import TrainyardError as TrainyardError
    from trainyard.api import Cluster as Cluster


def __getattr__(name: str) -> Any:
    # Not at once: every module of the package imports this one, also where Ansible is not installed.
    if name not in ("Cluster", "TrainyardError"):
        raise AttributeError(f"module 'trainyard' has no attribute {name!r}")
    return getattr(importlib.import_module("trainyard.api"), name)
