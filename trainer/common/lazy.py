"""Modules that are imported at their first use, so that a strategy's plan loads without torch."""

import importlib
from typing import Any


class LazyModule:
    """A proxy of a module that imports it when one of its attributes is read."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        value = getattr(importlib.import_module(self._name), attribute)
        setattr(self, attribute, value)
        return value
