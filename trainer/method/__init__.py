"""The training methods: what a run learns from its data. Their modules are imported on first use, and torch only when a loss runs."""

from __future__ import annotations

import functools
import importlib
from typing import TYPE_CHECKING

from trainer.config.methods import DEFAULT_METHOD, METHODS
from trainer.method.method_base import AheadContext, Batch, Method, Rank, Rows, RunContext, Work
from trainer.method.method_plan import MethodPlan

if TYPE_CHECKING:
    from trainer.config import RunSpec


@functools.cache
def method_named(name: str) -> MethodPlan:
    """Return the plan of the method `name`."""
    plan: MethodPlan = importlib.import_module(f"trainer.method.{name}").PLAN
    return plan


def method_of(spec: RunSpec) -> MethodPlan:
    """Return the plan of the spec's method."""
    return method_named(spec.method)


__all__ = [
    "DEFAULT_METHOD",
    "METHODS",
    "AheadContext",
    "Batch",
    "Method",
    "MethodPlan",
    "Rank",
    "Rows",
    "RunContext",
    "Work",
    "method_named",
    "method_of",
]
