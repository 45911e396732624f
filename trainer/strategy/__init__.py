"""The strategies. Their modules are imported on first use, and torch only when a strategy runs."""
# ruff: noqa: F401  the names that other packages import from here

from __future__ import annotations

import functools
import importlib
from typing import TYPE_CHECKING

from trainer.config.strategies import AUTO, DEFAULT_STRATEGY, STRATEGIES
from trainer.method.method_base import Batch
from trainer.strategy.base import Strategy, Update
from trainer.strategy.plan import StrategyPlan

if TYPE_CHECKING:
    from trainer.config import RunSpec
    from trainer.distributed.world import World
    from trainer.method.module_with_loss import ModelWithLoss


@functools.cache
def plan_named(name: str) -> StrategyPlan:
    """Return the plan of the strategy `name`; for `auto`, a plan without requirements or costs."""
    if name not in STRATEGIES:
        return StrategyPlan()
    plan: StrategyPlan = importlib.import_module(f"trainer.strategy.{name}").PLAN
    return plan


def plan_of(spec: RunSpec) -> StrategyPlan:
    return plan_named(spec.strategy)


def make_strategy(spec: RunSpec, world: World, module: ModelWithLoss) -> Strategy:
    """Create the spec's strategy for the model in `module`. Every rank calls it."""
    return plan_of(spec).strategy_class(spec)(spec, world, module)
