"""Chat templates of the field, reductions of what they do, and records of many situations: what `template_loss` tries."""

from __future__ import annotations

import importlib.util
import itertools
import json
import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

Row = dict[str, Any]


@dataclass(frozen=True)
class Family:
    """What the templates of one family write around an answer: regular expressions.

    `header` comes before an answer and is not trained. `end` closes the answer and is trained. `not_said` is text inside an answer
    that the model does not write. `optional` may be trained or not: the template or the generation prompt writes it for the model.
    `chained`: a header that follows directly on an answer is written by the model. `no_end`: nothing ends an answer; `end` is the
    marker of the next role. `after`: text behind the end that may be trained or not. `never`: what no rendering may hold. `own` is the family's own way to write reasoning into the content.
    """

    header: str
    end: str
    eos: str
    bos: str | None = None
    not_said: str = ""
    optional: str = r"\s+|<think>|</think>"
    chained: bool = False
    no_end: bool = False
    after: str = r"\s*"
    never: str = ""
    own: tuple[str, str] = ("<think>\n", "\n</think>\n\n")


CHATML = Family(r"<\|im_start\|>assistant\n", r"<\|im_end\|>", "<|im_end|>")
LFM = Family(r"<\|im_start\|>assistant\n", r"<\|im_end\|>", "<|im_end|>", "<|startoftext|>")
COHERE = Family(
    r"<\|START_OF_TURN_TOKEN\|><\|CHATBOT_TOKEN\|>",
    r"<\|END_OF_TURN_TOKEN\|>",
    "<|END_OF_TURN_TOKEN|>",
    "<BOS_TOKEN>",
    optional=r"\s+|<\|START_RESPONSE\|>",
)
DEEPSEEK = Family(
    r"<｜Assistant｜>|(?<=<｜tool▁output▁end｜>)<｜tool▁outputs▁end｜>",
    r"<｜end▁of▁sentence｜>|(?=<｜tool▁outputs▁begin｜>|<｜User｜>)",
    "<｜end▁of▁sentence｜>",
    "<｜begin▁of▁sentence｜>",
)
GEMMA = Family(r"<start_of_turn>model\n", r"<end_of_turn>", "<end_of_turn>", "<bos>")
GEMMA4 = Family(
    r"<\|turn>model\n|(?<=<turn\|>\n)(?!<\|turn>)(?=.)",  # a second answer goes on in the same turn
    r"<turn\|>|(?=<\|turn>)|$",
    "<turn|>",
    "<bos>",
    not_said=r"<\|tool_response>.*?<tool_response\|>",
    optional=r"\s+|<\|tool_response>",
    after=r"<\|turn>|\s*",  # the next header ends a text behind the result of a tool
    never=r"call:\w+\{\{",  # arguments in JSON
    own=("<|channel>thought\n", "\n<channel|>"),
)
GLM = Family(
    r"<\|assistant\|>", r"<\|(?:user|observation|system|assistant)\|>|<\|endoftext\|>|$", "<|endoftext|>", no_end=True
)
HARMONY = Family(
    r"<\|start\|>assistant",
    r"<\|(?:end|return|call|eom|eot)\|>",
    "<|return|>",
    chained=True,
    own=("<|channel|>analysis<|message|>", "<|end|>"),
)
MUSE = replace(HARMONY, own=CHATML.own)
UTTERANCE = Family(r"Assistant: ?", r"<end_of_utterance>", "<end_of_utterance>")
LLAMA3 = Family(
    r"<\|start_header_id\|>assistant<\|end_header_id\|>\n\n", r"<\|eo[tm]_id\|>", "<|eot_id|>", "<|begin_of_text|>"
)
# An answer without a question before it has no header.
_BARE = r"\[/INST\](?!\[INST\])|(?:(?<=</s>)|^(?:<s>)?)(?= +[^\s\[<])"
INST = Family(_BARE, r"</s>", "</s>", "<s>")
PHI = Family(r"<\|assistant\|>\n", r"<\|end\|>", "<|endoftext|>")
TURN = Family(r"<turn>(?:assistant|model)\n?", r"<end_turn>", "<end_turn>", "<s>")
NO_END = Family(r"<turn>assistant\n", r"<turn>|</s>|$", "</s>", no_end=True)
_FAMILIES = {
    "cohere": COHERE,
    "deepseek": DEEPSEEK,
    "gemma4": GEMMA4,
    "gemma": GEMMA,
    "diffusion_gemma": GEMMA4,
    "glm": GLM,
    "gptoss": HARMONY,
    "idefics": UTTERANCE,
    "smolvlm": UTTERANCE,
    "lfm": LFM,
    "llama3": LLAMA3,
    "llava": INST,
    "muse": MUSE,
    "nemotron": CHATML,
    "phi": PHI,
    "qwen": CHATML,
}


