"""Filters of answers: what each of them must leave out and must keep."""

import random
import time
from typing import Any

import pytest
from tables import table

from trainyard.ollama.filters import filter_answers, repeats_itself
from trainyard.ollama.near_duplicates import NearDuplicates


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
        {"role": role, "content": text} for role, text in (("user", "Why?"), ("assistant", long))
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


@pytest.mark.parametrize(("begin", "end"), table("filters")["every_spelling_of_thinking"])
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


def test_an_evaluation_prompt_within_a_longer_prompt() -> None:
    question = prose(4, 14)
    result = filter_answers([record("a", f"So: {question} Thanks"), record("b", prose(5, 30))], evaluation=[question])
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
