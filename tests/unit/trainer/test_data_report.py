"""What a dataset may lose before a run says so, and before it stops."""

from __future__ import annotations

import pytest

from trainer.common.errors import UserError
from trainer.data.data_report import BEYOND, DataReport, Dropped


@pytest.mark.parametrize(
    ("kept", "lost", "loud", "stops"),
    [(10, 0, False, False), (9, 1, False, False), (8, 1, True, False), (1, 1, True, False), (1, 2, True, True), (0, 1, True, True)],
)  # fmt: skip
def test_a_tenth_is_loud_and_a_half_stops(kept: int, lost: int, loud: bool, stops: bool) -> None:
    dropped = Dropped("samples", kept, {"too long": lost}, "increase seq_length")
    line = f"{lost} of {kept + lost} samples are not trained ({lost} too long)"
    assert dropped.warning() == (f"WARNING: {line}: increase seq_length" if loud else "")
    for allowed in (False, True):
        if not stops or (allowed and kept):
            dropped.check(allowed)
            continue
        with pytest.raises(UserError, match="more than half: increase seq_length") as error:
            dropped.check(allowed)
        assert line in str(error.value)
        assert ("or set keep_going=dropped" in str(error.value)) == bool(kept)


def test_the_most_frequent_reason_comes_first() -> None:
    assert Dropped("answers", 1, {"empty": 1, "cut off": 3, "other": 0}).by_reason == "3 cut off, 1 empty"


def test_reports_are_added_and_kept() -> None:
    one = DataReport(10, 12, 100, 1, {"too long": 4}, {"changed": 1})
    both = one + DataReport(10, 3, 20, 0, {"no answer": 1, "too long": 1}, unread=5)
    assert DataReport.of(both.as_dict() | {"later": 1}) == both
    assert both.lines() == [
        "20 samples: 15 answers and 120 tokens with loss, 1 truncated, 6 dropped (5 too long, 1 no answer); "
        "5 further samples were not counted",
        "note: 1 sample: changed",
        "WARNING: 6 of 20 samples of the dataset are not trained (5 too long, 1 no answer): correct them (the command `data` shows "
        "them)",
    ]
    assert DataReport(1, 1, 1).lines() == ["1 sample: 1 answer and 1 token with loss, 0 truncated, 0 dropped"]
    assert (
        "(2 with all answers beyond seq_length): increase seq_length"
        in DataReport(4, dropped={BEYOND: 2}).loss.warning()
    )


def test_lost_tokens_are_loud_from_one_in_a_hundred() -> None:
    """All answers of a dataset can lose their end while every sample is trained."""
    assert not any("WARNING" in line for line in DataReport(9, 9, 9, 9, kept_tokens=990, lost_tokens=10).lines())
    [line] = [line for line in DataReport(9, 9, 9, 9, kept_tokens=900, lost_tokens=100).lines() if "WARNING" in line]
    assert line.startswith("WARNING: 100 of 1,000 tokens (10%) are lost")
