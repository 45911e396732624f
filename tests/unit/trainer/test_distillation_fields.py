"""Fields of a run with a teacher that exclude or require each other."""

from __future__ import annotations

import re
from typing import Any

import pytest

from trainer.config import make_spec
from trainer.errors import UserError


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"gkd_lambda": 0.5}, "gkd_lambda: 0.5 requires a teacher model"),
        ({"gkd_beta": 0.5}, "gkd_beta: 0.5 requires a teacher model"),
        ({"teacher": "t"}, "teacher: it has no effect with distill_alpha 0"),
        ({"teacher": "tiny", "distill_alpha": 1}, "teacher: tiny has random weights"),
        ({"teacher": "t", "distill_alpha": 1, "gkd_lambda": 1, "strategy": "fsdp"}, "got strategy fsdp"),
        ({"teacher": "t", "distill_alpha": 1, "gkd_lambda": 1, "strategy": "deepspeed", "deepspeed_stage": 3}, "got strategy deepspeed"),
        ({"teacher": "t", "distill_alpha": 1, "gkd_lambda": 1, "strategy": "diloco", "replica_strategy": "fsdp"}, "set replica_strategy=ddp"),
        ({"teacher": "t", "distill_alpha": 1, "gkd_lambda": 1, "train_on": "all"}, "set train_on=answer"),
        ({"teacher": "t", "distill_alpha": 1, "gkd_lambda": 1, "backend": "unsloth"}, "set backend=peft"),
        ({"distill_alpha": 1.5}, "distill_alpha: expected a number >= 0"),
        ({"distill_temperature": 0}, "distill_temperature: expected a number >= 0.01"),
        ({"distill_alpha": "nan"}, "distill_alpha: expected a number"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_fields_that_exclude_each_other(fields: dict[str, Any], why: str) -> None:
    with pytest.raises(UserError, match=re.escape(why)) as caught:
        make_spec(fields, "test")
    assert "\n" not in str(caught.value)
