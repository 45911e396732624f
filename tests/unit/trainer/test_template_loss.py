"""Which text of a chat carries loss: chat templates of the field, and reductions of what they do, in many situations."""

import datetime
import functools
import itertools
import re
import unicodedata
from typing import Any

import pytest
from chat_templates import REDUCTIONS, RandomChats, Template, situations, trl_templates
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tables import table
from template_loss import Bed, spelled, tokenizer_of
from tokenizer_kinds import KINDS, byte_level

from trainer.common.errors import UserError
from trainer.data.encode import Encoder
from trainer.data.hf_template import ChatTemplate
from trainer.data.shapes import to_sample
from trainer.data.template_text import end_of_turn, without_generation

TRL = trl_templates()
# One of each family: the others take a second for every five.
FAST = set(table("template_loss")["fast"])
# Chats that a template can render whole and that are refused all the same, as it changes or repeats texts: where the answers
# stand cannot be proved.
REFUSED = table("template_loss")["refused"]


def check(template: Template) -> None:
    bed = Bed(template)
    wrong = []
    for name, row in situations(template.family).items():
        verdict = bed.verdict(row)
        known = REFUSED.get(template.name, ())
        if verdict.kind == "WRONG" or (verdict.kind == "REFUSED" and known is not None and name not in known):
            wrong.append(f"{name}: {verdict}")
    assert not wrong, "\n".join(wrong)


def in_tests(templates: list[Template], fast: set[str], others: Any = pytest.mark.slow) -> list[Any]:
    """Return the templates as parameters of a test that has the mark `others` for all others than `fast`."""
    return [pytest.param(one, id=one.name, marks=() if one.name in fast else others) for one in templates]


@pytest.mark.skipif(not TRL, reason="needs the chat templates of the package trl")
@pytest.mark.parametrize("template", in_tests(TRL, FAST))
def test_loss_is_on_what_the_assistant_says(template: Template) -> None:
    check(template)


@pytest.mark.parametrize(
    "template", in_tests(TRL + REDUCTIONS, {"plain", "gemma4_v5", "qwen3", "gptoss"}, pytest.mark.long)
)
def test_random_chats(template: Template) -> None:
    under, chats, whole = Bed(template), RandomChats(1), 0
    for _ in range(30):
        row = chats()
        verdict = under.verdict(row)
        assert verdict.kind != "WRONG", f"{verdict}: {row}"
        whole += verdict.kind == "ok"
    assert whole == 30 or template.name != "qwen3"


@pytest.mark.parametrize("template", REDUCTIONS, ids=[template.name for template in REDUCTIONS])
def test_loss_is_on_what_the_assistant_says_in_reductions(template: Template) -> None:
    check(template)


@pytest.mark.skipif(not TRL, reason="needs the chat templates of the package trl")
def test_templates_without_generation_render_the_same() -> None:
    tagged = [template for template in TRL if "endgeneration" in template.text]
    assert len(tagged) > 20
    for template in tagged[::4]:
        saved = without_generation(template.text)
        assert not re.search(r"\{%[-+]?\s*(end)?generation", saved)
        texts = [
            [ChatTemplate(source, {}, datetime.datetime(2026, 1, 2)).render(situations()[name]["messages"], False)]
            for name in ("multi", "think_twice_in")
            for source in (template.text, saved)
        ]
        assert texts[0] == texts[1] != texts[2] == texts[3]


@pytest.mark.skipif(not TRL, reason="needs the chat templates of the package trl")
def test_end_of_turn_of_templates() -> None:
    for template in TRL[::5]:
        tokenizer = tokenizer_of(template)
        added = [*tokenizer.all_special_tokens, *tokenizer.get_added_vocab()]
        end = end_of_turn(template.text, tokenizer.special_tokens_map, added)
        assert re.fullmatch(template.family.end, end) if end else template.family.no_end, template.name


