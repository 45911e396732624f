"""Put marks around the texts of a chat, and find them in its rendering."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trainer.data.hf_template import Rendered, TemplateError
from trainer.data.reasoning import CLOSING, OPENING

Span = tuple[int, int]  # characters [start, end) of a rendering
# Marks are characters of a private plane of Unicode that the chat itself does not use.
PLANES = ((0xF0000, re.compile("[\U000f0000-\U000ffffd]")), (0x100000, re.compile("[\U00100000-\U0010fffd]")))
_MARKS = 0xFFFE  # of a plane
REASONING_KEYS = ("reasoning_content", "thinking")  # templates read one of them


@dataclass(frozen=True)
class Piece:
    """A marked text of a message: `what` names it in messages to users. `open`, `close`: its marks."""

    message: int
    what: str
    open: str
    close: str
    text: str = ""


@dataclass
class Marker:
    plane: int
    middle: bool  # mark messages that are not answers in their middle: templates can look at how they begin and end
    in_arguments: bool  # mark the names of arguments: templates can sort them
    pieces: list[Piece] = field(default_factory=list)

    def _next(self, message: int, what: str, text: str = "") -> Piece:
        first = self.plane + 2 * len(self.pieces)
        if 2 * len(self.pieces) + 2 > _MARKS:
            raise TemplateError("a chat has too many messages")
        self.pieces.append(Piece(message, what, chr(first), chr(first + 1), text))
        return self.pieces[-1]

    def text(self, message: int, what: str, text: str, *, middle: bool = False) -> str:
        """Return a text with marks inside of the spaces around it, which templates remove; a blank text unchanged."""
        core = text.strip()
        if not core:
            return text
        piece = self._next(message, what, core)
        start = text.index(core)
        if middle:
            at = start + len(core) // 2
            return f"{text[:at]}{piece.open}{piece.close}{text[at:]}"
        end = start + len(core)
        return f"{text[:start]}{piece.open}{core}{piece.close}{text[end:]}"

    def content(self, message: int, text: str) -> str:
        """Return the content of an answer with marks around its reasoning and around the rest."""
        closing = CLOSING.search(text)
        if not closing:
            return self.text(message, "content", text)
        opening = OPENING.match(text)
        start = opening.end() if opening else 0
        final = [*CLOSING.finditer(text)][-1]
        last = final.end()
        inside, between = text[start : closing.start()], closing[0]
        if final.start() > closing.start():
            between += self.text(message, "content", text[closing.end() : final.start()]) + final[0]
        head = text[:start] + self.text(message, "reasoning", inside)
        return head + between + self.text(message, "content", text[last:])

    def arguments(self, message: int, value: Any) -> Any:
        """Return the arguments of a call with marks: around a text, or around the names of an object."""
        if isinstance(value, str):
            return self.text(message, "arguments", value)
        if isinstance(value, dict) and self.in_arguments:
            return {self.text(message, "arguments", name): each for name, each in value.items()}
        return value

    def message(self, index: int, message: Mapping[str, Any]) -> dict[str, Any]:
        marked = dict(message)
        role, content = message["role"], message.get("content")
        if role != "assistant":
            if isinstance(content, str):
                marked["content"] = self.text(index, f"{role} message", content, middle=self.middle)
            if role != "tool" and isinstance(name := message.get("name"), str):
                marked["name"] = self.text(index, "name", name)
            return marked
        if isinstance(reasoning := message.get(REASONING_KEYS[0]), str):
            marked |= dict.fromkeys(REASONING_KEYS, self.text(index, "reasoning", reasoning))
        if isinstance(content, str):
            marked["content"] = self.content(index, content)
        if isinstance(name := message.get("name"), str):
            marked["name"] = self.text(index, "name", name)
        if calls := message.get("tool_calls"):
            marked["tool_calls"] = [self._call(index, call) for call in calls]
        return marked

    def _call(self, index: int, call: Mapping[str, Any]) -> dict[str, Any]:
        function = call["function"]
        name = self.text(index, "tool call", function["name"])
        return {
            **call,
            "function": {**function, "name": name, "arguments": self.arguments(index, function["arguments"])},
        }

    def tools(self, tools: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        return [self._tool(tool) for tool in tools]

    def _tool(self, tool: Mapping[str, Any]) -> Mapping[str, Any]:
        function = tool.get("function", tool)
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            return tool
        named = {**function, "name": self.text(-1, "tools", function["name"])}
        return {**tool, "function": named} if "function" in tool else named


@dataclass(frozen=True)
class Reading:
    """A rendering of a marked chat without its marks. `places`: where each mark stood first; `order`: the marks in this order."""

    text: str
    places: Mapping[str, int]
    order: Sequence[str]
    repeated: frozenset[str]
    blocks: Sequence[Span]

    @classmethod
    def of(cls, rendered: Rendered, marks: re.Pattern[str]) -> Reading:
        pieces: list[str] = []
        places: dict[str, int] = {}
        repeated: set[str] = set()
        cuts: list[int] = []
        at = 0
        for count, match in enumerate(marks.finditer(rendered.text)):
            pieces.append(rendered.text[at : match.start()])
            at = match.end()
            if match[0] in places:
                repeated.add(match[0])
            else:
                places[match[0]] = match.start() - count
            cuts.append(match.start())
        pieces.append(rendered.text[at:])
        blocks = [(begin - bisect_left(cuts, begin), end - bisect_left(cuts, end)) for begin, end in rendered.blocks]
        return cls("".join(pieces), places, [*places], frozenset(repeated), blocks)

    def after(self, mark: str) -> str:
        index = self.order.index(mark) + 1
        end = self.places[self.order[index]] if index < len(self.order) else len(self.text)
        return self.text[self.places[mark] : end]
