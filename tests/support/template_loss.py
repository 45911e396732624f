"""An independent check of which text of a chat carries loss: chat templates x situations.

The trained text is compared with the roles' markers, which are written down here by hand for each family of templates; nothing of
`trainer` decides what is right.
"""

import copy
import functools
import itertools
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from chat_templates import Row, Template
from tokenizer_kinds import byte_letters

from trainer.common.errors import UserError
from trainer.data.encode import Encoder
from trainer.data.shapes import to_sample

_WORD = re.compile(
    r"[a-z]+?\d(?:word|name|value|key)?"
)  # the words of the situations: each occurs once, but for names of calls
_MARKER = re.compile(
    r"<\|[A-Za-z_]+\|>|<｜[^｜]+｜>|<\|[a-z_]+>|<[a-z_]+\|>|\[gMASK\]|<sop>|</?(?:s|think|tool_call|tool_response|arg_key|arg_value)>"
    r"|<(?:start_of_turn|end_of_turn|end_of_utterance|image|bos|eos|turn|end_turn)>"
)


@functools.cache
def _core() -> Any:
    """Return a byte-level BPE tokenizer with merges of the words of the situations."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    core = Tokenizer(models.BPE())
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    lines = [
        "user assistant system model tool name arguments functions to= commentary json word value argvalue \n\n \n "
    ] * 50
    how = trainers.BpeTrainer(vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    core.train_from_iterator(lines, how)
    return core


def tokenizer_of(template: Template) -> Any:
    """Return a small tokenizer that knows the markers of a template."""
    from tokenizers import AddedToken
    from transformers import PreTrainedTokenizerFast

    family = template.family
    named = {"eos_token": family.eos, **({"bos_token": family.bos} if family.bos else {})}
    made = PreTrainedTokenizerFast(tokenizer_object=copy.deepcopy(_core()), **named)
    # Tokens of reasoning and calls are no special tokens in the field.
    plain = ("think", "tool_", "arg_")
    markers = sorted({*_MARKER.findall(template.text)})
    made.add_tokens([AddedToken(marker, special=not marker.strip("</").startswith(plain)) for marker in markers])
    made.chat_template = template.text
    return made


_BYTE_OF = {letter: byte for byte, letter in enumerate(byte_letters())}


def spelled(tokenizer: Any, ids: list[int], mask: list[bool]) -> tuple[str, list[bool]]:
    """Return the text of the tokens, and for every character whether all of its bytes carry loss."""
    added = {place: str(token) for place, token in tokenizer.added_tokens_decoder.items()}
    data, flags = bytearray(), []
    for place, trained in zip(ids, mask, strict=True):
        if place in added:
            piece = added[place].encode()
        else:
            piece = bytes(_BYTE_OF[letter] for letter in tokenizer.convert_ids_to_tokens(place))
        data += piece
        flags += [trained] * len(piece)
    text, start, trained_chars = data.decode(), 0, []
    for letter in text:
        size = len(letter.encode())
        trained_chars.append(all(flags[start : start + size]))
        start += size
    return text, trained_chars


@dataclass
class Words:
    """The words of a record: which the assistant says, which are earlier reasoning, and which others there are."""

    said: set[str] = field(default_factory=set)
    reasons: dict[str, int] = field(default_factory=dict)  # the word, and the place of its message
    given: set[str] = field(default_factory=set)
    names: set[str] = field(default_factory=set)  # of calls: they stand in the descriptions and results of tools too


_PARTS = re.compile(r"\[['\"]text['\"]\]|\.text\b")  # a template that reads contents as lists of parts
_REASONING = ("reasoning_content", "thinking", "reasoning")


def _words_in(text: str) -> set[str]:
    """Return the words of a rendering: a template can change their case, and write line ends as JSON does."""
    return {*_WORD.findall(re.sub(r"\\[nt]", " ", text.lower()))}


def words_of(row: Row) -> Words:
    found = Words()
    for place, message in enumerate(row["messages"]):
        words = {*_WORD.findall(str(message.get("content") or ""))}
        if message["role"] != "assistant":
            found.given |= words
            continue
        calls = message.get("tool_calls") or []
        called = {call["function"]["name"] for call in calls}
        arguments = {
            word
            for call in calls
            for word in _WORD.findall(json.dumps(call["function"]["arguments"], ensure_ascii=False))
        }
        beside = {word for key in _REASONING for word in _WORD.findall(message.get(key) or "")}
        found.names |= called
        found.said |= words | called | arguments | beside
        # A template can take the text beside a call as reasoning (as gpt-oss).
        found.reasons |= {word: place for word in words | beside if word.startswith("r") or calls}
    described = {*_WORD.findall(json.dumps(row.get("tools") or []))}
    found.given |= {word for word in described if not word.startswith("arg")}
    found.given -= found.said
    return found


# transformers leaves out keys that are null, and other servers do not: the template takes the chat from another variable.
_NOBODY = [{"role": "user", "content": "nobody"}]
_KEEP_NULL = "{%- set messages = chat +%}"


def renderings(tokenizer: Any, row: Row) -> Iterator[str]:
    """Yield every way to render a record: forms of arguments, empty contents, lists of parts and names of reasoning."""
    tools = row.get("tools")
    messages = row["messages"]
    calls = any(message.get("tool_calls") for message in messages)
    thinks = any(key in message for message in messages for key in _REASONING)
    forms = itertools.product(
        ("object", "text") if calls else ("object",),
        ("", None, "absent") if calls else ("",),
        (False, True) if _PARTS.search(tokenizer.chat_template) else (False,),
        ((), *((name,) for name in _REASONING), _REASONING) if thinks else ((),),
        (False, True) if calls else (False,),
    )
    seen = set()
    for arguments, empty, parts, names, kept in forms:
        chat = [_formed(message, arguments, empty, parts, names, kept) for message in messages]
        try:
            text = tokenizer.apply_chat_template(
                _NOBODY, tools=tools, tokenize=False, chat=chat, chat_template=_KEEP_NULL + tokenizer.chat_template
            )
        except Exception:  # any error of the template: this form is not for it
            continue
        if text not in seen:
            seen.add(text)
            yield text


def _formed(message: Row, arguments: str, empty: str | None, parts: bool, names: tuple[str, ...], kept: bool) -> Row:
    made = {key: value for key, value in copy.deepcopy(message).items() if key not in _REASONING}
    reasoning = next((message[key] for key in _REASONING if key in message), None)
    if reasoning is not None:
        made |= dict.fromkeys(names, reasoning)
    for call in made.get("tool_calls") or []:
        value = call["function"]["arguments"]
        value = json.loads(value) if isinstance(value, str) else value
        # Text that the record has stays as it is written.
        text = message["tool_calls"][0]["function"]["arguments"]
        call["function"]["arguments"] = (
            (
                text
                if isinstance(text, str) and len(made["tool_calls"]) == 1
                else json.dumps(value, ensure_ascii=not kept)
            )
            if arguments == "text"
            else value
        )
    if not made.get("content") and made.get("tool_calls"):
        made["content"] = empty
        if empty == "absent":
            del made["content"]
    elif parts:
        made["content"] = [{"type": "text", "text": made["content"]}]
    return made


@dataclass(frozen=True)
class Verdict:
    """`kind`: ok, refused (nothing else was possible), REFUSED (it could be rendered whole), or WRONG."""

    kind: str
    what: str = ""

    def __str__(self) -> str:
        return f"{self.kind}: {self.what}" if self.what else self.kind


class Bed:
    """One template with its tokenizer and the encoder under test."""

    def __init__(self, template: Template) -> None:
        self.template, self.family = template, template.family
        self.tokenizer = tokenizer_of(template)
        # The author of the template may count the header as generated.
        self.generation = "endgeneration" in template.text
        self.encoder = Encoder(copy.deepcopy(self.tokenizer), seq_length=4096, train_on="answer")

    def verdict(self, row: Row) -> Verdict:
        try:
            sample = to_sample(copy.deepcopy(row))
            encoded = self.encoder.encode(sample)
        except (UserError, ValueError) as error:
            return self._refusal(row, str(error))
        except Exception as error:
            return Verdict("WRONG", f"{type(error).__name__}: {error}")
        ids, mask = encoded.ids, encoded.answered
        if len(ids) != len(mask):
            return Verdict("WRONG", f"{len(ids)} tokens and {len(mask)} flags")
        text, trained = spelled(self.tokenizer, ids, mask)
        if not any(text in (one, one + self.family.eos) for one in renderings(self.tokenizer, row)):
            return Verdict("WRONG", f"the tokens are no rendering of the chat: {text!r}")
        if self.family.never and (bad := re.search(self.family.never, text)):
            return Verdict("WRONG", f"it has {bad[0]!r}: {text!r}")
        words = words_of(row)
        faults = [
            *self._lost(row, text, words, " ".join(encoded.notes)),
            *self._flags(text, trained),
            *self._words(text, trained, words),
        ]
        return Verdict("WRONG", "; ".join(dict.fromkeys(faults))) if faults else Verdict("ok")

    def _refusal(self, row: Row, error: str) -> Verdict:
        """Return whether a refusal was needed: no form of the record can be rendered with all of its words."""
        if "\n" in error or len(error) > 600:
            return Verdict("WRONG", f"the refusal is not one short line: {error!r}")
        words = words_of(row)
        every = words.said | words.given
        described = json.dumps(row.get("tools") or [])
        whole = any(
            every <= _words_in(text) and all(text.count(name) > described.count(name) for name in words.names)
            for text in renderings(self.tokenizer, row)
        )
        return Verdict("REFUSED" if whole else "refused", error)

    def _lost(self, row: Row, text: str, words: Words, notes: str) -> Iterator[str]:
        """Yield the words that the template left out without a report. Only earlier reasoning may be left out at all."""
        here = _words_in(text)
        for word in sorted((words.said | words.given) - here):
            if word in words.reasons and self._later_turns_hide(row, word, words.reasons[word]):
                if not notes:
                    yield f"{word} is left out, and not counted"
                continue
            yield f"{word} is silently left out"

    def _later_turns_hide(self, row: Row, word: str, place: int) -> bool:
        """Return whether a word of reasoning is rendered where its message is the last: the template hides it by design."""
        cut = {**row, "messages": row["messages"][: place + 1]}
        return place + 1 < len(row["messages"]) and any(word in text for text in renderings(self.tokenizer, cut))

    def _flags(self, text: str, trained: list[bool]) -> Iterator[str]:
        """Yield what is trained outside of answers, and what is not trained within."""
        must, may = self._zones(text)
        for label, bad in (
            ("trained", [flag and not (a or b) for flag, a, b in zip(trained, must, may, strict=True)]),
            ("not trained", [a and not (flag or b) for flag, a, b in zip(trained, must, may, strict=True)]),
        ):
            start = 0
            for flag, group in itertools.groupby(bad):
                stop = start + len(list(group))
                if flag:
                    piece = text[start:stop]
                    yield f"{label}: {piece if stop - start < 80 else piece[:60] + '...' + piece[-15:]!r}"
                start = stop
        closed = re.search(rf"(?:{self.family.end})\Z", text)
        if self.family.no_end and must and must[-1] and not (closed and closed[0]):
            yield "nothing ends the last answer"

    def _zones(self, text: str) -> tuple[list[bool], list[bool]]:
        """Return for every character whether it must carry loss, and whether it may or may not."""
        family = self.family
        must, may = [False] * len(text), [False] * len(text)
        where = 0
        last_end = -1
        header = re.compile(family.header)
        while match := header.search(text, where):
            end = re.compile(family.end, re.DOTALL).search(text, match.end())
            stop = end.end() if end else len(text)
            if self.generation or (family.chained and match.start() == last_end):
                may[match.start() : match.end()] = [True] * (match.end() - match.start())
            # A token of white space can reach from the header into the answer.
            blank = len(match[0]) - len(match[0].rstrip())
            may[match.end() - blank : match.end()] = [True] * blank
            must[match.end() : stop] = [True] * (stop - match.end())
            for inner in re.finditer(family.not_said or "(?!)", text[match.end() : stop], re.DOTALL):
                a, b = match.end() + inner.start(), match.end() + inner.end()
                must[a:b] = [False] * (b - a)
            for inner in re.finditer(family.optional, text[match.end() : stop]):
                a, b = match.end() + inner.start(), match.end() + inner.end()
                may[a:b] = [True] * (b - a)
            after = re.compile(family.after).match(text, stop)
            may[stop : after.end()] = [True] * (after.end() - stop)
            last_end = stop
            # The marker that ends an answer without an end of its own is a part of the next header.
            where = end.start() if family.no_end and end and end.start() > match.start() else stop
        if text.endswith(family.eos):
            may[-len(family.eos) :] = [True] * len(family.eos)
        return must, may

    def _words(self, text: str, trained: list[bool], words: Words) -> Iterator[str]:
        """Yield words that carry loss and must not, and words that must and do not."""
        for match in _WORD.finditer(text):
            flags = trained[match.start() : match.end()]
            if match[0] in words.given and any(flags):
                yield f"{match[0]} is trained"
            elif match[0] in words.said - words.names and not all(flags) and text.count(match[0]) == 1:
                yield f"{match[0]} is not trained"
        for word in words.names:
            places = [match.start() for match in re.finditer(re.escape(word), text)]
            if places and not any(all(trained[place : place + len(word)]) for place in places):
                yield f"{word} is not trained"
