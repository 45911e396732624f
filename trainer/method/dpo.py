"""Not available yet."""

from trainer.method.method_plan import MethodPlan

PLAN = MethodPlan()
