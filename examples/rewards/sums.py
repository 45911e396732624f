"""Rewards of docs/rewards.md: a number alone, and the right one."""

import re


def texts(completions):
    return [completion[0]["content"].strip() for completion in completions]


def reward_format(completions, **_):
    """1 for a number alone; up to 0.5 for a number in a text, the shorter the more."""
    return [
        1.0 if text.isdigit() else 0.5 * bool(re.search(r"\d", text)) * max(0, 1 - len(text) / 60)
        for text in texts(completions)
    ]


def reward_sum(completions, answer, **_):
    """1 if the last number is the sum."""
    numbers = [re.findall(r"\d+", text) for text in texts(completions)]
    return [float(bool(found) and int(found[-1]) == right) for found, right in zip(numbers, answer, strict=True)]