@dataclass(frozen=True)
class Template:
    """A chat template under test. `tokens`: more special tokens than its text names."""

    name: str
    text: str
    family: Family


def trl_templates() -> list[Template]:
    """Return the chat templates that come with the package trl; none without it."""
    found = importlib.util.find_spec("trl")
    if not found or not found.origin:
        return []
    folder = Path(found.origin).parent / "chat_templates"
    return [
        Template(path.stem, path.read_text(encoding="utf-8"), _family(path.stem))
        for path in sorted(folder.glob("*.jinja"))
    ]


def _family(name: str) -> Family:
    return next(family for prefix, family in _FAMILIES.items() if name.startswith(prefix))


_HEAD = "{% for m in messages %}"
_PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
_CALLS = "{% for c in m.tool_calls or [] %}<tool_call>CALL</tool_call>{% endfor %}"
_JSON_CALL = "{{ {'name': c.function.name, 'arguments': c.function.arguments} | tojson }}"
_PLAIN = "<|im_start|>{{ m.role }}\n{{ m.content or '' }}" + _CALLS.replace("CALL", _JSON_CALL) + "<|im_end|>\n"


def _chatml(turn: str = _PLAIN, before: str = "", prompt: str = _PROMPT) -> str:
    return before + _HEAD + turn + "{% endfor %}" + prompt


