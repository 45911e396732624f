"""The text of a chat template: without the marks for the loss, and with what it puts after an answer. No torch."""

import datetime
import functools
import re
from collections.abc import Iterable, Mapping
from typing import Any

from trainer.data.hf_template import ChatTemplate, TemplateError

# Comments, raw text and expressions are matched first: what looks like a tag inside of them is none.
_TAG = re.compile(
    r"\{#.*?#\}|\{%[-+]?\s*raw\s*[-+]?%\}.*?\{%[-+]?\s*endraw\s*[-+]?%\}|\{\{.*?\}\}"
    r"|\{%(?P<open>[-+]?)\s*(?P<word>(?:end)?generation)\s*(?P<close>[-+]?)%\}",
    re.DOTALL,
)
# What a comment says is read by some programs, too.
_PLAIN_TAG = re.compile(r"\{%[-+]?\s*((?:end)?generation)\s*[-+]?%\}")
_SET = re.compile(r"\{%[-+]?\s*set\s+(\w+)\b(?!\.)")
_ANSWER = "zqAnszq"


def without_generation(source: str) -> str:
    """Return a template without ``{% generation %}``, which only transformers knows; it renders the same text.

    A tag becomes an empty comment with the same signs: jinja removes the same spaces around both. Where a name that is set
    between the tags is also used elsewhere, they become ``{% with %}``: both keep the name inside.
    """
    outside, inside, depth, last = "", "", 0, 0
    tags = [match for match in _TAG.finditer(source) if match["word"]]
    for tag in [*tags, None]:
        part = source[last : tag.start() if tag else None]
        inside, outside = (inside + part, outside) if depth else (inside, outside + part)
        depth, last = (0, 0) if tag is None else (depth + (-1 if tag["word"] == "endgeneration" else 1), tag.end())
    scoped = any(re.search(rf"\b{name}\b", outside) for name in _SET.findall(inside))

    def plain(tag: re.Match[str]) -> str:
        if not tag["word"]:
            return _PLAIN_TAG.sub(r"\1", tag[0]) if tag[0].startswith("{#") else tag[0]
        if scoped:
            return f"{{%{tag['open']} {tag['word'].replace('generation', 'with')} {tag['close']}%}}"
        return f"{{#{tag['open']} {tag['close']}#}}"

    return _TAG.sub(plain, source)


def end_of_turn(source: str, tokens: Mapping[str, Any], added: Iterable[str]) -> str:
    """Return the token that a template writes after an answer; empty if there is none.

    `source`: the template; it may have ``{% generation %}``. `tokens`: the special tokens by the names that a template
    uses, such as ``eos_token``. `added`: the texts of all special and added tokens.
    """
    rest = _after_answer(source, tuple((name, str(token)) for name, token in tokens.items()))
    # Several tokens can close an answer: the last one ends the turn. What stands behind a space ends the chat.
    closing = rest.split()[0] if rest.split() else ""
    ends = [(closing.rfind(token) + len(token), len(token), token) for token in added if token and token in closing]
    return max(ends, default=(0, 0, ""))[2]


@functools.cache
def _after_answer(source: str, tokens: tuple[tuple[str, str], ...]) -> str:
    """Return what a template writes after an answer; empty if it rejects a chat of one turn. A run asks several times."""
    chat = [{"role": "user", "content": "x"}, {"role": "assistant", "content": _ANSWER}]
    try:
        text = ChatTemplate(source, dict(tokens), datetime.datetime.now()).render(chat, False)
    except TemplateError:
        return ""
    _, found, rest = text.rpartition(_ANSWER)
    return rest if found else ""
