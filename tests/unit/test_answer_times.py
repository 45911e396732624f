"""The adaptation of the time limit for lost hosts to the hosts' response times."""

from __future__ import annotations

import random

import pytest

from trainyard.run.answer_times import HALF_LIFE, LONGEST, MARGIN, SHORTEST, AnswerTimes


def test_before_the_first_answer_hosts_have_the_longest_limit() -> None:
    assert AnswerTimes().limit(0.0) == LONGEST


@pytest.mark.parametrize("seed", range(20))
def test_the_limit_is_bounded_and_leaves_a_margin_to_recent_answers(seed: int) -> None:
    draw, times, now, answers = random.Random(seed), AnswerTimes(), 1000.0, []
    scale = draw.choice((0.01, 0.1, 1.0, 5.0))
    for _ in range(draw.randrange(1, 200)):
        now += draw.expovariate(1 / draw.choice((0.1, 1.0, 30.0)))
        answers.append((now, draw.expovariate(1 / scale)))
        times.add(answers[-1][1], now)
        asked = now + draw.uniform(0.0, 100.0)
        limit = times.limit(asked)
        assert SHORTEST <= limit <= LONGEST
        for at, seconds in answers:
            remembered = seconds * 0.5 ** ((asked - at) / HALF_LIFE)
            assert limit >= min(LONGEST, SHORTEST + MARGIN * remembered) - 1e-9, (at, seconds)
        # No answer explains a longer limit than the slowest one does.
        assert limit <= SHORTEST + MARGIN * max(seconds for _, seconds in answers) + 1e-9
        assert limit >= times.limit(asked + 1.0), "without further answers the limit never grows"


def test_a_quiet_network_has_a_short_limit_and_load_a_long_one_at_once() -> None:
    times = AnswerTimes()
    for second in range(600):
        times.add(0.08, float(second))
    assert times.limit(600.0) < 3.0
    times.add(2.0, 601.0)
    assert times.limit(601.0) == LONGEST
    for second in range(602, 1202):
        times.add(0.08, float(second))
    assert times.limit(1202.0) < 3.0, "a slow answer is forgotten"
