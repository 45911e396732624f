"""Parsing of replies in the parser and over sockets; tests/unit/test_fuzz.py sends broken ones over sockets."""

import asyncio

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
@settings(max_examples=100, deadline=None)
def test_parsers_raise_an_error_or_return_printable_text(reply):
    for parse in PARSERS:
        try:
            result = parse(reply)
        except OllamaError as error:
            assert str(error).isprintable()
        else:
            assert "\n" not in str(result)


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
