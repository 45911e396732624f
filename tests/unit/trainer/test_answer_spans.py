"""Answers in rendered chats: all that the assistant says carries loss, in every turn, and nothing else does."""

import datetime
from typing import Any

import pytest
from tables import table

from trainer.data.answer_spans import AnswerFinder, AnswerSpans
from trainer.data.hf_template import ChatTemplate, TemplateError
from trainer.data.shapes import to_sample

SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<turn>", "<end_turn>"]
CHATML = table("answer_spans")["chatml"]
# The last answer has a block of reasoning, earlier ones have none; calls are JSON (as Qwen3).
REASONS = table("answer_spans")["reasons"]
STRICT = table("answer_spans")["strict"]
INST = table("answer_spans")["inst"]
NO_END = table("answer_spans")["no_end"]
DEFAULT_SYSTEM = "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nBe kind.<|im_end|>\n{% endif %}" + CHATML
# Another token ends the last answer (as gpt-oss).
RETURN = table("answer_spans")["return"]
# The system message stands before the last question (as Mistral).
MOVED = table("answer_spans")["moved"]


def calls(how: str) -> str:
    """Return a template that writes the arguments of a call as `how` says."""
    return CHATML.replace(
        "{{ m['content'] }}",
        "{{ m['content'] }}{% for c in m.tool_calls or [] %}[{{ c.function.name }} " + how + "]{% endfor %}",
    )


def answers(template: str, rows: list[tuple[str, Any]] | dict[str, Any], **more: Any) -> AnswerSpans:
    record = rows if isinstance(rows, dict) else {"messages": [_message(role, what) for role, what in rows]}
    sample = to_sample(record | more)
    finder = AnswerFinder(ChatTemplate(template, {}, datetime.datetime(2026, 1, 2)), SPECIAL)
    return finder(sample.messages, sample.tools, sample.variables, sample.silent)


def _message(role: str, what: Any) -> dict[str, Any]:
    return {"role": role, **(what if isinstance(what, dict) else {"content": what})}


def trained(template: str, rows: Any, **more: Any) -> list[str]:
    found = answers(template, rows, **more)
    return [found.text[start:end] for start, end in found.spans] + ["EOS"] * found.open_end


TWO = [("user", "q1"), ("assistant", "a1"), ("user", "q2"), ("assistant", "a2")]
CALL = {"content": None, "tool_calls": [{"function": {"name": "f", "arguments": '{"x": "1"}'}}]}
CALLS = [("user", "q1"), ("assistant", CALL), ("tool", "t1"), ("assistant", "a1")]


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (CHATML, ["a1<|im_end|>", "a2<|im_end|>"]),
        (REASONS, ["a1<|im_end|>", "\n</think>\n\na2<|im_end|>"]),
        (STRICT, ["a1<end_turn>", "a2<end_turn>"]),
        (INST, [" a1 </s>", " a2 </s>"]),
        (NO_END, ["a1<turn>", "a2", "EOS"]),
        (DEFAULT_SYSTEM, ["a1<|im_end|>", "a2<|im_end|>"]),
        (RETURN, ["a1<end_turn>", "a2</s>"]),
        (MOVED, [" a1</s>", " a2</s>"]),
    ],
)
def test_every_answer_with_its_end(template: str, expected: list[str]) -> None:
    assert trained(template, TWO) == expected


def test_a_system_message_that_moves_is_no_answer() -> None:
    assert trained(MOVED, [("system", "be brief"), *TWO]) == [" a1</s>", " a2</s>"]


def test_reasoning_beside_and_inside_of_the_content() -> None:
    beside = [("user", "q1"), ("assistant", {"content": "a1", "reasoning_content": "r1"})]
    inside = [("user", "q1"), ("assistant", "<think>\nr1\n</think>\n\na1")]
    assert trained(REASONS, beside) == trained(REASONS, inside) == ["r1\n</think>\n\na1<|im_end|>"]
    assert trained(CHATML, inside) == ["<think>\nr1\n</think>\n\na1<|im_end|>"]
    with pytest.raises(TemplateError, match=r"leaves out the reasoning \(reasoning_content\) of message 1: remove it"):
        trained(CHATML, beside)


def test_reasoning_of_earlier_answers_is_counted_where_the_template_leaves_it_out() -> None:
    twice = [("user", "q1"), ("assistant", "<think>\nr1\n</think>\n\na1"), *TWO[2:]]
    found = answers(REASONS, twice)
    assert found.left_out == ("reasoning",)
    assert trained(REASONS, twice)[0] == "a1<|im_end|>"


