"""Keys of records and messages that change what is learned are used, or refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from trainer.data.shapes import to_sample

USER, ASSISTANT = {"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}
CHAT = {"messages": [USER, ASSISTANT]}
PAIR = {"prompt": "Q", "completion": "A"}
SHARE = {"conversations": [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "A"}]}


@pytest.mark.parametrize(
    ("record", "key"),
    [
        ({**PAIR, "label": False}, "label"),
        ({**PAIR, "label": 0}, "label"),
        ({**PAIR, "label": "False"}, "label"),
        ({"text": "T", "label": False}, "label"),
        ({**CHAT, "kto_tag": False}, "kto_tag"),
        ({**SHARE, "chosen": {"from": "gpt", "value": "A"}, "rejected": {"from": "gpt", "value": "B"}}, "chosen"),
        ({"prompt": "Q", "chosen": "A", "rejected": "B"}, "chosen"),
        ({**PAIR, "rejected_response": "B"}, "rejected_response"),
        ({**PAIR, "weight": 0.5}, "weight"),
        ({**CHAT, "weight": 0}, "weight"),
        ({**PAIR, "score": 3}, "score"),
        ({**CHAT, "images": ["a.png"]}, "images"),
        ({"text": "T", "image": {"bytes": b"x"}}, "image"),
        ({**CHAT, "train": False}, "train"),
        ({"instruction": "Q", "output": "A", "thinking": "T"}, "thinking"),
        ({**PAIR, "system": "S"}, "system"),
        ({"text": "T", "tools": [{"name": "f"}]}, "tools"),
        ({"text": "T", "input_ids": [1, 2]}, "input_ids"),
        ({"messages": [USER, {**ASSISTANT, "train_detail": [{"begin_offset": 0}]}]}, "train_detail"),
        ({"messages": [USER, {**ASSISTANT, "refusal": "no"}]}, "refusal"),
        ({"messages": [USER, {**ASSISTANT, "prefix": True}]}, "prefix"),
        ({"messages": [USER, {**ASSISTANT, "reasoning_details": [{"text": "R"}]}]}, "reasoning_details"),
        ({"messages": [USER, {**ASSISTANT, "masked": True}]}, "masked"),
        ({"messages": [USER, {**ASSISTANT, "loss_weight": 0}]}, "loss_weight"),
        ({**PAIR, "system_prompt": "S"}, "system_prompt"),
        ({"messages": [USER, {**ASSISTANT, "label": False}]}, "label"),
        ({"messages": [{**USER, "images": ["a.png"]}, ASSISTANT]}, "images"),
    ],
)
def test_a_key_with_a_meaning_is_refused_by_name_or_ignored_on_purpose(record: dict[str, Any], key: str) -> None:
    with pytest.raises(ValueError, match=rf"\b{key}\b.*keep_going={key}"):
        to_sample(record)
    if "chosen" not in record:
        assert to_sample(record, ignored=[key])


@pytest.mark.parametrize(
    "more",
    [{"label": True}, {"weight": 1}, {"weight": 1.0}, {"images": []}, {"rejected": None}, {"kto_tag": True}, {"id": 7}],
)
def test_a_key_that_changes_nothing_is_accepted(more: dict[str, Any]) -> None:
    assert to_sample({**PAIR, **more}) == to_sample(PAIR)


def test_the_label_of_a_text_is_a_class() -> None:
    assert to_sample({"text": "T", "label": 0}) == to_sample({"text": "T"})


@pytest.mark.parametrize(("key", "value"), [("weight", 0), ("weight", 0.0), ("train", False), ("loss", False)])
def test_an_answer_without_loss(key: str, value: Any) -> None:
    muted = {**ASSISTANT, "content": "B", key: value}
    assert to_sample({"messages": [USER, muted, USER, ASSISTANT]}).silent == {1}
    assert to_sample({"messages": [USER, muted]}, ignored=[key]).silent == frozenset()


@pytest.mark.parametrize("value", [0.5, 2, "0", -1])
def test_a_weight_that_is_no_yes_or_no_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match=r"message 1 of 'messages' has weight .*: expected 0, 1"):
        to_sample({"messages": [USER, {**ASSISTANT, "weight": value}]})


def test_the_prompt_of_messages_carries_no_loss() -> None:
    sample = to_sample({"prompt": [USER, ASSISTANT, USER], "completion": [{**ASSISTANT, "content": "B"}]})
    assert sample.silent == {1}
    mixed = to_sample({"prompt": [USER], "completion": "A"})
    assert mixed.messages == (USER, ASSISTANT)
    assert mixed == to_sample({"prompt": '[{"role": "user", "content": "Q"}]', "completion": "A"})


def test_legacy_functions() -> None:
    call = {"name": "f", "arguments": '{"x": 1}'}
    for content in ({"content": None}, {"content": ""}, {}):
        sample = to_sample(
            {"messages": [USER, {"role": "assistant", **content, "function_call": call}], "functions": [{"name": "f"}]}
        )
        assert sample.messages[1]["tool_calls"] == [{"type": "function", "function": call}]
        assert sample.tools == ({"type": "function", "function": {"name": "f"}},)
    for nothing in (None, "", {}):
        called = to_sample({"messages": [{"role": "assistant", "function_call": {"name": "f", "arguments": nothing}}]})
        assert called.messages[0]["tool_calls"][0]["function"]["arguments"] == {}
    listed = '[{"value": 5}]'
    assert to_sample({"prompt": "Q", "completion": listed}).pieces[1] == (listed, True), "JSON that is no message"


@pytest.mark.parametrize("value", ["f(1)", "{}", '{"arguments": {}}', "[]"])
def test_a_function_call_of_sharegpt_that_names_no_function_is_refused(value: str) -> None:
    with pytest.raises(ValueError, match="message 0 of 'conversations' is a function_call"):
        to_sample({"conversations": [{"from": "function_call", "value": value}]})


def test_history_becomes_earlier_turns() -> None:
    sample = to_sample({"instruction": "Q", "output": "A", "history": [["q", "a"]], "system": "S"})
    assert [message["content"] for message in sample.messages] == ["S", "q", "a", "Q", "A"]
    assert not sample.silent
    for broken in ("x", [["q"]], [["q", 1]], {"a": 1}):
        with pytest.raises(ValueError, match="'history' must be a list of pairs"):
            to_sample({"instruction": "Q", "output": "A", "history": broken})


def test_reasoning_under_any_of_its_names() -> None:
    for name in ("reasoning_content", "thinking", "reasoning"):
        sample = to_sample({"messages": [USER, {**ASSISTANT, name: "R"}]})
        assert sample.messages[1]["reasoning_content"] == sample.messages[1]["thinking"] == "R"
    with pytest.raises(ValueError, match="reasoning_content and thinking that differ"):
        to_sample({"messages": [USER, {**ASSISTANT, "thinking": "R", "reasoning_content": "S"}]})
    with pytest.raises(ValueError, match="only an assistant has them"):
        to_sample({"messages": [{**USER, "reasoning_content": "R"}, ASSISTANT]})


def test_a_system_prompt_under_other_names() -> None:
    for name in ("system", "system_prompt", "system_message"):
        for record in (CHAT, SHARE, {"instruction": "Q", "output": "A"}):
            assert to_sample({**record, name: "S"}).messages == ({"role": "system", "content": "S"}, USER, ASSISTANT)
    assert to_sample({**CHAT, "system": "S", "system_prompt": "S"}).messages[0]["content"] == "S"
    with pytest.raises(ValueError, match="another system message"):
        to_sample({**CHAT, "system": "S", "system_prompt": "T"})


def test_turns_that_would_be_ignored_are_refused() -> None:
    with pytest.raises(ValueError, match="'history', which only instruction and output can have"):
        to_sample({**CHAT, "history": [["q", "a"]]})
    with pytest.raises(ValueError, match="is to be trained, and its role is user"):
        to_sample({"messages": [{**USER, "train": True}, ASSISTANT]})
