"""A reward of docs/rewards.md: the right sum."""

import re


def reward_sum(completions, answer, **_):
    """1 if the last number of the completion is the sum."""
    numbers = [re.findall(r"\d+", completion[0]["content"]) for completion in completions]
    return [float(bool(found) and int(found[-1]) == right) for found, right in zip(numbers, answer, strict=True)]