def test_a_template_that_asks_for_null_gets_it() -> None:
    asks = calls("{{ '' + c.function.arguments }}").replace("{% for c in", "{% if m.content is none %}{% for c in")
    asks = asks.replace("]{% endfor %}", "]{% endfor %}{% endif %}").replace(
        "{{ m['content'] }}", "{{ m['content'] or '' }}"
    )
    assert trained(asks, CALLS) == ['[f {"x": "1"}]<|im_end|>', "a1<|im_end|>"]


@pytest.mark.parametrize(
    ("template", "chat", "message"),
    [
        (CHATML, CALLS, r"leaves out the tool call \(tool_calls\) of message 1: use a model that calls tools"),
        (INST.replace("{% else %}", "{% elif m['role'] == 'assistant' %}"), [("system", "s"), *TWO], "leaves out the system message: remove it, or set system=prepend"),
        (INST.replace("{% else %}", "{% elif m['role'] == 'assistant' %}"), [*TWO, ("tool", "t9")], r"leaves out the tool message 't9' \(message 4\)"),
        (CHATML, [("user", {"content": "q1", "name": "ann"}), TWO[1]], r"leaves out the name 'ann' \(message 0\)"),
        (CHATML.replace("{{ m['content'] }}", "{{ m['content'] * 2 }}"), TWO, "writes the content of an answer twice"),
        (CHATML.replace("{{ m['content'] }}", "{{ m['content'] | length }}"), TWO, "changes the texts of messages"),
        (STRICT, TWO[1:], "rejects a conversation: roles must alternate"),
    ],
)  # fmt: skip
def test_what_a_template_leaves_out_or_changes_is_refused(template: str, chat: Any, message: str) -> None:
    with pytest.raises(TemplateError, match=message):
        trained(template, chat)


def test_tools_need_a_template_that_describes_them() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    with pytest.raises(TemplateError, match="has no tools"):
        trained(CHATML, TWO, tools=tools)
    described = "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}" + CHATML
    assert trained(described, TWO, tools=tools) == ["a1<|im_end|>", "a2<|im_end|>"]


def test_generation_blocks_say_what_carries_loss_and_get_the_end_of_the_turn() -> None:
    inside = "{% if m['role'] == 'assistant' %}{% generation %}BODY{% endgeneration %}{% else %}BODY{% endif %}"
    with_end = CHATML.replace("{{ m['content'] }}<|im_end|>", inside.replace("BODY", "{{ m['content'] }}<|im_end|>"))
    without = CHATML.replace("{{ m['content'] }}", inside.replace("BODY", "{{ m['content'] }}"))
    assert trained(with_end, TWO) == trained(without, TWO) == ["a1<|im_end|>", "a2<|im_end|>"]
    only_last = inside.replace("== 'assistant'", "== 'assistant' and loop.last").replace("BODY", "{{ m['content'] }}")
    with pytest.raises(TemplateError, match="its generation blocks leave out the content of an answer"):
        trained(CHATML.replace("{{ m['content'] }}", only_last), TWO)


def test_weights_and_histories_have_no_loss() -> None:
    weights = [TWO[0], ("assistant", {"content": "bad", "weight": 0}), *TWO[2:]]
    assert trained(CHATML, weights) == ["a2<|im_end|>"]
    history = {"prompt": [_message(*each) for each in TWO[:3]], "completion": [_message(*TWO[3])]}
    assert trained(CHATML, history) == ["a2<|im_end|>"]


def test_variables_of_a_record_reach_the_template() -> None:
    thinking = CHATML.replace("{{ m['content'] }}", "{{ mode }}:{{ m['content'] }}")
    assert "hard:q1" in answers(thinking, TWO, chat_template_kwargs={"mode": "hard"}).text


def test_the_order_of_chats_does_not_matter() -> None:
    """The header of an answer can depend on a text: what was found in another chat of the same structure must not decide."""
    modes = (
        "{% set ns = namespace(quiet=false) %}{% for m in messages %}{% if m.role == 'system' and '/no_think' in m.content %}"
        "{% set ns.quiet = true %}{% endif %}{% endfor %}{% set head = '<|im_start|>assistant\n' + ('<think>\n\n</think>\n' if ns.quiet else '') %}"
        "{% for m in messages %}{% if m.role == 'assistant' %}{{ head }}{% else %}<|im_start|>{{ m.role }}\n{% endif %}"
        "{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}{{ head }}{% endif %}"
    )
    chats = [
        [{"role": "system", "content": mode}, {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
        for mode in ("think", "/no_think")
    ]
    for order in (chats, chats[::-1]):
        finder = AnswerFinder(ChatTemplate(modes, {}, datetime.datetime(2026, 1, 2)), SPECIAL)
        for messages in order:
            found = finder(messages)
            assert [found.text[start:end] for start, end in found.spans] == ["a<|im_end|>"]