_DEFINE = "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
# Reductions of what templates in the field do; none is the text of one.
REDUCTIONS = [
    Template("plain", _chatml(before=_DEFINE), CHATML),
    Template("trims", _chatml(_PLAIN.replace("m.content or ''", "(m.content or '') | trim"), _DEFINE), CHATML),
    # The system message becomes the start of the first question.
    Template(
        "merges_system",
        "{{ bos_token }}{% set s = messages[0].content if messages[0].role == 'system' else '' %}"
        "{% for m in (messages[1:] if s else messages) %}<turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
        "{{ (s + '\n\n' if s and loop.first else '') + m.content | trim }}<end_turn>\n{% endfor %}"
        "{% if add_generation_prompt %}<turn>model\n{% endif %}",
        TURN,
    ),
    # The descriptions of the tools stand in the last question (as Mistral).
    Template(
        "tools_in_last_user",
        "{{ bos_token }}{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
        "{% for m in messages %}{% if m.role == 'user' %}{% if tools and loop.index0 == ns.last %}[TOOLS]{{ tools | tojson }}[/TOOLS]{% endif %}[INST] {{ m.content }} [/INST]"
        "{% elif m.role == 'assistant' %} {{ m.content or '' }}{% if m.tool_calls %}[CALLS]{% for c in m.tool_calls %}"
        + _JSON_CALL
        + "{% endfor %}{% endif %}{{ eos_token }}"
        "{% elif m.role == 'tool' %}[RESULT]{{ m.content }}[/RESULT]{% else %}{{ raise_exception('Only user, assistant and tool') }}{% endif %}{% endfor %}",
        Family(rf"{_BARE}|\[/RESULT\](?!\[RESULT|\[INST)", r"</s>", "</s>", "<s>"),
    ),
    Template(
        "alternates",
        "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
        + _PLAIN
        + "{% endfor %}"
        + _PROMPT,
        CHATML,
    ),
    Template(
        "thinks_in_prompt",
        _chatml(before=_DEFINE, prompt=_PROMPT.replace("assistant\n", "assistant\n<think>\n")),
        CHATML,
    ),
    # The last question is repeated behind the chat, as instructions of some fine-tunes do; the answer is printed in between.
    Template(
        "repeats_content",
        _chatml(
            "{% if m.role == 'assistant' %}<|im_start|>system\nDraft: {{ m.content }}<|im_end|>\n{% endif %}" + _PLAIN
        ),
        CHATML,
    ),
    Template(
        "python_arguments",
        _chatml(_PLAIN.replace(_JSON_CALL, "{{ c.function.name }}({{ c.function.arguments }})"), _DEFINE),
        CHATML,
    ),
    Template(
        "string_arguments",
        _chatml(_PLAIN.replace(_JSON_CALL, "{{ c.function.name + '\n' + c.function.arguments }}"), _DEFINE),
        CHATML,
    ),
    Template(
        "double_json",
        _chatml(
            _PLAIN.replace(
                _JSON_CALL, "{{ {'name': c.function.name, 'arguments': c.function.arguments | tojson} | tojson }}"
            ),
            _DEFINE,
        ),
        CHATML,
    ),
    Template("drops_tool_results", _chatml("{% if m.role != 'tool' %}" + _PLAIN + "{% endif %}", _DEFINE), CHATML),
    Template("drops_system", _chatml("{% if m.role != 'system' %}" + _PLAIN + "{% endif %}", _DEFINE), CHATML),
    Template(
        "drops_text_beside_calls",
        _chatml(
            _PLAIN.replace("{{ m.content or '' }}", "{% if not m.tool_calls %}{{ m.content }}{% endif %}"), _DEFINE
        ),
        CHATML,
    ),
    Template("last_turns_only", _chatml("{% if loop.revindex <= 4 %}" + _PLAIN + "{% endif %}"), CHATML),
    Template(
        "no_end",
        "{% for m in messages %}<turn>{{ m.role }}\n{{ m.content }}{% endfor %}{% if add_generation_prompt %}<turn>assistant\n{% endif %}",
        NO_END,
    ),
    # Reasoning stands in the last answer only, and an empty block where there is none.
    Template(
        "reasons_last",
        _chatml(
            "{% set r = m.reasoning_content or '' %}{% set b = m.content or '' %}{% if '</think>' in b %}{% set r = b.split('</think>')[0].split('<think>')[-1].strip() %}{% set b = b.split('</think>')[-1].lstrip('\n') %}{% endif %}"
            "<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and loop.last %}<think>\n{{ r }}\n</think>\n\n{% endif %}{{ b }}"
            + _CALLS.replace("CALL", _JSON_CALL)
            + "<|im_end|>\n",
            _DEFINE,
        ),
        CHATML,
    ),
    Template(
        "generation_without_end",
        _chatml(
            "<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}<|im_end|>\n"
        ),
        CHATML,
    ),
    Template(
        "generation_without_calls",
        _chatml(
            "<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
            + _CALLS.replace("CALL", _JSON_CALL)
            + "{% generation %}{{ m.content }}<|im_end|>\n{% endgeneration %}{% else %}{{ m.content }}<|im_end|>\n{% endif %}",
            _DEFINE,
        ),
        CHATML,
    ),
    Template(
        "generation_with_header",
        _chatml(
            "{% if m.role == 'assistant' %}{% generation %}<|im_start|>assistant\n{{ m.content }}<|im_end|>\n{% endgeneration %}{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}"
        ),
        CHATML,
    ),
    Template("no_prompt", _chatml(before=_DEFINE, prompt=""), CHATML),
    Template(
        "no_prompt_words",
        "{{ bos_token }}{% for m in messages %}{{ m.role | upper }}: {{ m.content }}{{ eos_token if m.role == 'assistant' else ' ' }}{% endfor %}",
        Family(r"ASSISTANT:", r"</s>", "</s>", "<s>"),
    ),
    Template(
        "no_prompt_thinks",
        _chatml(
            _PLAIN.replace(
                "{{ m.content or '' }}",
                "{% if m.role == 'assistant' %}<think>\n{{ m.reasoning_content or '' }}\n</think>\n\n{% endif %}{{ m.content or '' }}",
            ),
            _DEFINE,
            "",
        ),
        CHATML,
    ),
    Template(
        "end_between",
        _chatml("<|im_start|>{{ m.role }}\n{{ m.content }}{% if not loop.last %}<|im_end|>\n{% endif %}"),
        CHATML,
    ),
    # The last question is found by its content, and calls need ids of nine letters.
    Template(
        "finds_by_content",
        "{% set users = messages | selectattr('role', 'equalto', 'user') | list %}"
        + _chatml(
            "<|im_start|>{{ m.role }}\n{% if tools and m == users[-1] %}{{ tools | tojson }}\n{% endif %}{% if not m.tool_calls %}{{ m.content }}{% endif %}"
            "{% for c in m.tool_calls or [] %}{% if c.id | length < 9 %}{{ raise_exception('ids have 9 letters') }}{% endif %}<tool_call>{{ c.function | tojson }} {{ c.id[-9:] }}</tool_call>{% endfor %}<|im_end|>\n"
        ),
        CHATML,
    ),
    # The prompt for an answer closes the reasoning that earlier answers lack.
    Template(
        "closes_thinking",
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}<turn>user\n{{ m.content }}{% elif m.role == 'assistant' %}<turn>assistant\n</think>{{ m.content.split('</think>', 1)[-1] }}<end_turn>"
        "{% else %}{{ m.content }}\n{% endif %}{% endfor %}{% if add_generation_prompt %}<turn>assistant\n{{ '<think>' if thinking else '</think>' }}{% endif %}",
        TURN,
    ),
    # Reasoning of earlier answers is cut off behind marks of the family's own.
    *(
        Template(
            f"own_marks_{name}",
            _chatml(
                "<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and not loop.last and 'CLOSE' in m.content %}{{ m.content.split('CLOSE')[-1].lstrip() }}"
                "{% else %}{{ m.content }}{% endif %}<|im_end|>\n".replace("CLOSE", close)
            ),
            replace(CHATML, own=(opening, close)),
        )
        for name, opening, close in (
            ("brackets", "[THINK]", "[/THINK]"),
            ("signs", "◁think▷", "◁/think▷"),
            ("unknown", "<analysis>", "</analysis>"),
        )
    ),
    Template("generation_of_turns", _chatml("{% generation %}" + _PLAIN + "{% endgeneration %}", _DEFINE), CHATML),
    Template(
        "length_decides",
        _chatml(
            "<|im_start|>{{ m.role }}\n{% if m.content | length > 12 %}Long: {% endif %}{{ m.content }}<|im_end|>\n"
        ),
        CHATML,
    ),
]
_ZEPHYR = Family(r"<\|assistant\|>\n", r"</s>", "</s>", "<s>")
_ALPACA = Family(r"### Response:\n", r"(?=\n\n### )|</s>|$", "</s>", "<s>", no_end=True, after=r"(?:\n\n### \w+:)?\s*")
REDUCTIONS += [
    # The system message stands in the first question (as Llama 2).
    Template(
        "inst",
        "{% set s = messages[0].content if messages[0].role == 'system' else '' %}{% for m in (messages[1:] if s else messages) %}"
        "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Conversation roles must alternate') }}{% endif %}"
        "{% if m.role == 'user' %}{{ bos_token + '[INST] ' + ('<<SYS>>\n' + s + '\n<</SYS>>\n\n' if s and loop.first else '') + m.content.strip() + ' [/INST]' }}"
        "{% elif m.role == 'assistant' %}{{ ' ' + m.content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}",
        INST,
    ),
    # Words are the headers, and EOS the only special token (as Vicuna).
    Template(
        "vicuna",
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}{% elif m.role == 'user' %} USER: {{ m.content }}"
        "{% elif m.role == 'assistant' %} ASSISTANT: {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}{% if add_generation_prompt %} ASSISTANT:{% endif %}",
        Family(r" ASSISTANT:", r"</s>", "</s>", "<s>"),
    ),
    Template(
        "eos_last",
        "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% if m.role == 'assistant' and loop.last %}{{ eos_token }}{% elif m.role == 'assistant' %}</s>\n{% else %}\n{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}",
        _ZEPHYR,
    ),
    # No special tokens at all: a heading of plain text ends an answer.
    Template(
        "alpaca",
        "{% for m in messages %}{% if m.role == 'system' %}### System:\n{{ m.content }}\n\n{% elif m.role == 'user' %}### Instruction:\n{{ m.content }}\n\n"
        "{% else %}### Response:\n{{ m.content }}\n\n{% endif %}{% endfor %}{% if add_generation_prompt %}### Response:\n{% endif %}",
        _ALPACA,
    ),
    Template(
        "merges_answers",
        "{% for m in messages %}{% if loop.first or m.role != loop.previtem.role %}<|im_start|>{{ m.role }}\n{% endif %}{{ m.content }}{% if loop.last or m.role != loop.nextitem.role %}<|im_end|>\n{% else %}\n\n{% endif %}{% endfor %}"
        + _PROMPT,
        CHATML,
    ),
    Template(
        "truncates_answers",
        _chatml("<|im_start|>{{ m.role }}\n{{ m.content[:4] if m.role == 'assistant' else m.content }}<|im_end|>\n"),
        CHATML,
    ),
    Template("escapes_html", _chatml("<|im_start|>{{ m.role }}\n{{ m.content | e }}<|im_end|>\n"), CHATML),
    Template(
        "drops_all_reasoning",
        _chatml(
            "<|im_start|>{{ m.role }}\n{{ m.content.split('</think>')[-1] if m.role == 'assistant' else m.content }}<|im_end|>\n"
        ),
        CHATML,
    ),
    Template(
        "drops_earlier_answers",
        _chatml("{% if m.role != 'assistant' or loop.index0 >= loop.length - 2 %}" + _PLAIN + "{% endif %}", _DEFINE),
        CHATML,
    ),
    # Two marks end an answer, and only the last of them is the end token.
    Template(
        "two_ends",
        _chatml(_PLAIN.replace("<|im_end|>", "{% if m.role == 'assistant' %}</answer>{% endif %}<|im_end|>"), _DEFINE),
        CHATML,
    ),
    Template(
        "parts_only",
        _chatml("<|im_start|>{{ m.role }}\n{% for part in m.content %}{{ part.text }}{% endfor %}<|im_end|>\n"),
        CHATML,
    ),
    Template(
        "calls_without_name",
        _chatml(_PLAIN.replace(_JSON_CALL, "{{ c.function.arguments | tojson }}"), _DEFINE),
        CHATML,
    ),
    Template(
        "first_call_only",
        _chatml(_PLAIN.replace("for c in m.tool_calls or []", "for c in (m.tool_calls or [])[:1]"), _DEFINE),
        CHATML,
    ),
    Template(
        "escaped_arguments",
        _chatml(
            _PLAIN.replace(
                _JSON_CALL,
                "{{ c.function.name }}{% for k, v in c.function.arguments.items() %} {{ k }}={{ v | string | e }}{% endfor %}",
            ),
            _DEFINE,
        ),
        CHATML,
    ),
    Template(
        "calls_of_last_turn",
        _chatml(
            _PLAIN.replace(
                "for c in m.tool_calls or []", "for c in (m.tool_calls or [] if loop.index0 > loop.length - 4 else [])"
            ),
            _DEFINE,
        ),
        CHATML,
    ),
]


