"""The reasoning of a model inside of its text, and the markup of chats: what begins and what ends them. No torch here."""

from __future__ import annotations

import re

OPENING = re.compile(
    r"\s*(?:<(?:seed:)?think(?:ing)?>|◁think▷|\[THINK\]|<reasoning>|<\|START_THINKING\|>|<\|channel\|>analysis<\|message\|>)\s*"
)
CLOSING = re.compile(
    r"</(?:seed:)?think(?:ing)?>|◁/think▷|\[/THINK\]|</reasoning>|<\|END_THINKING\|>"
    r"|(?:<\|end\|><\|start\|>assistant)?<\|channel\|>final<\|message\|>"
)
# What begins or ends a turn in the usual chat templates, and no other text has.
MARKUP = re.compile(
    r"<\|(?:im_start|im_end|im_sep|start_header_id|end_header_id|eot_id|eom_id|endoftext|end_of_text|begin_of_text|user|assistant"
    r"|system|end|return|start|START_OF_TURN_TOKEN|END_OF_TURN_TOKEN)\|>|<(?:start|end)_of_turn>|\[/?INST\]|<\|(?:end_of_turn"
    r"|eod_id|eos)\|>|<｜[^<>|｜]{1,40}｜>"
)
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


def split_answer(text: str, thinking: str, cut: bool) -> tuple[str, str, bool]:
    """Return what `split_reasoning` does. `thinking` is what a server has separated; `cut`: the answer reached the limit of tokens."""
    thinking = thinking.strip()
    return (thinking, text.strip(), cut and not text.strip()) if thinking else split_reasoning(text)


def _ends_reasoning(text: str, closing: re.Match[str]) -> bool:
    """Return whether a closing without an opening at the start ends reasoning: an answer may quote it, or write about both."""
    before, after = text[: closing.start()], text[closing.end() :]
    return not OPENING.search(before) and before[-1:] not in tuple(_QUOTES) and after[:1] not in tuple(_QUOTES)
