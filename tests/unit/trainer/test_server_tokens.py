"""The tokens of a server's completion are those that the run's own writer would have drawn for the same text."""

from typing import Any

import pytest
from tokenizer_kinds import byte_level, normalizing, sentence_piece

from trainer.data.text_tokenizer import TextTokenizer
from trainer.generation.ollama_client import Answer
from trainer.generation.rollout_servers import RolloutRequest
from trainer.method.server_tokens import ServerTokens


def tokens_of(tokenizer: Any, ends: set[int], prompt: str, text: str, finished: str = "stop", **more: Any) -> Any:
    """Return the tokens of an answer to the prompt `prompt`."""
    ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    request = RolloutRequest(0, 0, ids, prompt, 1, ids=more.pop("ids", None))
    answer = Answer(text, more.pop("thinking", ""), finished, more.pop("drawn", 1), 0.0, 0.0)
    return ServerTokens(TextTokenizer.of(tokenizer), len(tokenizer), ends, more.pop("limit", 40)).of(request, answer)


@pytest.mark.parametrize("kind", [byte_level(), byte_level(True), sentence_piece(), sentence_piece(False)])
@pytest.mark.parametrize(
    "prompt", ["<s>the answer", "<|im_start|>user\nword<|im_end|>\n<|im_start|>model\n", "value is "]
)
@pytest.mark.parametrize("text", ["a1word", " the answer is", "\nword", "", "word  is\n\n", "é∀"])
def test_texts_of_every_kind_of_tokenizer_have_tokens(kind: Any, prompt: str, text: str) -> None:
    """Some tokenizers begin a text with a space: its first token differs within a longer text."""
    ids = kind(prompt, add_special_tokens=False)["input_ids"]
    found = tokens_of(kind, {kind.eos_token_id}, prompt, text)
    assert kind.decode([*ids, *found[:-1]]) == kind.decode(ids) + text and found[-1] == kind.eos_token_id


def test_a_text_that_the_tokenizer_changes_has_none() -> None:
    assert tokens_of(normalizing(), set(), "the", " ANSWER") is None


@pytest.mark.parametrize(("finished", "text", "more"), [("length", "\ufffd", {}), ("stop", "a\ufffdb", {}), ("stop", "a", {"thinking": "b"})])  # fmt: skip
def test_a_text_with_a_part_missing_has_none(finished: str, text: str, more: dict[str, Any]) -> None:
    assert tokens_of(byte_level(), set(), "the", text, finished, **more) is None


@pytest.mark.parametrize("finished", ["stop", "length"])
def test_a_text_with_far_fewer_tokens_than_the_server_drew_has_none(finished: str) -> None:
    """Ollama leaves out bytes that are no text, with what follows, and does not say so."""
    tokenizer = byte_level()
    count = len(tokenizer("the answer is")["input_ids"]) + (finished == "stop")
    for drawn, known in ((count, True), (count + 2, True), (count + 10, False)):
        found = tokens_of(tokenizer, {tokenizer.eos_token_id}, "the", "the answer is", finished, drawn=drawn)
        assert found is None or len(found) == count
        assert (found is not None) == known


def test_a_completion_has_the_end_of_its_prompts_turns() -> None:
    """A server says only that an answer ended. A model such as Gemma has an end of text and one of turns."""
    tokenizer = byte_level()
    tokenizer.eos_token = "</s>"
    turn, eos = tokenizer.convert_tokens_to_ids(["<|im_end|>", "</s>"])
    chat = "<|im_start|>user\nword<|im_end|>\n<|im_start|>model\n"
    for prompt, ends, end in (
        (chat, {turn, eos}, [turn]), ("the", {turn, eos}, [eos]), (chat, {eos}, [eos]), ("the", {turn}, [turn]), ("the", set(), []),
    ):  # fmt: skip
        found = tokens_of(tokenizer, ends, prompt, " answer")
        assert found[len(found) - len(end) :] == end and (turn in found) == (end == [turn])


@pytest.mark.parametrize("told", [True, False])
def test_a_completion_ends_at_the_first_end(told: bool) -> None:
    """As the run's own writer ends it, also where the server goes on: its model may know fewer ends."""
    tokenizer = byte_level()
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    text = "answer<|im_end|>user word"
    ids = tokenizer(text)["input_ids"]
    found = tokens_of(tokenizer, {end}, "the", text, "length", ids=ids if told else None)
    assert found == ids[: ids.index(end) + 1]


@pytest.mark.parametrize("ids", [[], ["1"], [True], [1.0], [-1], [10**9], [None]])
def test_hostile_tokens_are_none(ids: Any) -> None:
    assert tokens_of(byte_level(), set(), "the", "a", ids=ids) is None


def test_a_completion_is_not_longer_than_the_limit() -> None:
    assert tokens_of(byte_level(), {0}, "the", "zzzz", ids=[5] * 10**6, limit=3) == [5, 5, 5]
    assert tokens_of(byte_level(), {0}, "the", "zzzz", limit=3) == tokens_of(byte_level(), {0}, "the", "zzz", "length")