def test_the_last_of_several_ends_ends_a_turn() -> None:
    source = "{% for m in messages %}<a>{{ m.content }}</b><|c|>\n{% endfor %}<eos>"
    assert end_of_turn(source, {}, ["<a>", "</b>", "<|c|>", "|>", "<eos>"]) == "<|c|>"
    assert end_of_turn(source, {}, ["<a>", "<eos>"]) == ""
    assert end_of_turn("{# {% generation %} #}" + source, {}, ["</b>"]) == "</b>"


@functools.cache
def bed(name: str) -> Bed:
    return Bed(next(template for template in REDUCTIONS if template.name == name))


Piece = tuple[str, bool | None]  # text, and whether it carries loss; None for either


def turn(header: str, said: str, end: str, after: str, trained: bool) -> list[Piece]:
    """Return the pieces of one message. White space of header and content can be one token."""
    body = said.lstrip()
    blank = said[: len(said) - len(body)]
    text, space = header.rstrip(), header[len(header.rstrip()) :]
    return [(text, False), (space + blank, None if trained else False), (body + end, trained), (after, None)]


def plain(messages: list[dict[str, str]]) -> list[Piece]:
    return [
        piece
        for m in messages
        for piece in turn(f"<|im_start|>{m['role']}\n", m["content"], "<|im_end|>", "\n", m["role"] == "assistant")
    ]


def trims(messages: list[dict[str, str]]) -> list[Piece]:
    return plain([{**m, "content": m["content"].strip()} for m in messages])


def merges_system(messages: list[dict[str, str]]) -> list[Piece]:
    system = messages[0]["content"] if messages[0]["role"] == "system" else ""
    pieces: list[Piece] = [("<s>", False)]
    for place, m in enumerate(messages[1:] if system else messages):
        role = "model" if m["role"] == "assistant" else m["role"]
        content = (system + "\n\n" if system and not place else "") + m["content"].strip()
        pieces += turn(f"<turn>{role}\n", content, "<end_turn>", "\n", m["role"] == "assistant")
    return pieces


def reasons_last(messages: list[dict[str, str]]) -> list[Piece]:
    pieces = []
    for place, m in enumerate(messages):
        reason, said = "", m["content"]
        if "</think>" in said:
            reason = said.split("</think>")[0].split("<think>")[-1].strip()
            said = said.split("</think>")[-1].lstrip("\n")
        trained = m["role"] == "assistant"
        header = f"<|im_start|>{m['role']}\n"
        if trained and place == len(messages) - 1:
            empty = None if not reason else True
            pieces += [(header, None if not reason else False), ("<think>", None), ("\n", None), (reason, empty)]
            pieces += [("\n", None), ("</think>", None), ("\n\n" + said[: len(said) - len(said.lstrip())], None)]
            pieces += [(said.lstrip() + "<|im_end|>", True), ("\n", None)]
        else:
            pieces += turn(header, said, "<|im_end|>", "\n", trained)
    return pieces


_SPECIAL = ["<|im_end|>", "<|im_start|>assistant\n", "<|im_start|>", "</think>", "<think>", "<think>\nwhy\n</think>\n\n", "<end_turn>"]  # fmt: skip
_TEXT = st.lists(
    st.sampled_from(
        ["ok", "a", "the answer", " ", "\n", "\t", "é", "猫", "👩‍👩‍👧", "\u0301", "\ue000", "\u2060", "\u200b", "\ufffd", "⟦", "⟧", "{{ x }}", "{% y %}", "0", "\\n", '"', "assistant", "user", "assistant\n", *_SPECIAL]
    )
    | st.text(max_size=4),
    max_size=5,
).map("".join)  # fmt: skip


@st.composite
def chats(draw: st.DrawFn) -> list[dict[str, str]]:
    turns = draw(st.integers(1, 3))
    some = [draw(_TEXT) for _ in range(2)]  # contents that are the same text as another
    content = st.sampled_from(some) | _TEXT
    chat = [{"role": role, "content": draw(content)} for _ in range(turns) for role in ("user", "assistant")]
    return ([{"role": "system", "content": draw(content)}] if draw(st.booleans()) else []) + chat


