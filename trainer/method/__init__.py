"""The training methods: what a run learns from its data. Their modules are imported on first use, and torch only when a loss runs."""
# ruff: noqa: F401  the names that other packages import from here

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
    plan: MethodPlan = importlib.import_module(f"trainer.method.{name}").PLAN
    return plan


def method_of(spec: RunSpec) -> MethodPlan:
    return method_named(spec.method)