def _user(text: str, **more: Any) -> Row:
    return {"role": "user", "content": text, **more}


def _said(text: str | None, **more: Any) -> Row:
    return {"role": "assistant", "content": text, **more}


def _call(name: str, arguments: Any, number: int = 1) -> Row:
    return {"id": f"id{number}abcdefg", "type": "function", "function": {"name": name, "arguments": arguments}}


def _result(text: str, name: str = "call1name", number: int = 1) -> Row:
    return {"role": "tool", "name": name, "tool_call_id": f"id{number}abcdefg", "content": text}


def _tools(*names: str) -> list[Row]:
    return [
        {
            "type": "function",
            "function": {
                "name": name,
                "description": f"d{number}word",
                "parameters": {
                    "type": "object",
                    "properties": {f"arg{number}name": {"type": "string", "description": f"p{number}word"}},
                    "required": [f"arg{number}name"],
                },
            },
        }
        for number, name in enumerate(names, 1)
    ]


def _chat(*messages: Row, **more: Any) -> Row:
    return {"messages": list(messages), **more}


_ARGS = {"arg1name": "argvalue1a"}
_TOOLS = _tools("call1name")
_TURNS = tuple(itertools.chain.from_iterable((_user(f"u{n}word"), _said(f"a{n}word")) for n in (1, 2, 3)))


