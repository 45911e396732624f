"""Render the chat template of a Hugging Face model as transformers does, without transformers.

A chat template is a program that belongs to the model. It runs in jinja2's sandbox, and receives plain JSON values only.
"""

import datetime
import json
import math
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
import jinja2.compiler
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from trainer.common.errors import UserError, first_line
from trainer.common.formats import quoted

Message = Mapping[str, Any]  # role, content, and for some roles reasoning_content, tool_calls, name, tool_call_id
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_SIZE_LIMIT = 4 << 20  # bytes of one file
_TIME_LIMIT = 10.0  # s to render one chat
_MAX_POWER = 1000  # base and exponent
# Around a generation block while a chat is rendered. Unicode gives these codes to no character; records that have them are refused.
BLOCK_MARKS = _BEGIN, _END = "\U0010fffe", "\U0010ffff"
_EDGE = re.compile(f"[{_BEGIN}{_END}]")


class TemplateError(UserError):
    """A chat template cannot be read, rendered or derived."""


class _GenerationTag(jinja2.ext.Extension):
    """Accepts ``{% generation %}``, which marks the text of an assistant for the loss, and puts marks around its contents."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("_marked")
        return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)

    @staticmethod
    def _marked(caller: Any) -> str:
        return f"{_BEGIN}{caller()}{_END}"


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


class _LimitedCode(jinja2.compiler.CodeGenerator):
    """Writes Python that asks whether its time is over, in every block of the template and for every item of a loop with a condition."""

    def blockvisit(self, nodes: Iterable[jinja2.nodes.Node], frame: Any) -> None:
        self.writeline("environment.check_time()")
        super().blockvisit(nodes, frame)

    def visit_For(self, node: jinja2.nodes.For, frame: Any) -> None:
        if node.test:
            asks = jinja2.nodes.Call(jinja2.nodes.EnvironmentAttribute("check_time"), [], [], None, None)
            node.test = jinja2.nodes.And(jinja2.nodes.Not(asks), node.test)
        super().visit_For(node, frame)


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox of transformers for a program that may be hostile. `deadline`: of time.monotonic, for the current chat."""

    code_generator_class = _LimitedCode
    intercepted_binops = frozenset({"**"})
    deadline = math.inf

    def check_time(self) -> None:
        if time.monotonic() > self.deadline:
            raise UserError(f"model: its chat template takes more than {_TIME_LIMIT:g} s for one chat: use another one")

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if max(abs(left), abs(right)) > _MAX_POWER:
            raise OverflowError("the operands of a power are too large")
        return super().call_binop(context, operator, left, right)


@dataclass(frozen=True)
class Rendered:
    """A rendered chat. `blocks`: where its generation blocks begin and end, in order."""

    text: str
    blocks: tuple[tuple[int, int], ...] = ()


class _Dict:
    """The function `dict` of Python without its attributes."""

    def __call__(self, *args: Any, **values: Any) -> dict[Any, Any]:
        return dict(*args, **values)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class ChatTemplate:
    def __init__(self, source: str, tokens: Mapping[str, str], today: datetime.datetime) -> None:
        """Compile the template. Raises TemplateError: the template is not valid.

        `source`: the text of the template. `tokens`: the special tokens by name, such as bos_token; a template may use
        them. `today`: the date that `strftime_now` formats.
        """
        self._environment = environment = _Environment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals |= {"raise_exception": _raise_exception, "namespace": _Namespace, "dict": _Dict()}
        environment.globals["strftime_now"] = lambda form: today.strftime(form)
        self.source, self.tokens = source, dict(tokens)
        try:
            self._template = environment.from_string(source)
        except (jinja2.exceptions.TemplateError, RecursionError, ValueError) as error:
            raise TemplateError(f"chat template: {first_line(error)}") from None

    def render(self, messages: Sequence[Message], generation_prompt: bool = True) -> str:
        """Return the text of a conversation. Raises TemplateError if the template rejects it, UserError if it takes too long."""
        return self.render_blocks(messages, generation_prompt=generation_prompt).text

    def render_blocks(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] | None = None,
        generation_prompt: bool = False,
    ) -> Rendered:
        """Return the text of a conversation and its generation blocks.

        `tools`: the descriptions of the tools of the conversation. `variables`: other variables of the template, such
        as `enable_thinking`. `generation_prompt`: end the text with the header of an answer. Raises TemplateError: the
        template rejects the conversation; the message is what the template says.
        """
        values = {
            **(variables or {}),
            "messages": [_in_parts(message) if self._reads_parts else dict(message) for message in messages],
            "tools": [dict(tool) for tool in tools] or None,
            "documents": None,
            "add_generation_prompt": generation_prompt,
        }
        return _without_marks(self._render(values))

    def _render(self, values: Mapping[str, Any]) -> str:
        self._environment.deadline = time.monotonic() + _TIME_LIMIT
        try:
            return self._template.render(**{**self.tokens, **values})
        except UserError:
            raise
        except Exception as error:  # a template can raise anything
            raise TemplateError(f"chat template: it rejects a conversation: {first_line(error)}") from None

    @cached_property
    def _reads_parts(self) -> bool:
        """Whether the template reads a content only as a list of parts, as those of some models of images do."""
        chat = [{"role": "user", "content": "zquserzq"}, {"role": "assistant", "content": "zqanswerzq"}]

        def is_whole(messages: Sequence[Message]) -> bool:
            try:
                text = self._render({"messages": messages, "add_generation_prompt": False})
            except TemplateError:
                return False
            return all(message["content"] in text for message in chat)

        return not is_whole(chat) and is_whole([_in_parts(message) for message in chat])


