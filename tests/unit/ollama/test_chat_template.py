"""Ollama's TEMPLATE is derived from a chat template, renders the same, and is refused where it cannot."""

import datetime
import json

import pytest
import transformers.utils.chat_template_utils as reference
from go_template import render
from hostile import limits
from tables import table

from trainer.common.errors import UserError
from trainer.data import hf_template
from trainer.data.hf_template import ChatTemplate, TemplateError, read_template
from trainyard.deploy import chat_template
from trainyard.deploy.chat_template import derive, derive_apart, go_string

TODAY = datetime.datetime(2026, 3, 4, 5, 6)
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
CHATML = table("chat_template")["chatml"]
LLAMA3 = table("chat_template")["llama3"]
MISTRAL = table("chat_template")["mistral"]
GEMMA = table("chat_template")["gemma"]
PHI = table("chat_template")["phi"]
TEMPLATES = {
    "chatml": CHATML,
    "llama3": LLAMA3,
    "mistral, system first": MISTRAL.replace("WHERE", "first"),
    "mistral, system last": MISTRAL.replace("WHERE", "last"),
    "gemma": GEMMA,
    "phi": PHI,
    "tiny": PHI.replace("{{ '<|'", "{% generation %}{{ '<|'").replace(
        "{% endfor %}", "{% endgeneration %}{% endfor %}"
    ),
    "first answer": PHI.replace("+ m['content']", "+ ('!' if loop.index0 == 1 else '') + m['content']"),
    "last answer": PHI.replace("+ m['content']", "+ ('!' if loop.revindex == 2 else '') + m['content']"),
    "date": "{{ strftime_now('%d %b %Y') }}" + PHI,
}
CHAT = table("chat_template")["chat"]


@pytest.mark.parametrize("name", TEMPLATES)
def test_derived_template_renders_as_transformers_does(name: str) -> None:
    template = ChatTemplate(TEMPLATES[name], TOKENS, TODAY)
    derived = derive(template)
    assert "\n" not in derived.text and '"""' not in derived.text
    more = [{"role": "assistant", "content": "\u200bYes: 3.14\t{% if %}"}, {"role": "user", "content": "Why?"}]
    for chat in [CHAT, CHAT[1:], CHAT[1:2], CHAT[:2], CHAT + more, CHAT[1:] + more]:
        if name == "date" or (name == "gemma" and chat[0]["role"] == "system"):
            continue  # transformers takes the date from the clock
        expected = reference._compile_jinja_template(TEMPLATES[name]).render(
            messages=chat, tools=None, documents=None, add_generation_prompt=True, **TOKENS
        )
        assert render(derived.text, chat) == expected


def test_bos_token_that_the_server_adds_is_left_out() -> None:
    template = ChatTemplate(TEMPLATES["llama3"], TOKENS, TODAY)
    with_bos, without = derive(template).text, derive(template, added_bos="<s>").text
    assert render(with_bos, CHAT) == "<s>" + render(without, CHAT)
    with pytest.raises(TemplateError, match="does not begin with '<s>'"):
        derive(ChatTemplate(PHI, TOKENS, TODAY), added_bos="<s>")


@pytest.mark.parametrize(("source", "reason"), table("chat_template")["template_that_cannot_be_derived_is_refused"])
def test_template_that_cannot_be_derived_is_refused(source: str, reason: str) -> None:
    with pytest.raises(TemplateError, match=reason) as error:
        derive(ChatTemplate(source, TOKENS, TODAY))
    assert "\n" not in str(error.value)


def test_template_that_reads_contents_as_parts_is_derived() -> None:
    parts = TEMPLATES["llama3"].replace("m['content']", "m['content'][0]['text']")
    assert parts != TEMPLATES["llama3"]
    assert derive(ChatTemplate(parts, TOKENS, TODAY)) == derive(ChatTemplate(TEMPLATES["llama3"], TOKENS, TODAY))


def test_differences_are_reported() -> None:
    assert any("spaces" in note for note in derive(ChatTemplate(LLAMA3, TOKENS, TODAY)).notes)
    assert any("no place for a system message" in note for note in derive(ChatTemplate(GEMMA, TOKENS, TODAY)).notes)
    assert derive(ChatTemplate(PHI, TOKENS, TODAY)).notes == []


def test_go_strings_hold_any_text() -> None:
    text = 'a\n\t\r\0\x7f{{ "x" }}\\ \u200b 😀 é \U000e0001'
    assert render(f"{{{{ {go_string(text)} }}}}", []) == text
    assert go_string(text).isprintable()


def test_template_of_a_model_folder(tmp_path) -> None:
    config = {"chat_template": "old", "bos_token": {"content": "<s>"}, "eos_token": "</s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert read_template(tmp_path) == ("old", TOKENS)
    (tmp_path / "chat_template.jinja").write_text("new")
    assert read_template(tmp_path)[0] == "new"
    (tmp_path / "chat_template.jinja").unlink()
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert read_template(tmp_path) == ("d", {})
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(TemplateError, match=r"tokenizer_config\.json"):
        read_template(tmp_path)


NESTED = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
MACRO = "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}"
CONDITION = "{% for a in range(99999) if range(99999) | list | sum < 0 %}{% endfor %}"


@pytest.mark.parametrize("source", [NESTED, MACRO, CONDITION, "{{ 10**10**9 }}"])
def test_a_template_that_does_not_end_is_refused(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hf_template, "_TIME_LIMIT", 0.3)
    with pytest.raises(UserError, match=r"takes more than 0.3 s|operands of a power are too large"), limits():
        ChatTemplate(source, TOKENS, TODAY).render(CHAT)


@pytest.mark.slow
def test_a_template_is_derived_in_a_process_with_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    assert derive_apart(CHATML, TOKENS, TODAY, "") == derive(ChatTemplate(CHATML, TOKENS, TODAY))
    with pytest.raises(TemplateError, match="0 times"):
        derive_apart("{{ messages | length }}", TOKENS, TODAY, "")
    with pytest.raises(TemplateError, match="MemoryError"):
        derive_apart(
            "{% set x = namespace(y='a') %}{% for i in range(40) %}{% set x.y = x.y ~ x.y %}{% endfor %}",
            TOKENS,
            TODAY,
            "",
        )
    monkeypatch.setattr(chat_template, "_TIME_LIMIT", 0)
    with pytest.raises(TemplateError, match="too much time"):
        derive_apart(NESTED, TOKENS, TODAY, "")