def _tool_chat(first: Row, *more: Row) -> Row:
    return _chat(_user("u1word"), first, _result("t1word"), _said("a2word"), *more, tools=_TOOLS)


def situations(family: Family = CHATML) -> dict[str, Row]:
    """Return the records to try, by name."""
    one, two = family.own
    call = [_call("call1name", _ARGS)]
    return {
        "single": _chat(_user("u1word"), _said("a1word")),
        "multi": _chat(*_TURNS),
        "system": _chat({"role": "system", "content": "s1word"}, *_TURNS[:2]),
        "system_multi": _chat({"role": "system", "content": "s1word"}, *_TURNS),
        "empty_system": _chat({"role": "system", "content": ""}, *_TURNS[:4]),
        "tools": _tool_chat(_said("", tool_calls=call)),
        "tools_null_content": _tool_chat(_said(None, tool_calls=call)),
        "tools_text_arguments": _tool_chat(_said("", tool_calls=[_call("call1name", json.dumps(_ARGS))])),
        "tools_text_beside": _tool_chat(_said("a1word", tool_calls=call)),
        "tools_two_calls": _chat(
            _user("u1word"),
            _said("", tool_calls=[*call, _call("call2name", {"arg2name": "argvalue2a"}, 2)]),
            _result("t1word"),
            _result("t2word", "call2name", 2),
            _said("a2word"),
            tools=_tools("call1name", "call2name"),
        ),
        "tools_nested": _tool_chat(
            _said(
                "",
                tool_calls=[
                    _call("call1name", {"arg1name": {"b1key": ["c1value", 7, None, True]}, "e1name": 'f1 g1\n"h1" é'})
                ],
            )
        ),
        "tools_list_value": _tool_chat(
            _said(
                "",
                tool_calls=[_call("call1name", {"arg1name": ["argvalue1", "argvalue2"], "flag": True, "none": None})],
            )
        ),
        "tools_unsorted": _tool_chat(
            _said("", tool_calls=[_call("call1name", {"z1name": "<b1> & 'c1'", "arg1name": 5})])
        ),
        "tools_mixed": _chat(
            _user("u1word"),
            _said("", tool_calls=[_call("call1name", {"z1name": "y1value", "b1name": 3})]),
            _result("t1word"),
            _said("", tool_calls=[_call("call1name", json.dumps({"arg1name": "argvalue2"}), 2)]),
            _result("t2word", number=2),
            _said("a3word"),
            tools=_TOOLS,
        ),
        "tools_empty_value": _tool_chat(
            _said("", tool_calls=[_call("call1name", {"arg1name": "", "b1name": " ", "c1name": []})])
        ),
        "tools_text_of_others": _tool_chat(
            _said("", tool_calls=[_call("call1name", {"arg1name": "call1name", "u1word": "t1word"})])
        ),
        "tools_undescribed": _chat(_user("u1word"), _said(None, tool_calls=call), _result("t1word"), _said("a2word")),
        "tools_no_arguments": _tool_chat(_said("", tool_calls=[_call("call1name", {})])),
        "tools_chain": _tool_chat(
            _said("", tool_calls=call),
            _user("u3word"),
            _said("", tool_calls=[_call("call1name", {"arg1name": "argvalue3a"}, 3)]),
            _result("t3word", number=3),
            _said("a4word"),
        ),
        "tools_steps": _chat(
            _user("u1word"),
            _said("", tool_calls=call),
            _result("t1word"),
            _said("", tool_calls=[_call("call1name", {"arg1name": "argvalue2a"}, 2)]),
            _result("t2word", number=2),
            _said("a3word"),
            tools=_TOOLS,
        ),
        "tools_call_last": _chat(_user("u1word"), _said("", tool_calls=call), tools=_TOOLS),
        "tools_unused": _chat(*_TURNS[:4], tools=_TOOLS),
        "think_in": _chat(_user("u1word"), _said("<think>\nr1word\n</think>\n\na1word")),
        "think_own": _chat(_user("u1word"), _said(f"{one}r1word{two}a1word")),
        "think_twice_own": _chat(
            *(x for n in (1, 2) for x in (_user(f"u{n}word"), _said(f"{one}r{n}word{two}a{n}word")))
        ),
        "think_again_in": _chat(_user("u1word"), _said("<think>\nr1word\n</think>\n\na1word\n</think>\nb1word")),
        "think_after_text": _chat(_user("u1word"), _said("a1word <think>\nr1word\n</think>\n\nb1word")),
        "think_unclosed": _chat(_user("u1word"), _said("<think>\nr1word a1word"), *_TURNS[2:4]),
        "think_in_and_beside": _chat(
            _user("u1word"), _said("<think>\nr1word\n</think>\n\na1word", reasoning_content="r2word")
        ),
        "think_beside": _chat(_user("u1word"), _said("a1word", reasoning_content="r1word")),
        "think_beside_other_name": _chat(_user("u1word"), _said("a1word", thinking="r1word")),
        "think_twice_in": _chat(
            *(x for n in (1, 2) for x in (_user(f"u{n}word"), _said(f"<think>\nr{n}word\n</think>\n\na{n}word")))
        ),
        "think_twice_beside": _chat(
            *(x for n in (1, 2) for x in (_user(f"u{n}word"), _said(f"a{n}word", reasoning_content=f"r{n}word")))
        ),
        "think_first_only": _chat(_user("u1word"), _said("a1word", reasoning_content="r1word"), *_TURNS[2:4]),
        "think_tools": _chat(
            _user("u1word"),
            _said("", reasoning_content="r1word", tool_calls=call),
            _result("t1word"),
            _said("a2word", reasoning_content="r2word"),
            tools=_TOOLS,
        ),
        "think_empty": _chat(_user("u1word"), _said("a1word", reasoning_content="")),
        "assistant_first": _chat(_said("a0word"), *_TURNS[:4]),
        "users_consecutive": _chat(_user("u0word"), *_TURNS[:4]),
        "answers_consecutive": _chat(*_TURNS[:2], _said("b1word"), *_TURNS[2:4]),
        "user_last": _chat(*_TURNS[:2], _user("u2word")),
        "system_later": _chat(*_TURNS[:2], {"role": "system", "content": "s2word"}, *_TURNS[2:4]),
        "spaces": _chat(_user("  u1word \n"), _said(" \n a1word  "), *_TURNS[2:4]),
        "same_text": _chat(_user("a1word"), _said("a1word"), _user("a1word"), _said("a1word")),
        "empty_answer": _chat(_user("u1word"), _said(""), *_TURNS[2:4]),
        "bytes": _chat(_user("ü1x 猫 👩‍👩‍👧"), _said("é a1word 🚂猫"), _user("u2word"), _said("👩‍👩‍👧 a2word ﷽\u0301")),
        "marks_in_content": _chat(
            _user("u1word <|other|> ⟦x⟧"), _said("a1word \ue000\u2060 {{ x }} ⟦y⟧"), *_TURNS[2:4]
        ),
        "long_lines": _chat(
            _user("u1word\n\n# u2word\n- u3word"), _said("a1word\n```py\nb1word()\n```\n\tc1word"), *_TURNS[2:4]
        ),
    }


