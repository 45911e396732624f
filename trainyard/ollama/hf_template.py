"""Render the chat template of a Hugging Face model as transformers does, without transformers.

A chat template is a program that belongs to the model. It runs in jinja2's sandbox, and receives strings only.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from trainer.errors import UserError, first_line
from trainer.formats import quoted

Message = Mapping[str, str]  # role and content
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_SIZE_LIMIT = 4 << 20  # bytes of one file


class TemplateError(UserError):
    """A chat template cannot be read, rendered or derived."""


class _GenerationTag(jinja2.ext.Extension):
    """Accepts ``{% generation %}``, which marks the text of an assistant for the loss, and renders its contents."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        nodes: list[jinja2.nodes.Node] = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes


class _Namespace(jinja2.utils.Namespace):
    """A namespace without underscore-prefixed attributes, which lead to the internals of Python."""

    def __setitem__(self, name: str, value: Any) -> None:
        if str(name).startswith("_"):
            raise jinja2.exceptions.SecurityError("a namespace cannot have attributes that begin with an underscore")
        super().__setitem__(name, value)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.exceptions.TemplateError(message)


class HfTemplate:
    """The chat template of a model, ready to render."""

    def __init__(self, source: str, tokens: Mapping[str, str], today: datetime.datetime) -> None:
        """Compile the template.

        Args:
            source: the text of the template.
            tokens: the special tokens by the names of `SPECIAL_TOKENS`; a template may use them.
            today: the date that `strftime_now` formats.

        Raises:
            TemplateError: the template is not valid.
        """
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals |= {"raise_exception": _raise_exception, "namespace": _Namespace}
        environment.globals["strftime_now"] = lambda form: today.strftime(form)
        self.source, self.tokens = source, dict(tokens)
        try:
            self._template = environment.from_string(source)
        except (jinja2.exceptions.TemplateError, RecursionError, ValueError) as error:
            raise TemplateError(f"chat template: {first_line(error)}") from None

    def render(self, messages: Sequence[Message], generation_prompt: bool = True) -> str:
        """Return the text of a conversation. Raises TemplateError if the template rejects it."""
        chat = [dict(message) for message in messages]
        values = {"messages": chat, "tools": None, "documents": None, "add_generation_prompt": generation_prompt}
        try:
            return self._template.render(**self.tokens, **values)
        except Exception as error:  # a template can raise anything
            raise TemplateError(f"chat template: it rejects a conversation: {first_line(error)}") from None


def read_template(folder: Path) -> tuple[str, dict[str, str]]:
    """Return the chat template of a model folder, or an empty string, and its special tokens by name.

    Raises:
        TemplateError: a file is too large or not valid.
    """
    config = _read_object(folder / "tokenizer_config.json")
    tokens = _read_object(folder / "special_tokens_map.json") | config
    special = {name: _token(tokens.get(name)) for name in SPECIAL_TOKENS if _token(tokens.get(name))}
    single = folder / "chat_template.jinja"
    source = _read_text(single) if single.exists() else config.get("chat_template")
    if isinstance(source, list):  # several templates by name
        named = {str(item.get("name")): item.get("template") for item in source if isinstance(item, dict)}
        source = named.get("default")
    if source is not None and not isinstance(source, str):
        raise TemplateError(f"{folder}/tokenizer_config.json: chat_template is {quoted(source)}, expected text")
    return source or "", special


def _token(value: Any) -> str:
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) else ""


def _read_text(path: Path) -> str:
    try:
        if path.stat().st_size > _SIZE_LIMIT:
            raise TemplateError(f"{path}: it is larger than {_SIZE_LIMIT} bytes")
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise TemplateError(f"{path}: {first_line(error)}") from None


def _read_object(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        value = json.loads(_read_text(path))
    except (ValueError, RecursionError) as error:
        raise TemplateError(f"{path}: {first_line(error)}") from None
    return value if isinstance(value, dict) else {}
