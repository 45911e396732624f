"""Find what the assistant says in the rendering of a chat: the text that carries loss.

A template can render a message differently when others follow, so the rendering of a part of a chat says little about the
whole. Marks are put around the texts of all messages instead: contents, reasoning, names and arguments of calls. The marked
chat is rendered, and must equal the plain rendering but for the marks. Then the places of the marks are the places of the texts.
An answer begins where the header of its turn ends, and ends with what ends its turn; both are found next to the marks, by
rendering the chat up to the answer with the header of an answer, and the chat up to and including the answer. What cannot be
found raises TemplateError: nothing is trained in part.
"""

import itertools
import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from trainer.common.formats import quoted
from trainer.data.chat_calls import check_json, check_text_of_arguments, check_values, forms_of_calls
from trainer.data.chat_marks import PLANES, REASONING_KEYS, Marker, Piece, Reading, Span
from trainer.data.hf_template import ChatTemplate, TemplateError

# What a template writes between the header of an answer and its reasoning, or in place of it.
_REASONING_EDGES = re.compile(r"</?[^<>\s]*think[^<>\s]*>|◁/?think▷|\[/?THINK\]")
_REASONING_EDGE = re.compile(rf"(?:\s|{_REASONING_EDGES.pattern})*")
_FIELDS = {"reasoning": "reasoning (reasoning_content)", "tool call": "tool call (tool_calls)"}
_CACHED = 4096  # tails that are kept


@dataclass(frozen=True)
class AnswerSpans:
    """A rendered chat. `spans`: the characters of each answer with loss, in order. `open_end`: nothing ends the last answer.

    `left_out`: what the template does not render of earlier answers when later turns follow, such as "reasoning".
    """

    text: str
    spans: tuple[Span, ...]
    open_end: bool = False
    left_out: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Chat:
    """A chat in the form in which the template renders all of it, with its marks."""

    messages: Sequence[Mapping[str, Any]]
    marked: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]]
    variables: Mapping[str, Any]
    pieces: Sequence[Piece]
    marks: re.Pattern[str]
    reading: Reading
    key: tuple[Any, ...]  # the structure of each message, and of the chat

    def key_of(self, count: int) -> tuple[Any, ...]:
        """Return the structure of the first messages: with few exceptions, it determines the texts around the contents."""
        return (count, *self.key[:count], *self.key[len(self.messages) :])


@dataclass(frozen=True)
class _Turn:
    """Where an answer stands: the text between the mark before it and the mark after it, and the marks of its own texts.

    `before`: the mark before the answer, empty for none. `begin`, `limit`: the places of the marks around it. `first`, `last`:
    where its own texts begin and end; None for an empty answer. `last_mark`: the mark at `last`, empty for an empty answer.
    """

    before: str
    begin: int
    limit: int
    first: int | None
    last: int | None
    last_mark: str


