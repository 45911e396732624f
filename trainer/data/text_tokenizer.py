"""What the encoding of samples needs of a tokenizer: ids with their places in the text, special tokens, the chat template.

It comes from a tokenizer of transformers on the hosts, and from the files of a model on the controller, which has no
transformers.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.common.errors import UserError, first_line
from trainer.data.hf_template import read_object, read_templates
from trainer.data.plain_template import PLAIN_TEMPLATE
from trainer.data.special_tokens import add_tokens, class_of, default_tokens, set_pipeline

Offsets = Sequence[tuple[int, int]]
_PROBE = "a"


@contextlib.contextmanager
def naming_panics(tokenizer: object) -> Iterator[None]:
    """Raise UserError, which names a tokenizer, for a panic of the library tokenizers: its files are not valid, but it is no Exception."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise UserError(f"model: the tokenizer {tokenizer} fails: {first_line(error)}: use another model") from None


@dataclass(frozen=True)
class TextTokenizer:
    """A tokenizer of text.

    Attributes:
        tokenize: returns the token ids of a text, without tokens that the text does not name, and the characters [start, end)
            of each; None instead of the characters if the tokenizer does not know them.
    """

    tokenize: Callable[[str], tuple[list[int], Offsets | None]]
    decode: Callable[[list[int]], str]  # returns the text of tokens, with that of special tokens
    template: str  # the default chat template; empty if the model has others only
    tokens: Mapping[str, str]  # the special tokens by name, such as bos_token
    begin: tuple[int, ...]  # the ids that the tokenizer puts before a text, such as that of BOS
    eos: int | None  # id of the token that ends a text; None if there is none
    added: frozenset[str]  # the texts of all tokens that are never split
    vocabulary: str  # a digest of the vocabulary
    rows: int | None = None  # of the model's embedding; None if that is unknown
    tool_template: str = ""  # the chat template for chats with tools; empty if it is the default one

    @classmethod
    def of(cls, tokenizer: Any) -> TextTokenizer:
        """Return the one of a tokenizer of transformers, whose default template is the plain one."""
        backend = getattr(tokenizer, "backend_tokenizer", None)
        vocabulary = backend.to_str() if backend else json.dumps(tokenizer.get_vocab(), sort_keys=True)

        @naming_panics(tokenizer.name_or_path)
        def tokenize(text: str) -> tuple[list[int], Offsets | None]:
            out = tokenizer(text, add_special_tokens=False, return_offsets_mapping=bool(tokenizer.is_fast))
            return list(out["input_ids"]), out["offset_mapping"] if tokenizer.is_fast else None

        named = tokenizer.chat_template or PLAIN_TEMPLATE
        named = named if isinstance(named, dict) else {"default": named}
        return cls(
            tokenize,
            lambda ids: str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)),
            named.get("default", ""),
            {name: text for name, text in tokenizer.special_tokens_map.items() if isinstance(text, str)},
            first_tokens(tokenizer),
            tokenizer.eos_token_id,
            frozenset(tokenizer.get_added_vocab()) | frozenset(tokenizer.all_special_tokens),
            hashlib.sha256(vocabulary.encode()).hexdigest(),
            tool_template=named.get("tool_use", ""),
        )

    @classmethod
    def read(cls, folder: Path) -> TextTokenizer | None:
        """Return the one of a model folder, or None if it has no tokenizer.json, or only transformers knows its special tokens.

        Raises UserError: its files are damaged.
        """
        path = folder / "tokenizer.json"
        with naming_panics(path):
            return cls._read(folder, path) if path.is_file() else None

    @classmethod
    def _read(cls, folder: Path, path: Path) -> TextTokenizer | None:
        from tokenizers import Tokenizer

        try:
            core = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises Exception itself
            raise UserError(f"model: cannot read {path}: {first_line(error)}") from None
        core.no_truncation()
        core.no_padding()
        named, tokens = read_templates(folder)
        named = named or {"default": PLAIN_TEMPLATE}
        config = read_object(folder / "special_tokens_map.json") | read_object(folder / "tokenizer_config.json")
        model = read_object(folder / "config.json")
        name = class_of(config, model.get("model_type"))
        defaults = default_tokens(config, name)
        if defaults is None:
            return None
        tokens |= defaults
        set_pipeline(core, config, name)
        add_tokens(core, config, tokens)

        @naming_panics(path)
        def tokenize(text: str) -> tuple[list[int], Offsets | None]:
            out = core.encode(text, add_special_tokens=False)
            return out.ids, out.offsets

        added = {token.content for token in core.get_added_tokens_decoder().values()}
        return cls(
            tokenize,
            lambda ids: str(core.decode(ids, skip_special_tokens=False)),
            named.get("default", ""),
            tokens,
            _before(core.encode(_PROBE).ids, tokenize(_PROBE)[0]),
            core.token_to_id(tokens["eos_token"]) if "eos_token" in tokens else None,
            frozenset(added) | frozenset(tokens.values()),
            hashlib.sha256(core.to_str().encode()).hexdigest(),
            _rows(model),
            named.get("tool_use", ""),
        )

    def encode(self, text: str, spans: Sequence[tuple[int, int]]) -> tuple[list[int], list[bool]]:
        """Return the ids of a text, and which of them have a character within one of the spans.

        `spans`: characters [start, end), in order. Raises UserError: the tokenizer does not say where its tokens stand,
        and a span begins or ends within a token.
        """
        ids, offsets = self.tokenize(text)
        if offsets is None:
            return ids, self._prefix_flags(text, ids, spans)
        flags = [False] * len(ids)
        at = before = 0
        for index, (start, end) in enumerate(offsets):
            # A token's characters begin where those of the token before it end: some tokenizers leave out the spaces.
            begin, end = (before if end > before else min(start, before)), max(end, before)
            before = end
            while at < len(spans) and spans[at][1] <= begin:
                at += 1
            is_within = at < len(spans) and spans[at][0] < max(end, begin + 1) and begin < spans[at][1]
            # A marker before an answer can take the spaces with which the answer begins.
            flags[index] = is_within and (spans[at][0] <= begin or text[begin:end].strip() not in self.added)
        return ids, flags

    def _prefix_flags(self, text: str, ids: list[int], spans: Sequence[tuple[int, int]]) -> list[bool]:
        flags = [False] * len(ids)
        for span in spans:
            first, last = (len(self._prefix(text, ids, place)) for place in span)
            flags[first:last] = [True] * (last - first)
        return flags

    def _prefix(self, text: str, ids: list[int], place: int) -> list[int]:
        """Return the ids of the characters before a place. Raises UserError if a token spans the place."""
        prefix = self.tokenize(text[:place])[0]
        if ids[: len(prefix)] != prefix:
            raise UserError(
                "the tokenizer of the model does not tell where an answer begins: use a model with tokenizer.json"
            )
        return prefix


def first_tokens(tokenizer: Any) -> tuple[int, ...]:
    """Return the ids that a tokenizer of transformers puts before a text."""
    return _before(token_ids(tokenizer, _PROBE, special=True), token_ids(tokenizer, _PROBE))


def token_ids(tokenizer: Any, text: str, *, special: bool = False) -> list[int]:
    """Return the ids of a text with a tokenizer of transformers. `special`: with those that it puts around a text. Raises UserError."""
    with naming_panics(tokenizer.name_or_path):
        return list(tokenizer(text, add_special_tokens=special)["input_ids"])


def _before(whole: Sequence[int], text: Sequence[int]) -> tuple[int, ...]:
    places = range(len(whole) - len(text) + 1)
    return tuple(whole[: next((place for place in places if whole[place : place + len(text)] == text), 0)])


def _rows(config: Mapping[str, Any]) -> int | None:
    found = (inner if isinstance(inner := config.get("text_config"), dict) else config).get("vocab_size")
    return found if type(found) is int and found > 0 else None
