"""Parsing of two thousand almost valid replies, over real sockets and directly in the parser."""

import asyncio
import contextlib
import json
import random
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from fake_ollama import model
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.generation.ollama_client import OllamaClient, OllamaError
from trainyard.discovery import ollama_replies as replies
from trainyard.discovery.networks import Target
from trainyard.discovery.scan import REPLY_LIMIT, ask

PARSERS = (replies.version, replies.models, replies.loaded)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.sampled_from(list(model("x"))), inner),
)


@pytest.mark.parametrize("version", ["0.12.3", "0.5.4-ipexllm-20250407", "0.0.0", "0.13.0-rc1", "1.2.3+build.5"])
def test_valid_versions(version):
    assert replies.version({"version": version}) == version


@pytest.mark.parametrize("version", ["", "x", "0.1", "0.1.2\n", "{{ 1 }}", "0.1.2 {{x}}", None, 5, ["0.1.2"], "٣.١.٢"])
def test_invalid_versions(version):
    with pytest.raises(OllamaError):
        replies.version({"version": version})


@pytest.mark.parametrize("reply", [{}, {"models": 5}, {"models": float("nan")}, {"models": {"name": "m"}}])
def test_invalid_tags(reply):
    with pytest.raises(OllamaError):
        replies.models(reply)


def test_an_empty_list_is_valid():
    assert replies.models({"models": None}) == replies.models({"models": []}) == ([], 0)


@pytest.mark.slow
@given(st.dictionaries(st.text(), JSON) | st.builds(lambda v: {"version": v, "models": [v]}, JSON))
@settings(max_examples=500, deadline=None)
def test_parsers_raise_an_error_or_return_printable_text(reply):
    for parse in PARSERS:
        try:
            result = parse(reply)
        except OllamaError as error:
            assert str(error).isprintable()
        else:
            assert "\n" not in str(result)


def mutants(seed: int, count: int):
    """Replies of Ollama with random errors: bytes flipped, removed or doubled, numbers enlarged."""
    chance = random.Random(seed)
    bodies = [b'{"version":"0.12.3"}', json.dumps({"models": [model("qwen2.5:0.5b"), model("llama3.2")]}).encode()]
    for _ in range(count):
        body = chance.choice(bodies)
        head = chance.choice(
            [
                b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body),
                b"HTTP/1.0 200 OK\r\n\r\n",
            ]
        )
        reply = bytearray(head + body)
        for _ in range(chance.randrange(1, 6)):
            at = chance.randrange(len(reply) + 1)
            kind = chance.randrange(5)
            if kind == 0 and at < len(reply):
                reply[at] = chance.randrange(256)
            elif kind == 1:
                del reply[at : at + chance.randrange(1, 40)]
            elif kind == 2:
                reply[at:at] = reply[at : at + chance.randrange(1, 200)]
            elif kind == 3:
                reply[at:at] = chance.choice(
                    [b"{{ 1 }}", b"\r\n", b"\x00", b"9" * 30, b"[" * 300, b"\\ud800", b"-", b'"']
                )
            else:
                reply[at:at] = chance.randbytes(chance.randrange(1, 30))
        yield bytes(reply)


@pytest.mark.slow
def test_two_thousand_broken_replies_over_a_socket():
    """Each reply is an answer or OllamaError, without a crash or a hang, and all of them take less than a minute."""
    count, at_once = 2_000, 50
    waiting, served = mutants(4, count), [0]

    async def serve_one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(next(waiting, b""))
        served[0] += 1
        writer.close()

    def client(port: int, outcomes: list[str]) -> None:
        # Count the replies that were sent, not the requests: a request may fail before the server replies.
        while served[0] < count:
            outcomes.append("")
            try:
                reply = OllamaClient(f"http://127.0.8.1:{port}", deadline=1.0).get("/api/tags", limit=REPLY_LIMIT)
                for parse in PARSERS:
                    with contextlib.suppress(OllamaError):
                        parse(reply)
                        outcomes[-1] = "parsed"
            except OllamaError as error:
                assert str(error).isprintable()

    async def main() -> list[str]:
        server = await asyncio.start_server(serve_one, "127.0.8.1", 0, backlog=200)
        outcomes: list[str] = []
        async with server:
            port = server.sockets[0].getsockname()[1]
            with ThreadPoolExecutor(at_once) as threads:
                loop = asyncio.get_running_loop()
                await asyncio.gather(*(loop.run_in_executor(threads, client, port, outcomes) for _ in range(at_once)))
        return outcomes

    start = time.perf_counter()
    outcomes = asyncio.run(main())
    assert len(outcomes) >= count
    assert next(waiting, None) is None
    assert time.perf_counter() - start < 60


@pytest.mark.parametrize("head", [b"HTTP/1.0 200 OK\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n"])
def test_a_body_one_byte_too_large(head: bytes) -> None:
    async def main(size: int) -> object:
        async def serve_one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write((head % size if b"%" in head else head) + b'{"a":"' + b"x" * (size - 8) + b'"}')
            writer.close()

        async with await asyncio.start_server(serve_one, "127.0.8.1", 0) as server:
            client = OllamaClient(f"http://127.0.8.1:{server.sockets[0].getsockname()[1]}", deadline=5.0)
            return await asyncio.to_thread(client.get, "/", limit=REPLY_LIMIT)

    assert asyncio.run(main(REPLY_LIMIT))
    with pytest.raises(OllamaError, match="larger than 2 MiB"):
        asyncio.run(main(REPLY_LIMIT + 1))


def test_the_number_of_models_is_limited() -> None:
    many = [model(f"m{number:04}") for number in range(replies.MAX_MODELS + 2)]
    models, left_out = replies.models({"models": many})
    assert (len(models), left_out) == (replies.MAX_MODELS, 2)


def test_no_server():
    with pytest.raises(OllamaError, match="connection refused"):
        asyncio.run(ask(Target("127.0.8.1", 9), 1.0))
