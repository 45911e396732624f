"""The text of a chat template: without the marks for the loss, and with what it puts after an answer. No torch."""

import datetime
import re
from collections.abc import Iterable, Mapping
from typing import Any

# Comments, raw text and expressions are matched first: what looks like a tag inside of them is none.
_TAG = re.compile(
    r"\{#.*?#\}|\{%[-+]?\s*raw\s*[-+]?%\}.*?\{%[-+]?\s*endraw\s*[-+]?%\}|\{\{.*?\}\}"
    r"|\{%(?P<open>[-+]?)\s*(?P<word>(?:end)?generation)\s*(?P<close>[-+]?)%\}",
    re.DOTALL,
)
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
            return tag[0]
        if scoped:
            return f"{{%{tag['open']} {tag['word'].replace('generation', 'with')} {tag['close']}%}}"
        return f"{{#{tag['open']} {tag['close']}#}}"

    return _TAG.sub(plain, source)


def end_of_turn(source: str, tokens: Mapping[str, Any], added: Iterable[str]) -> str:
    """Return the token that a template writes after an answer; empty if there is none.

    Args:
        source: the template; it may have ``{% generation %}``.
        tokens: the special tokens by the names that a template uses, such as ``eos_token``.
        added: the texts of all special and added tokens.
    """
    chat = [{"role": "user", "content": "x"}, {"role": "assistant", "content": _ANSWER}]
    try:
        text = _render(without_generation(source), {name: str(token) for name, token in tokens.items()}, chat)
    except Exception:  # a template can raise anything, and some reject this chat
        return ""
    _, found, rest = text.rpartition(_ANSWER)
    after = rest.lstrip()
    return max((token for token in added if found and token and after.startswith(token)), key=len, default="")


def _render(source: str, tokens: Mapping[str, str], chat: list[dict[str, str]]) -> str:
    import jinja2
    import jinja2.ext
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message: str) -> None:
        raise jinja2.exceptions.TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    environment.globals |= {"raise_exception": refuse, "strftime_now": datetime.datetime.now().strftime}
    values = {"messages": chat, "tools": None, "documents": None, "add_generation_prompt": False}
    return environment.from_string(source).render(**tokens, **values)