@pytest.mark.parametrize("render", [plain, trims, merges_system, reasons_last])
@settings(max_examples=100, deadline=None)
@given(chat=chats())
def test_any_text_in_a_chat(render: Any, chat: list[dict[str, str]]) -> None:
    under = bed(render.__name__)
    # An answer that has its end gets no second one: see test_encode.py.
    assume(not any(m["role"] == "assistant" and m["content"].rstrip().endswith(tuple(_SPECIAL)) for m in chat))
    try:
        encoded = under.encoder.encode(to_sample({"messages": chat}))
    except (UserError, ValueError) as error:
        assert "\n" not in str(error)
        odd = any(mark in m["content"] for m in chat for mark in _SPECIAL)
        odd |= any(unicodedata.category(letter) in ("Co", "Cn") for m in chat for letter in m["content"])
        assert odd or any(not m["content"].strip() for m in chat), error
        return
    text, trained = spelled(under.tokenizer, encoded.ids, encoded.answered)
    pieces = render(chat)
    assert text == "".join(piece for piece, _ in pieces)
    start = 0
    for piece, flag in pieces:
        found = {*trained[start : start + len(piece)]}
        start += len(piece)
        assert flag is None or found <= {flag}, (piece, flag, text)


_WITH_TOOL_CALLS = next(template.text for template in REDUCTIONS if template.name == "plain")


@functools.cache
def kind(name: str) -> Any:
    return KINDS[name]()


@pytest.mark.parametrize("name", [*KINDS])
@pytest.mark.parametrize("situation", ["single", "multi", "tools", "spaces", "same_text", "long_lines", "bytes"])
def test_any_kind_of_tokenizer(name: str, situation: str) -> None:
    tokenizer = kind(name)
    tokenizer.chat_template = _WITH_TOOL_CALLS
    row = situations()[situation]
    try:
        encoded = Encoder(tokenizer, seq_length=4096, train_on="answer").encode(to_sample(row))
    except UserError as error:
        assert name == "python", error  # no offsets: it cannot be proved
        return
    ids, mask = encoded.ids, encoded.answered
    answers = [m for m in row["messages"] if m["role"] == "assistant"]
    runs = [[*group] for flag, group in itertools.groupby(zip(ids, mask, strict=True), lambda pair: pair[1]) if flag]
    assert len(runs) == len(answers)
    for run, answer in zip(runs, answers, strict=True):
        said = tokenizer.decode([token for token, _ in run])
        assert "<|im_end|>" in said and "<|im_start|>" not in said and "user" not in said and "assistant" not in said
        expected = answer["content"] or '"argvalue1a"}}</tool_call>'
        assert "".join(said.replace("<|im_end|>", "").split()).endswith(tail(expected, name))
    assert len(ids) - len(answers) < 600 and ids.count(tokenizer.bos_token_id or -1) <= 1


def tail(text: str, name: str) -> str:
    """Return what a tokenizer keeps of the last words of an answer, without white space."""
    text = "".join(text.split())
    return unicodedata.normalize("NFKC", text).lower() if name == "normalizing" else text


def test_an_answer_without_an_end_is_noted() -> None:
    tokenizer = byte_level()
    tokenizer.eos_token = None
    tokenizer.chat_template = next(template.text for template in REDUCTIONS if template.name == "no_end")
    notes = Encoder(tokenizer, seq_length=4096, train_on="answer").encode(to_sample(situations()["multi"])).notes
    assert notes == ("nothing ends the last answer: the tokenizer of the model has no eos_token",)


@pytest.mark.parametrize("mark", ["\U0010fffe", "\U0010ffff"])
def test_codes_that_are_no_characters_are_refused(mark: str) -> None:
    row = situations()["tools"]
    row["messages"][1]["tool_calls"][0]["function"]["arguments"] = {"x": f"a{mark}b"}
    for record in (row, {"prompt": "x", "completion": f"ab{mark}"}, {"messages": [{"role": "user", "content": mark}]}):
        with pytest.raises(ValueError, match=f"U\\+{ord(mark):X}"):
            to_sample(record)