class AnswerFinder:
    def __init__(self, template: ChatTemplate, special: Iterable[str] = ()) -> None:
        """`special`: the texts of the tokens that are never split, such as ``<|im_end|>``."""
        self.template = template
        longest = sorted(filter(None, special), key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, longest)) or r"(?!)")
        self._tails: dict[tuple[Any, ...], str] = {}

    def __call__(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] | None = None,
        silent: Collection[int] = (),
    ) -> AnswerSpans:
        """Return a chat's text and where its answers are.

        Args:
            messages: role and content of each; an assistant can have `reasoning_content` and `tool_calls`.
            tools: the descriptions of its tools.
            variables: other variables of the template.
            silent: the indices of answers without loss.

        Raises TemplateError: the template rejects the chat, leaves out a part of it, or the answers cannot be located.
        """
        problems: list[TemplateError] = []
        # Calls as Python writes them are the format of few templates, and a form that another template does not expect.
        for python in (False, True) if any(message.get("tool_calls") for message in messages) else (False,):
            for form in forms_of_calls(messages):
                try:
                    chat = self._prove(form, tools, variables or {})
                    return self._locate(chat, silent, python)
                except TemplateError as error:
                    problems.append(error)
        # What is left out of a rendering says more about the chat than a form that the template rejects.
        raise min(problems, key=lambda error: ("leaves out" not in str(error), "rejects" in str(error)))

    @cached_property
    def end_of_turn(self) -> str:
        """What ends an answer at the end of a chat, such as ``<|im_end|>``; empty if the template writes nothing there."""
        question, answer = "zquserzq", "zqanswerzq"
        chat = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        try:
            return self.template.render(chat, False).rpartition(answer)[2].rstrip()
        except TemplateError:
            return ""

    @cached_property
    def _end_within(self) -> str:
        """What ends an answer also where other turns follow, such as ``<|end|>`` without an EOS behind it; empty for nothing."""
        answer = "zqanswerzq"
        said = (("user", "zquserzq"), ("assistant", answer), ("user", "zqotherzq"))
        chat = [{"role": role, "content": text} for role, text in said]
        try:
            tail = self.template.render(chat, False).rpartition(answer)[2].partition("zqotherzq")[0]
        except TemplateError:
            return ""
        common = tail[: self._common(tail, self.end_of_turn)].rstrip()
        return common if self._special.search(common) else ""

    @cached_property
    def _generation_prompt(self) -> str:
        """The header of an answer; empty if the template has none."""
        question, answer = ({"role": role, "content": f"zq{role}zq"} for role in ("user", "assistant"))
        try:
            without, header = self.template.render([question], False), self.template.render([question], True)
            if header.startswith(without) and header != without:
                return header.removeprefix(without)
            # A template without a prompt for answers, or with EOS behind the question: what stands before an answer.
            own = without.rpartition(question["content"])[2]
            between = self.template.render([question, answer], False).rpartition(answer["content"])[0]
        except TemplateError:
            return ""
        between = between.rpartition(question["content"])[2]
        return _REASONING_EDGES.sub("", between[self._common(between, own) :])

    # Proof --------------------------------------------------------------------------------------------------------------

    def _prove(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]
    ) -> _Chat:
        """Return the chat with its marks after the proof that they change nothing. Raises TemplateError."""
        plain = self.template.render_blocks(messages, tools=tools, variables=variables)
        plane, marks = next((plane for plane in PLANES if not plane[1].search(plain.text)), (0, None))
        if marks is None:
            raise TemplateError("a chat has characters of both private planes of Unicode: remove them")
        has_calls = any(message.get("tool_calls") for message in messages)
        for in_arguments, middle in itertools.product((True, False) if has_calls else (True,), (False, True)):
            marker = Marker(plane, middle, in_arguments)
            marked = [marker.message(index, message) for index, message in enumerate(messages)]
            marked_tools = marker.tools(tools)
            try:
                rendered = self.template.render_blocks(marked, tools=marked_tools, variables=variables)
            except TemplateError:
                continue
            reading = Reading.of(rendered, marks)
            if reading.text == plain.text:
                variables_key = json.dumps(variables, sort_keys=True) if variables else ""
                key = (*map(_structure, messages), bool(tools), variables_key, middle, in_arguments)
                return _Chat(messages, marked, marked_tools, variables, marker.pieces, marks, reading, key)
        raise TemplateError("chat template: it changes the texts of messages so that the answers cannot be located")

    def _read(self, chat: _Chat, count: int, *, generation_prompt: bool = False) -> Reading | None:
        """Return the reading of the first `count` messages, or None if the template rejects them."""
        try:
            rendered = self.template.render_blocks(
                chat.marked[:count], tools=chat.tools, variables=chat.variables, generation_prompt=generation_prompt
            )
        except TemplateError:
            return None
        return Reading.of(rendered, chat.marks)

    def _left_out(self, chat: _Chat) -> Iterator[str]:
        """Yield what the template leaves out of earlier answers because of later turns. Raises TemplateError for other texts."""
        for piece in chat.pieces:
            is_answer = piece.message >= 0 and chat.messages[piece.message]["role"] == "assistant"
            if piece.open in chat.reading.places:
                if is_answer and piece.what in ("content", "reasoning") and piece.open in chat.reading.repeated:
                    raise TemplateError(f"chat template: it writes the {piece.what} of an answer twice")
                if is_answer and piece.what in ("content", "reasoning"):
                    first, last = chat.reading.places[piece.open], chat.reading.places.get(piece.close, -1)
                    if chat.reading.text[first:last] != piece.text:
                        raise TemplateError(f"chat template: it changes the {piece.what} of an answer")
                check_text_of_arguments(piece, chat.reading)
                continue
            # A template can leave out reasoning, and a text beside a call, which some take as reasoning; nothing else.
            may_miss = is_answer and (
                piece.what == "reasoning"
                or (piece.what == "content" and chat.messages[piece.message].get("tool_calls"))
            )
            own = self._read(chat, piece.message + 1) if may_miss else None
            if own is None or piece.open not in own.places:
                raise TemplateError(_missing(piece, is_answer=is_answer))
            yield piece.what

    # Places -------------------------------------------------------------------------------------------------------------

    def _locate(self, chat: _Chat, silent: Collection[int], python: bool) -> AnswerSpans:
        left_out = tuple(self._left_out(chat))
        spans: list[Span] = []
        open_end = False
        for index, message in enumerate(chat.messages):
            if message["role"] == "assistant":
                found, is_open = self._spans(chat, index)
                check_values(message, chat.reading.text[found[0][0] : found[-1][1]])
                if not python:
                    check_json(message, chat.reading.text[found[0][0] : found[-1][1]])
                if index not in silent:
                    spans += found
                    open_end = is_open and index == len(chat.messages) - 1
        if any(second[0] < first[1] for first, second in itertools.pairwise(spans)):
            raise TemplateError("chat template: it writes the answers of a chat out of order")
        return AnswerSpans(chat.reading.text, tuple(spans), open_end, left_out)

    def _spans(self, chat: _Chat, index: int) -> tuple[list[Span], bool]:
        """Return where the answer with this index stands, and whether nothing ends it. Raises TemplateError."""
        if chat.reading.blocks:
            rendered = (piece for piece in chat.pieces if piece.message == index and piece.open in chat.reading.places)
            for piece in rendered:
                first, last = chat.reading.places[piece.open], chat.reading.places[piece.close]
                if not any(begin <= first and last <= end for begin, end in chat.reading.blocks):
                    raise TemplateError(f"chat template: its generation blocks leave out the {piece.what} of an answer")
        spans: list[Span] = []
        is_open = False
        for number, turn in enumerate(_turns(chat, index)):
            found, is_open = self._turn_spans(chat, index, turn, is_first=number == 0)
            spans += found
        return spans, is_open

    def _turn_spans(self, chat: _Chat, index: int, turn: _Turn, *, is_first: bool) -> tuple[list[Span], bool]:
        # The block of the answer before ends behind its last mark, and that of the next one begins before its first.
        low = turn.begin + 1 if turn.first is None else turn.first
        high = turn.limit - 1 if turn.last is None else turn.last
        blocks = [block for block in chat.reading.blocks if block[0] <= high and block[1] >= low]
        if blocks and blocks[0][0] >= turn.begin:
            start = blocks[0][0]
        else:  # also where a block has more than the answer
            start = turn.begin + self._header(chat, index, turn) if is_first or turn.first is None else turn.first
        anchor = start if turn.last is None else turn.last
        size, is_open = self._ending(chat, index, turn, anchor)
        end = anchor + size
        if not blocks:
            return [(start, end)], is_open
        if blocks[-1][1] <= turn.limit:
            end = max(blocks[-1][1], end)
        edges = [start, *[edge for block in blocks for edge in block][1:-1], end]
        return list(zip(edges[::2], edges[1::2], strict=True)), is_open

    def _header(self, chat: _Chat, index: int, turn: _Turn) -> int:
        """Return the number of characters between the mark before an answer and the answer. Raises TemplateError."""
        gap = chat.reading.text[turn.begin : turn.limit if turn.first is None else turn.first]
        key = ("prompt", gap, chat.key_of(index))
        tail = self._tails.get(key)
        if tail is None:
            prompt = self._read(chat, index, generation_prompt=True) if turn.before else None
            tail = None
            if prompt and prompt.order and prompt.order[-1] == turn.before:
                tail = self._keep(key, prompt.after(turn.before))
        if tail is not None:
            size = self._common(gap, tail)
            rest = tail[size:]
            missing = self._generation_prompt.strip()
            after = gap[size:].lstrip()
            if not rest and missing and after.startswith(missing):
                # The prompt for an answer after the result of a tool can lack the header that the rendering has.
                return len(gap) - len(after.removeprefix(missing).lstrip())
            if not rest or not gap[size:].strip() or _REASONING_EDGE.fullmatch(rest):
                return size
        header = self._generation_prompt
        plain = _REASONING_EDGES.sub("", header)
        for text in (header, header.rstrip(), plain, plain.rstrip()):
            at = gap.find(text) if turn.first is None else gap.rfind(text)
            if text and at >= 0:
                return at + len(text)
        if not header.strip():
            return len(gap) if turn.first is not None else 0
        raise TemplateError(f"chat template: the beginning of the answer in message {index} cannot be located")

    def _ending(self, chat: _Chat, index: int, turn: _Turn, anchor: int) -> tuple[int, bool]:
        """Return the number of characters after the last text of an answer that belong to it, and whether nothing ends it."""
        tail = chat.reading.text[anchor : turn.limit]
        is_last = index == len(chat.messages) - 1
        if turn.last is None and self._end_within not in tail:
            raise TemplateError(f"chat template: it leaves out the empty answer in message {index}: remove it")
        own = tail if is_last else self._own_tail(chat, index, turn, anchor, tail)
        body = own.rstrip()
        common = self._common(tail, body)
        if body and common == len(body) and self.end_of_turn:
            return common, False
        if is_last:
            return len(tail), True
        if self._end_within and (at := own.find(self._end_within)) >= 0 and at + len(self._end_within) <= common:
            return at + len(self._end_within), False
        # Nothing ends an answer, or something else than at the end of a chat: then the next role's marker does.
        marker = self._special.search(tail, common)
        return (marker.end() if marker else len(tail.rstrip())), False

    def _own_tail(self, chat: _Chat, index: int, turn: _Turn, anchor: int, tail: str) -> str:
        """Return what follows the last text of an answer if the chat ends with it."""
        key = ("answer", tail, chat.key_of(index + 1))
        own = self._tails.get(key)
        if own is not None:
            return own
        reading = self._read(chat, index + 1)
        mark = turn.last_mark or turn.before
        if reading is None or mark not in reading.places:
            return self.end_of_turn
        own = reading.after(mark)
        return self._keep(key, own if turn.last_mark else own[anchor - turn.begin :])

    def _common(self, one: str, other: str) -> int:
        """Return the number of characters at the beginning of both, without a part of a special token."""
        size = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
        for match in self._special.finditer(one):
            if match.start() < size < match.end():
                return match.start()
        return size

    def _keep(self, key: tuple[Any, ...], tail: str) -> str:
        if len(self._tails) >= _CACHED:
            self._tails.clear()
        self._tails[key] = tail
        return tail


