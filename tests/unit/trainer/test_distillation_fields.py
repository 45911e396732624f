"""Fields of a run with a teacher that exclude or require each other."""

from __future__ import annotations

import re
from typing import Any

import pytest

from trainer.common.errors import UserError
from trainer.config.run_name import spec_digest
from trainer.spec import changed_fields, make_spec

TAUGHT = {"teacher": "t", "distill_alpha": 1}


def test_a_teacher_on_another_host_sends_20_tokens_by_default_and_its_host_may_change() -> None:
    one, other = (make_spec(TAUGHT | {"teacher_host": host}, "test") for host in "ab")
    assert one.teacher_top_k == 20 and not changed_fields(one, other)
    local = make_spec(TAUGHT, "test")
    assert local.teacher_top_k == 0 and changed_fields(one, local) == ["teacher_top_k: was 20, now 0"]
    assert spec_digest(one) == spec_digest(make_spec(TAUGHT | {"teacher_top_k": 20}, "test")) != spec_digest(local)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"gkd_beta": 0.5}, "gkd_beta: 0.5 requires a teacher model"),
        ({"distill_alpha": 0.5}, "distill_alpha: 0.5 requires a teacher model"),
        ({"teacher": "t"}, "teacher: it has no effect with distill_alpha 0"),
        ({"teacher": "tiny", "distill_alpha": 1}, "teacher: tiny has random weights"),
        ({"teacher_host": "a"}, "teacher_host: a requires a teacher model"),
        ({"teacher_top_k": 5}, "teacher_top_k: 5 requires a teacher model"),
        (TAUGHT | {"teacher_host": "a", "teacher_top_k": 0}, "set teacher_top_k=20, or omit teacher_host"),
        (TAUGHT | {"teacher_host": "a", "gkd_beta": 0.5}, "gkd_beta: 0.5 compares the probabilities of all tokens, but teacher_top_k is 20"),
        (TAUGHT | {"teacher_top_k": 9, "gkd_beta": 1}, "but teacher_top_k is 9"),
        (TAUGHT | {"teacher_host": "a", "strategy": "diloco", "diloco_membership": "torchft"}, "set diloco_membership=fixed"),
        (TAUGHT | {"teacher_host": "a", "batch_size": 4096, "seq_length": 4096}, "decrease batch_size or teacher_top_k"),
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
