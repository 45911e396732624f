"""Render a chat template in a process with limits, because it is a program of the model, and need not end.

The sandbox of jinja2 limits what a template can reach, not how long it runs or how much memory it takes. The template is
compiled in the process too: the compiler evaluates constants such as ``'x' * 10**9``.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from trainer.data.hf_template import ChatTemplate, Message, Rendered, TemplateError
from trainer.data.limited_process import (
    LimitedProcess,
    LimitError,
    answer_messages,
    limit_answer,
    limit_process,
)
from trainer.data.plain_template import PLAIN_TEMPLATE

MEMORY = 512 << 20  # bytes
SECONDS = 10  # of CPU time for one conversation
MAX_TEXT = 64 << 20  # characters of a rendered conversation


def limited_template(source: str, tokens: Mapping[str, str], today: datetime.datetime) -> ChatTemplate:
    """Return a chat template with limits; without, if it is that of trainyard. Arguments and errors as of ChatTemplate."""
    return (ChatTemplate if source == PLAIN_TEMPLATE else LimitedTemplate)(source, tokens, today)


class LimitedTemplate(ChatTemplate):
    """A chat template that renders in a process with limits; otherwise as ChatTemplate."""

    def __init__(self, source: str, tokens: Mapping[str, str], today: datetime.datetime) -> None:
        """Compile the template; arguments and errors as of ChatTemplate."""
        self.source, self.tokens, self._today = source, dict(tokens), today
        self._process: LimitedProcess | None = None
        self._refusal = ""
        self._lock = threading.Lock()
        with self._lock:
            self._start()

    def render_blocks(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] | None = None,
        generation_prompt: bool = False,
    ) -> Rendered:
        """Render a conversation; arguments and errors as of ChatTemplate, or the template exceeds a limit."""
        chat, described = [dict(message) for message in messages], [dict(tool) for tool in tools]
        with self._lock:
            if self._process is None or self._process.owner != os.getpid():  # a fork shares no pipe
                self._start()
            text, blocks = self._ask((chat, described, dict(variables or {}), generation_prompt))
        return Rendered(text, tuple((begin, end) for begin, end in blocks))

    def _start(self) -> None:
        self._process = LimitedProcess("trainer.data.template_process", MEMORY, SECONDS)
        self._ask((self.source, self.tokens, self._today.isoformat()))

    def _ask(self, request: object) -> Any:
        """Return the answer of the process. Raises TemplateError; after a limit is exceeded, always."""
        if self._refusal:
            raise TemplateError(self._refusal)
        assert self._process is not None
        try:
            error, answer = self._process.ask(request)
        except LimitError as limit:
            self._process.close()
            self._refusal = f"chat template: {limit} to render a conversation: correct the template of the model"
            raise TemplateError(self._refusal) from None
        if error:
            raise TemplateError(error)
        return answer

    def __del__(self) -> None:
        """End the process."""
        with contextlib.suppress(Exception):  # while Python ends, modules may be gone
            if self._process is not None:
                self._process.close()


def main() -> int:
    """Render the conversations on standard input with the template that is the first message there."""
    seconds = limit_process()
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    template: ChatTemplate | None = None

    def answer(request: Any) -> tuple[str, Any]:
        nonlocal template
        limit_answer(seconds)
        try:
            if template is None:
                source, tokens, today = request
                template = ChatTemplate(source, tokens, datetime.datetime.fromisoformat(today))
                return "", None
            chat, tools, variables, prompt = request
            found = template.render_blocks(chat, tools=tools, variables=variables, generation_prompt=prompt)
            if len(found.text) > MAX_TEXT:
                raise TemplateError(
                    f"chat template: it writes more than {MAX_TEXT >> 20} million characters for a conversation"
                )
            return "", (found.text, found.blocks)
        except TemplateError as error:
            return str(error), None

    return answer_messages(sys.stdin.buffer, answers, answer)


if __name__ == "__main__":
    os._exit(main())
