"""Parsing of two thousand almost valid replies, over real sockets and directly in the parser."""

import asyncio
import json
import random
import time

import pytest
from fake_ollama import model
from hypothesis import given, settings
from hypothesis import strategies as st

from trainyard.discovery import ollama_replies as replies
from trainyard.discovery.http import MAX_BODY, BadReply, get
from trainyard.discovery.networks import Target
from trainyard.discovery.scan import ask

PARSERS = (replies.parse_version, replies.parse_tags, replies.parse_ps)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.sampled_from(list(model("x"))), inner),
)


@pytest.mark.parametrize("version", ["0.12.3", "0.5.4-ipexllm-20250407", "0.0.0", "0.13.0-rc1", "1.2.3+build.5"])
def test_valid_versions(version):
    assert replies.parse_version(json.dumps({"version": version}).encode()) == version


@pytest.mark.parametrize("version", ["", "x", "0.1", "0.1.2\n", "{{ 1 }}", "0.1.2 {{x}}", None, 5, ["0.1.2"], "٣.١.٢"])
def test_invalid_versions(version):
    with pytest.raises(BadReply):
        replies.parse_version(json.dumps({"version": version}).encode())


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"models": 5}', b"{}", b'{"models": NaN}', b"9" * 9999]
)
def test_invalid_tags(body):
    with pytest.raises(BadReply):
        replies.parse_tags(body)


def test_an_empty_list_is_valid():
    assert replies.parse_tags(b'{"models": null}') == replies.parse_tags(b'{"models": []}') == ([], 0)


@pytest.mark.slow
@given(
    st.binary()
    | JSON.map(lambda v: json.dumps(v).encode())
    | st.builds(lambda v: json.dumps({"version": v, "models": [v]}).encode(), JSON)
)
@settings(max_examples=500, deadline=None)
def test_parsers_raise_bad_reply_or_return_printable_text(body):
    for parse in PARSERS:
        try:
            result = parse(body)
        except BadReply as error:
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
    """Each reply is an answer or BadReply, without a crash or a hang, and all of them take less than a minute."""
    count, at_once = 2_000, 50
    waiting, served = mutants(4, count), [0]

    async def serve_one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(next(waiting, b""))
        served[0] += 1
        writer.close()

    async def client(port: int, outcomes: list[str]) -> None:
        # Count the replies that were sent, not the requests: a request may fail before the server replies.
        while served[0] < count:
            outcomes.append("")
            try:
                body = await get("127.0.8.1", port, "/api/tags", 1.0)
                for parse in PARSERS:
                    try:
                        parse(body)
                    except BadReply:
                        continue
                    outcomes[-1] = "parsed"
            except BadReply as error:
                assert str(error).isprintable()

    async def main() -> list[str]:
        server = await asyncio.start_server(serve_one, "127.0.8.1", 0, backlog=200)
        outcomes: list[str] = []
        async with server:
            port = server.sockets[0].getsockname()[1]
            await asyncio.gather(*(client(port, outcomes) for _ in range(at_once)))
        return outcomes

    start = time.perf_counter()
    outcomes = asyncio.run(main())
    assert len(outcomes) >= count
    assert next(waiting, None) is None
    assert time.perf_counter() - start < 60


@pytest.mark.parametrize("head", [b"HTTP/1.0 200 OK\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n"])
def test_a_body_one_byte_too_large(head: bytes) -> None:
    async def main(size: int) -> int:
        async def serve_one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write((head % size if b"%" in head else head) + b"x" * size)
            writer.close()

        async with await asyncio.start_server(serve_one, "127.0.8.1", 0) as server:
            return len(await get("127.0.8.1", server.sockets[0].getsockname()[1], "/", 5.0))

    assert asyncio.run(main(MAX_BODY)) == MAX_BODY
    with pytest.raises(BadReply, match="larger than 2 MiB"):
        asyncio.run(main(MAX_BODY + 1))


def test_the_number_of_models_is_limited() -> None:
    many = [model(f"m{number:04}") for number in range(replies.MAX_MODELS + 2)]
    models, left_out = replies.parse_tags(json.dumps({"models": many}).encode())
    assert (len(models), left_out) == (replies.MAX_MODELS, 2)


def test_no_server():
    with pytest.raises(BadReply, match="the connection was lost"):
        asyncio.run(ask(Target("127.0.8.1", 9), 1.0))