def _turns(chat: _Chat, index: int) -> list[_Turn]:
    """Return where an answer stands among the marks of a chat: more than once if results of tools stand within. Raises TemplateError."""
    order, places = chat.reading.order, chat.reading.places
    message = {mark: piece.message for piece in chat.pieces for mark in (piece.open, piece.close)}
    own = [at for at, mark in enumerate(order) if message[mark] == index]
    if not own:
        at = max((at + 1 for at, mark in enumerate(order) if message[mark] < index), default=0)
        begin, limit = (places[order[at - 1]] if at else 0), _place(chat, at)
        return [_Turn(order[at - 1] if at else "", begin, limit, None, None, "")]
    turns = []
    for first, last in _runs(own):
        before = order[first - 1] if first else ""
        begin, mark = places[before] if before else 0, order[last]
        turns.append(_Turn(before, begin, _place(chat, last + 1), places[order[first]], places[mark], mark))
    within = {message[mark] for mark in order[own[0] : own[-1]]} - {index}
    if any(chat.messages[other]["role"] != "tool" for other in within):
        raise TemplateError("chat template: it writes the answers of a chat out of order")
    return turns


def _place(chat: _Chat, at: int) -> int:
    """Return the place of a mark by its number; the end of the text behind the last one."""
    order = chat.reading.order
    return chat.reading.places[order[at]] if at < len(order) else len(chat.reading.text)


def _runs(numbers: Sequence[int]) -> list[Span]:
    """Return the first and the last of each run of numbers that follow each other."""
    starts = [number for place, number in enumerate(numbers) if not place or numbers[place - 1] != number - 1]
    ends = [number for place, number in enumerate(numbers, 1) if place == len(numbers) or numbers[place] != number + 1]
    return list(zip(starts, ends, strict=True))


def _structure(message: Mapping[str, Any]) -> tuple[Any, ...]:
    calls = message.get("tool_calls")
    return message["role"], bool(message.get("content")), REASONING_KEYS[0] in message, len(calls) if calls else 0


def _missing(piece: Piece, *, is_answer: bool) -> str:
    if piece.what == "tools":
        return "chat template: it has no tools: use a model that calls tools, or remove 'tools'"
    if piece.what == "system message":
        return "chat template: it leaves out the system message: remove it, or set system=prepend"
    if not is_answer:
        return f"chat template: it leaves out the {piece.what} {quoted(piece.text, 40)} (message {piece.message}): remove it"
    remedy = "use a model that calls tools" if piece.what in ("tool call", "arguments") else "remove it"
    return (
        f"chat template: it leaves out the {_FIELDS.get(piece.what, piece.what)} of message {piece.message}: {remedy}"
    )
