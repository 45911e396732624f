"""Questions to the Ollama models of the hosts, from the page Models. Nothing is kept of a question or an answer."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable

from trainer.common.formats import counted
from trainer.data.reasoning import split_answer
from trainer.generation.ollama_client import Cancel, OllamaClient, OllamaError
from trainer.generation.ollama_models import GREEDY, read_facts, room_for
from trainer.generation.ollama_names import server_form
from trainyard.dashboard.page_formats import clean, rate
from trainyard.dashboard.state import ClusterView
from trainyard.ollama.servers import host_urls
from trainyard.ollama.teacher_nodes import OllamaNode, Prompt
from trainyard.wire.connection import Host

QUESTION = 4000  # characters
TOKENS = 512  # of an answer
ANSWER = 1 << 20  # bytes of an answer, with the JSON around its tokens
ANSWER_LIMIT = 180.0  # s for an answer, with the time in which the server loads the model
AT_ONCE = 4  # requests to servers at the same time
PER_MINUTE = 30  # requests
LOOK = 1.0  # s between two checks of the session


class RefusedError(Exception):
    """A question is not asked; `status` is the HTTP status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class ModelQuestions:
    """Asks models that the hosts have. Used in the event loop only."""

    def __init__(self, cluster: ClusterView) -> None:
        """Take the hosts with their models."""
        self._cluster = cluster
        self._open = Counter[str]()  # requests to the server of each host
        self._times: deque[float] = deque(maxlen=PER_MINUTE)

    def models(self) -> dict[str, list[str]]:
        """Return the hosts that answer and have a model, by its name; models that trainyard has deployed first, then by name."""
        found: dict[str, list[str]] = {}
        forms: dict[str, str] = {}  # the first spelling of each model
        deployed = set()
        for name, host in self._cluster.hosts.items():
            ollama = host.sample.get("ollama", {}) if host.connected else {}
            for model in ollama.get("installed", []):
                found.setdefault(forms.setdefault(server_form(model), model), []).append(name)
            deployed |= {*map(server_form, ollama.get("deployed", []))}
        return dict(sorted(found.items(), key=lambda item: (server_form(item[0]) not in deployed, item[0])))

    async def ask(self, model: str, question: str, permitted: Callable[[], bool]) -> AsyncIterator[str]:
        """Ask a model on the host that has it loaded and has the fewest questions; return the lines of the reply, each a JSON object.

        They have `host`, then `text`, then `end` or `error`. When the reader goes away, the request to the server ends.
        `permitted`: returns whether the session has not ended. Raises RefusedError: no host has the model, or a limit
        is exceeded.
        """
        hosts = self.models().get(model)
        if not hosts:
            raise RefusedError(404, "no host that answers has this model: reload the page")
        if not question.strip() or len(question) > QUESTION:
            raise RefusedError(400, f"a question has 1 to {QUESTION} characters")
        if sum(self._open.values()) >= AT_ONCE:
            raise RefusedError(429, f"{AT_ONCE} questions are being answered: wait for them")
        now = time.monotonic()
        if len(self._times) == PER_MINUTE and now - self._times[0] < 60:
            raise RefusedError(429, f"{PER_MINUTE} questions were asked in the last minute: wait a moment")
        self._times.append(now)

        def rank(name: str) -> tuple[bool, int]:
            loaded = map(server_form, self._cluster.hosts[name].sample["ollama"]["loaded"])
            return server_form(model) not in loaded, self._open[name]

        host = self._cluster.hosts[min(hosts, key=rank)].host
        lines = self._answer(host, model, question, permitted)
        await anext(lines)  # from here on, the request ends with `lines`
        return lines

    async def _answer(self, host: Host, model: str, question: str, permitted: Callable[[], bool]) -> AsyncIterator[str]:
        lines: asyncio.Queue[dict[str, str] | None] = asyncio.Queue()  # the limit of the reply is its limit
        loop, cancel = asyncio.get_running_loop(), Cancel()

        def tell(**line: str) -> None:
            loop.call_soon_threadsafe(lines.put_nowait, line)

        def work() -> None:
            with contextlib.suppress(RuntimeError):  # the dashboard has ended
                try:
                    tell(end=_chat(host, model, question, cancel, lambda text: tell(text=clean(text))))
                except (OllamaError, ValueError) as error:
                    tell(error=str(error))
                finally:
                    loop.call_soon_threadsafe(self._open.subtract, [host.name])
                    loop.call_soon_threadsafe(lines.put_nowait, None)

        self._open[host.name] += 1
        # The thread ends with the request, and that with `cancel`, at its limit, or with the process.
        threading.Thread(target=work, name="question", daemon=True).start()
        try:
            yield ""
            line: dict[str, str] | None = {"host": host.name}
            while line and permitted():
                yield json.dumps(line) + "\n"
                line = {}
                while line == {} and permitted():
                    with contextlib.suppress(TimeoutError):
                        line = await asyncio.wait_for(lines.get(), LOOK)
        finally:
            cancel.cancel()


def _chat(host: Host, model: str, question: str, cancel: Cancel, hear: Callable[[str], None]) -> str:
    """Let a host's server answer; return what to say of the answer. Raises OllamaError."""
    client = OllamaClient(host_urls(host)[-1])
    facts = read_facts(client, model)
    if facts.remote:
        raise OllamaError(f"{facts.remote} computes the answers of this model: a question would leave this network")
    chat = [{"role": "user", "content": question}]
    prompt = Prompt(chat, GREEDY | {"num_predict": TOKENS}, room=room_for([chat], TOKENS), think=False)
    times: list[float] = []  # of the parts of the answer

    def take(text: str) -> None:
        times.append(time.monotonic())
        hear(text)

    node = OllamaNode(host.name, client, model, facts, ANSWER_LIMIT)
    answer = node.ask(prompt, cancel, keep=ANSWER, hear=take)
    speed = rate(max(0, answer.tokens - 1) / max(times[-1] - times[0], 1e-3))  # without the time to load the model
    cut = f", ended at the limit of {TOKENS} tokens" if answer.finished == "length" else ""
    cut += ", within its thinking" if split_answer(answer.text, answer.thinking, bool(cut))[2] else ""
    cut += ", of a model that read a part of the question: its context is too small" if answer.truncated else ""
    return f"{counted(answer.tokens, 'token')}, {speed}{cut}"
