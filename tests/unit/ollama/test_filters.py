"""Filters of answers: what each of them must leave out and must keep."""

from __future__ import annotations

import base64
import random
import time
import zlib
from typing import Any

import pytest

from trainyard.ollama.filters import filter_answers, repeats_itself
from trainyard.ollama.near_duplicates import NearDuplicates
from trainyard.ollama.teacher_logprobs import LogprobReader


def record(text: str, prompt: str = "Why?", **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": prompt}], "text": text, "finished": "stop", **more}


def prose(seed: int, words: int = 60) -> str:
    draw = random.Random(seed)
    return " ".join(f"word{draw.randrange(5000)}" for _ in range(words))


def test_every_reason_is_counted() -> None:
    long = prose(1)
    records = [
        record(long),
        record(prose(2), finished="length"),
        record("  \n"),
        record("and so on " * 100),
        record(prose(3), prompt="What IS  the capital of France?"),
        record("  " + long.upper()),
        record(long + " end"),
    ]
    result = filter_answers(records, evaluation=["what is the capital of france?"])
    assert len(result.samples) == 1
    assert result.samples[0]["messages"] == [
        {"role": "user", "content": "Why?"},
        {"role": "assistant", "content": long},
    ]
    reasons = ("cut", "empty", "repeated", "evaluation", "duplicate", "near_duplicate")
    assert dict(result.counts) == dict.fromkeys(reasons, 1)
    assert "1 answers to train on; left out: 1 cut off at max_tokens, 1 empty" in result.lines()[0]
    assert result.lines()[1].startswith("WARNING: 6 of 7 answers are not trained (1 cut off at max_tokens, 1 empty")


def test_thinking() -> None:
    inline = record("<think>\nsteps\n</think>\n\nAnswer.")
    apart = record("Answer.", thinking="steps")
    for each in (inline, apart):
        dropped, kept = filter_answers([each]), filter_answers([each], keep_thinking=True)
        assert dropped.samples[0]["messages"][-1]["content"] == "Answer."
        assert kept.samples[0]["messages"][-1]["content"] == "<think>\nsteps\n</think>\n\nAnswer."
    assert filter_answers([record("<think>\nnever ends")]).counts == {"cut": 1}


@pytest.mark.parametrize(
    ("begin", "end"),
    [
        ("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<seed:think>", "</seed:think>"), ("◁think▷", "◁/think▷"),
    ],
)  # fmt: skip
def test_every_spelling_of_thinking(begin: str, end: str) -> None:
    for opening in (begin, ""):  # a template may write the opening at the end of the prompt
        answer = record(f"{opening}let me see {end}\n\n4")
        dropped, kept = filter_answers([answer]), filter_answers([answer], keep_thinking=True)
        assert dropped.samples[0]["messages"][-1]["content"] == "4"
        assert kept.samples[0]["messages"][-1]["content"] == "<think>\nlet me see\n</think>\n\n4"
    assert filter_answers([record(f"{begin}never ends")]).counts == {"cut": 1}
    assert filter_answers([record(f"only this {end}")]).counts == {"empty": 1}
    for text in (f"Write `{end}`.", f"Between {begin} and {end} it thinks."):
        assert filter_answers([record(text)]).samples[0]["messages"][-1]["content"] == text


def reply(*tokens: bytes) -> list[dict[str, Any]]:
    """Return the log-probabilities of a reply with one alternative for each token."""
    return [
        {"token": token.decode(errors="replace"), "bytes": [*token], "logprob": -0.5}
        | {
            "top_logprobs": [
                {"token": "?", "bytes": [*other], "logprob": value} for other, value in ((token, -0.5), (b"?", -2))
            ]
        }
        for token in tokens
    ]


def packed(entries: Any) -> str:
    reader = LogprobReader()
    reader.add({"logprobs": entries})
    return reader.packed()


@pytest.mark.parametrize(
    ("tokens", "text", "found"),
    [
        ((b"Yes", b" it", b" is"), "Yes it is", [b"Yes", b" it", b" is"]),
        ((b"<think>", b"it", b"</think>", b"\n\n", b"it", b"\n"), "<think>it</think>\n\nit\n", [b"it"]),
        ((b"\xf0\x9f", b"\x98\x80"), "\U0001f600", [b"\xf0\x9f", b"\x98\x80"]),
        ((b" Yes",), " Yes", None),  # the space is part of the token, but not of the sample
        ((b"\xef\xbf\xbd", b"!"), "\u00e9!", None),  # the server replaced the bytes of the token
    ],
)
def test_log_probabilities_of_the_trained_text(tokens: tuple[bytes, ...], text: str, found: list[bytes] | None) -> None:
    result = filter_answers([record(text, logprobs=packed(reply(*tokens)))], logprobs=True)
    assert result.without_logprobs == (0 if found else 1)
    tops = result.samples[0].get("teacher_logprobs")
    expected = [{"token": each.hex(), "top": {each.hex(): -0.5, "3f": -2.0}} for each in found or []]
    assert (tops or []) == expected


@pytest.mark.parametrize(
    "change",
    [
        {"top_logprobs": []},
        {"top_logprobs": None},
        {"top_logprobs": [{"token": "a", "logprob": -1}] * 21},
        {"top_logprobs": [{"token": "a", "logprob": float("nan")}]},
        {"top_logprobs": [{"token": "a", "logprob": 5}]},
        {"top_logprobs": [{"token": "a", "logprob": "x"}]},
        {"top_logprobs": [{"token": "a", "logprob": True}]},
        {"top_logprobs": [7]},
        {"bytes": [256]},
        {"bytes": [1] * 2000},
        {"bytes": 10**9},
        {"bytes": None, "token": "\ud83d"},
        {"bytes": None, "token": 7},
    ],
)
def test_malformed_log_probabilities(change: dict[str, Any]) -> None:
    assert packed([reply(b"a")[0] | change]) == ""


def test_damaged_log_probabilities_of_the_file() -> None:
    whole = packed(reply(*(f" word{n % 50}".encode() for n in range(300))))
    for damaged in (whole[:-20], "AAAA", "\u00e9", 7, None, base64.b64encode(zlib.compress(b"[[1]]")).decode()):
        result = filter_answers([record("word1", logprobs=damaged)], logprobs=True)
        assert (len(result.samples), result.without_logprobs) == (1, 1)


def test_an_evaluation_prompt_within_a_longer_prompt() -> None:
    question = prose(4, 14)
    result = filter_answers(
        [record("a", f"Please: {question} Thanks"), record("b", prose(5, 30))], evaluation=[question]
    )
    assert result.counts == {"evaluation": 1}


def test_honest_text_does_not_repeat_itself() -> None:
    table = "\n".join(f"| {n} | {n * n} | {n**3} |" for n in range(60))
    code = "\n".join(f"    self.value_{n} = values[{n}]" for n in range(30))
    for text in (table, code, prose(6, 400), "ha ha ha", "- one\n- two\n- three\n", "=" * 40 + "\nTitle"):
        assert not repeats_itself(text)
    for text in ("no " * 40, prose(7, 30) * 8, prose(8) + "\n\n" + "The end. " * 12, "abc" * 200):
        assert repeats_itself(text)


def test_hostile_text_costs_little() -> None:
    start = time.perf_counter()
    for text in ("a" * 400_000, "ab" * 300_000 + "c", "<think>" * 100_000, " " * 500_000):
        filter_answers([record(text)])
    assert time.perf_counter() - start < 10


def test_near_duplicates_by_similarity() -> None:
    near = NearDuplicates(0.8)
    words = prose(9, 200).split()
    assert not near.add(" ".join(words))
    assert near.add(" ".join([*words[:100], "changed", *words[101:]]))  # 194 of 202 runs of 3 words are equal
    half = [word if n % 6 else f"other{n}" for n, word in enumerate(words)]
    assert not near.add(" ".join(half))
    assert not any(near.add(prose(100 + n)) for n in range(200))
