"""The reasoning of a model inside of its text: what begins and what ends it. No torch here."""

from __future__ import annotations

import re

OPENING = re.compile(r"\s*(?:<(?:seed:)?think(?:ing)?>|◁think▷|\[THINK\]|<reasoning>)\s*")
CLOSING = re.compile(r"</(?:seed:)?think(?:ing)?>|◁/think▷|\[/THINK\]|</reasoning>")
_QUOTES = "`'\""


def split_reasoning(text: str) -> tuple[str, str, bool]:
    """Return the reasoning at the start of an answer, the answer after it, and whether the text ends within its reasoning.

    The opening may be absent: templates such as DeepSeek-R1's write it at the end of the prompt.
    """
    opening = OPENING.match(text)
    closing = CLOSING.search(text, opening.end() if opening else 0)
    if opening and not closing:
        return text[opening.end() :].strip(), "", True
    if not closing or not (opening or _ends_reasoning(text, closing)):
        return "", text.strip(), False
    return text[opening.end() if opening else 0 : closing.start()].strip(), text[closing.end() :].strip(), False


def _ends_reasoning(text: str, closing: re.Match[str]) -> bool:
    """Return whether a closing without an opening at the start ends reasoning: an answer may quote it, or write about both."""
    before, after = text[: closing.start()], text[closing.end() :]
    return not OPENING.search(before) and before[-1:] not in tuple(_QUOTES) and after[:1] not in tuple(_QUOTES)
