"""Fields of a run with a teacher that exclude or require each other."""

from __future__ import annotations

import re
from typing import Any

import pytest

from trainer.common.errors import UserError
from trainer.spec import make_spec

TAUGHT = {"teacher": "t", "distill_alpha": 1}


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"distill_alpha": 0.5}, "distill_alpha: 0.5 requires a teacher model"),
        ({"teacher": "t"}, "teacher: it has no effect with distill_alpha 0"),
        ({"teacher": "tiny", "distill_alpha": 1}, "teacher: tiny has random weights"),
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