def _in_parts(message: Message) -> dict[str, Any]:
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else dict(message)


def _without_marks(text: str) -> Rendered:
    """Return the text without the marks of generation blocks, and where they were. A block within another counts as one."""
    if _BEGIN not in text:
        return Rendered(text)
    pieces, blocks, depth, length, begin = [], [], 0, 0, 0
    at = 0
    for edge in _EDGE.finditer(text):
        pieces.append(text[at : edge.start()])
        length += edge.start() - at
        at = edge.end()
        if edge[0] == _BEGIN:
            begin = length if depth == 0 else begin
            depth += 1
        else:
            depth -= 1
            if depth == 0:
                blocks.append((begin, length))
    return Rendered("".join([*pieces, text[at:]]), tuple(blocks))


def read_template(folder: Path) -> tuple[str, dict[str, str]]:
    """Return the default chat template of a model folder, or an empty string, and its special tokens by name.

    Raises TemplateError: a file is too large or not valid.
    """
    named, special = read_templates(folder)
    return named.get("default", ""), special


def read_templates(folder: Path) -> tuple[dict[str, str], dict[str, str]]:
    """Return the chat templates of a model folder by name, such as default and tool_use, and its special tokens by name.

    Raises TemplateError: a file is too large or not valid.
    """
    config = read_object(folder / "tokenizer_config.json")
    tokens = read_object(folder / "special_tokens_map.json") | config
    special = {name: text for name in SPECIAL_TOKENS if (text := token_text(tokens.get(name)))}
    source = config.get("chat_template")
    named: dict[str, Any] = {"default": source} if source else {}
    if isinstance(source, list):  # several templates by name
        named = {str(item.get("name")): item.get("template") for item in source if isinstance(item, dict)}
    files = sorted((folder / "additional_chat_templates").glob("*.jinja"))
    named |= {path.stem: _read_text(path) for path in files}
    if (single := folder / "chat_template.jinja").exists():
        named["default"] = _read_text(single)
    for text in named.values():
        if not isinstance(text, str):
            raise TemplateError(f"{folder}/tokenizer_config.json: chat_template is {quoted(text)}, expected text")
    return named, special


def token_text(value: Any) -> str:
    """Return the text of a token that a configuration names, or describes by an object; empty for other values."""
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) else ""


def _read_text(path: Path) -> str:
    try:
        if path.stat().st_size > _SIZE_LIMIT:
            raise TemplateError(f"{path}: it is larger than {_SIZE_LIMIT} bytes")
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise TemplateError(f"{path}: {first_line(error)}") from None


def read_object(path: Path) -> dict[str, Any]:
    """Return the object of a JSON file of a model; empty if there is no file or another value. Raises TemplateError."""
    if not path.exists():
        return {}
    try:
        value = json.loads(_read_text(path))
    except (ValueError, RecursionError) as error:
        raise TemplateError(f"{path}: {first_line(error)}") from None
    return value if isinstance(value, dict) else {}
