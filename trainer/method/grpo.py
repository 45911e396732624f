"""Not available yet."""

from trainer.config import RunSpec
from trainer.method.method_plan import MethodPlan


class NotYet(MethodPlan):
    """Refuses every spec."""

    def validate(self, spec: RunSpec) -> None:
        raise ValueError("method: grpo is not available in this version: set method=sft")


PLAN = NotYet()
