"""The registry of strategies. One line adds a strategy. Its module is imported on first use, and torch only when the strategy runs."""

from __future__ import annotations

import functools
import importlib
from typing import TYPE_CHECKING

from trainer.strategy.base import Batch, Stopped, Strategy
from trainer.strategy.plan import StrategyPlan

if TYPE_CHECKING:
    from trainer.config import RunSpec
    from trainer.distributed.world import World
    from trainer.model import TokenLoss

# Value of the field `strategy` -> module and class of its plan. The first one is the default.
STRATEGIES: dict[str, str] = {
    "ddp": "trainer.strategy.ddp:DDPPlan",
    "fsdp": "trainer.strategy.fsdp:FSDPPlan",
    "deepspeed": "trainer.strategy.deepspeed:DeepSpeedPlan",
    "diloco": "trainer.strategy.diloco:DiLoCoPlan",
    "pipeline": "trainer.strategy.pipeline:PipelinePlan",
    "averaging": "trainer.strategy.averaging:AveragingPlan",
}
DEFAULT_STRATEGY = next(iter(STRATEGIES))
AUTO = "auto"  # the planner chooses one of the strategies


@functools.cache
def plan_named(name: str) -> StrategyPlan:
    """Return the plan of the strategy `name`; for `auto`, a plan without requirements or costs."""
    module, _, cls = STRATEGIES.get(name, "trainer.strategy.plan:StrategyPlan").partition(":")
    plan: StrategyPlan = getattr(importlib.import_module(module), cls)()
    return plan


def plan_of(spec: RunSpec) -> StrategyPlan:
    """Return the plan of the spec's strategy."""
    return plan_named(spec.strategy)


def possible_plans(spec: RunSpec) -> list[StrategyPlan]:
    """Return the plans that can apply to the spec: that of its strategy, or all of them with `auto`."""
    return [plan_named(name) for name in STRATEGIES] if spec.strategy == AUTO else [plan_of(spec)]


def summaries() -> dict[str, str]:
    """Return {strategy: summary in a few words} for help texts and documentation."""
    return {name: plan_named(name).summary for name in STRATEGIES}


def make_strategy(spec: RunSpec, world: World, module: TokenLoss) -> Strategy:
    """Create the spec's strategy for the model in `module`. Every rank calls it."""
    return plan_of(spec).strategy_class(spec)(spec, world, module)


__all__ = [
    "AUTO",
    "DEFAULT_STRATEGY",
    "STRATEGIES",
    "Batch",
    "Stopped",
    "Strategy",
    "StrategyPlan",
    "make_strategy",
    "plan_named",
    "plan_of",
    "possible_plans",
    "summaries",
]
