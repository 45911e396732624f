"""The proof of a deployment: how many answers of the created model must equal those of the trained one.

Rounding changes answers, more of them with fewer bits. A wrong model gives nearly none. docs/internals/benchmarks.md has the measurements.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from trainer.common.formats import printable, quoted
from trainyard.remote.ollama import equal_answers

WeightType = Literal["f16", "q8_0", "q6_K", "q5_K_M", "q5_K_S", "q4_K_M", "q4_K_S"]
WRITTEN = ("f16", "q8_0")  # by the host of the run; a server makes the others of f16
MIN_EQUAL: dict[str, float] = {
    "f16": 0.85,
    "q8_0": 0.7,
    "q6_K": 0.6,
    "q5_K_M": 0.35,
    "q5_K_S": 0.35,
    "q4_K_M": 0.35,
    "q4_K_S": 0.35,
}
_FEWER = ("q4_K_M", "q4_K_S")  # the types of a server since this version
_FEWER_SINCE = (0, 7, 0)
_SHOWN = 160  # characters of an answer in a message


def least(kind: str, count: int) -> int:
    """Return how many of `count` answers must be equal with weights of this type."""
    return math.ceil(MIN_EQUAL[kind] * count)


def unsupported(kind: str, version: Sequence[int]) -> str:
    """Return why a server cannot make weights of a type; empty if it can."""
    if kind in (*WRITTEN, *_FEWER) or tuple(version) < _FEWER_SINCE:
        return ""
    return (
        f"Ollama {'.'.join(map(str, version))} cannot quantize to {kind}: set deploy_quantize to {', '.join(_FEWER)} or "
        f"{WRITTEN[-1]}"
    )


def compare(trained: Mapping[str, Any], answers: list[str]) -> tuple[int, str]:
    """Return the number of equal answers, and a description of the first difference."""
    for prompt, expected, got in zip(trained["prompts"], trained["answers"], answers, strict=True):
        if expected.strip() != got.strip():
            question = prompt["messages"][-1]["content"] if "messages" in prompt else prompt["prompt"]
            difference = f"{quoted(question)}: {quoted(got, _SHOWN)} instead of {quoted(expected, _SHOWN)}"
            return equal_answers(trained["answers"], answers), printable(difference, 3 * _SHOWN)
    return len(answers), ""