class RandomChats:
    """Makes records of random chats: systems, calls in any form, results, reasoning, and texts with spaces and other scripts."""

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)
        self._count = 0

    def _word(self, kind: str) -> str:
        self._count += 1
        return f"{kind}{chr(97 + self._count % 26)}{self._count % 10}word"

    def _text(self, kind: str) -> str:
        word = self._word(kind)
        forms = [
            f" {word}",
            f"{word}\n",
            f"é {word} 猫🚂",
            f"{word}\n\n{self._word(kind)}",
            f"{{{{ {word} }}}}",
            f'"{word}"',
        ]
        return self._draw.choice([word, *forms])

    def _value(self) -> Any:
        word = self._word("v")
        return self._draw.choice([word, word, {"key": word}, [word, self._word("v")], 3, True, None, ""])

    def _calls(self, first: int) -> list[Row]:
        calls = []
        for number in range(first, first + self._draw.choice((1, 1, 2))):
            arguments = {
                f"arg{self._draw.choice('abcdef')}1name": self._value() for _ in range(self._draw.randrange(4))
            }
            calls.append(_call("call1name", json.dumps(arguments) if self._draw.random() < 0.3 else arguments, number))
        return calls

    def _steps(self, count: int) -> list[Row]:
        """Return calls with their results."""
        messages: list[Row] = []
        for _ in range(count):
            calls = self._calls(len(messages))
            reasoning = {"reasoning_content": self._text("r")} if self._draw.random() < 0.3 else {}
            messages.append(_said(self._draw.choice(["", "", None, self._text("a")]), tool_calls=calls, **reasoning))
            messages += [{**_result(self._text("t")), "tool_call_id": call["id"]} for call in calls]
        return messages

    def __call__(self) -> Row:
        with_tools = self._draw.random() < 0.5
        messages = [{"role": "system", "content": self._text("s")}] if self._draw.random() < 0.3 else []
        for _ in range(self._draw.randint(1, 4)):
            messages.append(_user(self._text("u")))
            messages += self._steps(self._draw.choice((0, 1, 1, 2)) if with_tools else 0)
            said = self._text("a")
            forms = [_said(said)] * 5 + [_said(""), _said(f"<think>\n{self._word('r')}\n</think>\n\n{said}")]
            messages.append(self._draw.choice([*forms, _said(said, reasoning_content=self._text("r"))]))
        messages += [_user(self._text("u"))] if self._draw.random() < 0.1 else []
        return _chat(*messages, **({"tools": _TOOLS} if with_tools else {}))
