"""An independent check of which text of a chat carries loss: chat templates x situations.

The trained text is compared with the roles' markers, which are written down here by hand for each family of templates; nothing of
`trainer` decides what is right. `python tests/support/template_loss.py [TEMPLATE...]` prints the matrix, `--wrong` only what is wrong.
"""

from __future__ import annotations

import copy
import functools
import importlib.util
import itertools
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from trainer.data.encode import Encoder
from trainer.data.shapes import to_sample
from trainer.errors import UserError

Row = dict[str, Any]
_WORD = re.compile(
    r"[a-z]+?\d(?:word|name|value|key)?"
)  # the words of the situations: each occurs once, but for names of calls
_MARKER = re.compile(
    r"<\|[A-Za-z_]+\|>|<｜[^｜]+｜>|<\|[a-z_]+>|<[a-z_]+\|>|\[gMASK\]|<sop>|</?(?:s|think|tool_call|tool_response|arg_key|arg_value)>"
    r"|<(?:start_of_turn|end_of_turn|end_of_utterance|image|bos|eos|turn|end_turn)>"
)


@dataclass(frozen=True)
class Family:
    """What the templates of one family write around an answer: regular expressions.

    `header` comes before an answer and is not trained. `end` closes the answer and is trained. `not_said` is text inside an answer
    that the model does not write. `optional` may be trained or not: the template or the generation prompt writes it for the model.
    `chained`: a header that follows directly on an answer is written by the model. `no_end`: nothing ends an answer; `end` is the
    marker of the next role. `own` is the family's own way to write reasoning into the content.
    """

    header: str
    end: str
    eos: str
    bos: str | None = None
    not_said: str = ""
    optional: str = r"\s+|<think>|</think>"
    chained: bool = False
    no_end: bool = False
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
_BARE = r"\[/INST\](?!\[INST\])|(?:(?<=</s>)|^(?:<s>)?)(?= +[^\s\[])"
INST = Family(_BARE, r"</s>", "</s>", "<s>")
PHI = Family(r"<\|assistant\|>\n", r"<\|end\|>", "<|endoftext|>")
TURN = Family(r"<turn>(?:assistant|model)\n?", r"<end_turn>", "<end_turn>", "<s>")
NO_END = Family(r"<turn>assistant\n", r"<turn>|</s>|$", "</s>", no_end=True)
_FAMILIES = {
    "cohere": COHERE, "deepseek": DEEPSEEK, "gemma4": GEMMA4, "gemma": GEMMA, "diffusion_gemma": GEMMA4, "glm": GLM, "gptoss": HARMONY,
    "idefics": UTTERANCE, "smolvlm": UTTERANCE, "lfm": LFM, "llama3": LLAMA3, "llava": INST, "muse": MUSE, "nemotron": CHATML,
    "phi": PHI, "qwen": CHATML,
}  # fmt: skip


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
    return [Template(path.stem, path.read_text(encoding="utf-8"), _family(path.stem)) for path in sorted(folder.glob("*.jinja"))]  # fmt: skip


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
    ),  # fmt: skip
    # The last question is repeated behind the chat, as instructions of some fine-tunes do; the answer is printed in between.
    Template(
        "repeats_content",
        _chatml(
            "{% if m.role == 'assistant' %}<|im_start|>system\nDraft: {{ m.content }}<|im_end|>\n{% endif %}" + _PLAIN
        ),
        CHATML,
    ),  # fmt: skip
    Template(
        "python_arguments",
        _chatml(_PLAIN.replace(_JSON_CALL, "{{ c.function.name }}({{ c.function.arguments }})"), _DEFINE),
        CHATML,
    ),  # fmt: skip
    Template(
        "keyword_arguments",
        _chatml(
            _PLAIN.replace(
                _JSON_CALL,
                "{{ c.function.name }}({% for k, v in c.function.arguments.items() %}{{ k }}={{ v | tojson }}{% if not loop.last %}, {% endif %}{% endfor %})",
            ),
            _DEFINE,
        ),
        CHATML,
    ),  # fmt: skip
    Template(
        "string_arguments",
        _chatml(_PLAIN.replace(_JSON_CALL, "{{ c.function.name + '\n' + c.function.arguments }}"), _DEFINE),
        CHATML,
    ),  # fmt: skip
    Template(
        "double_json",
        _chatml(
            _PLAIN.replace(
                _JSON_CALL, "{{ {'name': c.function.name, 'arguments': c.function.arguments | tojson} | tojson }}"
            ),
            _DEFINE,
        ),
        CHATML,
    ),  # fmt: skip
    Template("drops_tool_results", _chatml("{% if m.role != 'tool' %}" + _PLAIN + "{% endif %}", _DEFINE), CHATML),
    Template("drops_system", _chatml("{% if m.role != 'system' %}" + _PLAIN + "{% endif %}", _DEFINE), CHATML),
    Template(
        "drops_text_beside_calls",
        _chatml(
            _PLAIN.replace("{{ m.content or '' }}", "{% if not m.tool_calls %}{{ m.content }}{% endif %}"), _DEFINE
        ),
        CHATML,
    ),  # fmt: skip
    Template("last_turns_only", _chatml("{% if loop.revindex <= 4 %}" + _PLAIN + "{% endif %}"), CHATML),
    Template(
        "no_end",
        "{% for m in messages %}<turn>{{ m.role }}\n{{ m.content }}{% endfor %}{% if add_generation_prompt %}<turn>assistant\n{% endif %}",
        NO_END,
    ),  # fmt: skip
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
    ),  # fmt: skip
    Template(
        "generation_without_calls",
        _chatml(
            "<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
            + _CALLS.replace("CALL", _JSON_CALL)
            + "{% generation %}{{ m.content }}<|im_end|>\n{% endgeneration %}{% else %}{{ m.content }}<|im_end|>\n{% endif %}",
            _DEFINE,
        ),
        CHATML,
    ),  # fmt: skip
    Template(
        "generation_with_header",
        _chatml(
            "{% if m.role == 'assistant' %}{% generation %}<|im_start|>assistant\n{{ m.content }}<|im_end|>\n{% endgeneration %}{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}"
        ),
        CHATML,
    ),  # fmt: skip
    Template(
        "upper_case_answers",
        _chatml(
            "<|im_start|>{{ m.role }}\n{{ m.content | upper if m.role == 'assistant' else m.content }}<|im_end|>\n"
        ),
        CHATML,
    ),  # fmt: skip
    Template(
        "length_decides",
        _chatml(
            "<|im_start|>{{ m.role }}\n{% if m.content | length > 12 %}Long: {% endif %}{{ m.content }}<|im_end|>\n"
        ),
        CHATML,
    ),  # fmt: skip
    Template(
        "first_letter_decides",
        _chatml(
            "<|im_start|>{{ m.role }}\n{{ m.content }}{% if m.content and m.content[0] == 'a' %}\n(A){% endif %}<|im_end|>\n"
        ),
        CHATML,
    ),  # fmt: skip
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
        "tools_nested": _tool_chat(_said("", tool_calls=[_call("call1name", {"arg1name": {"b1key": ["c1value", 7, None, True]}, "e1name": "f1 g1\n\"h1\" é"})])),  # fmt: skip
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
        "think_beside": _chat(_user("u1word"), _said("a1word", reasoning_content="r1word")),
        "think_beside_other_name": _chat(_user("u1word"), _said("a1word", thinking="r1word")),
        "think_twice_in": _chat(*(x for n in (1, 2) for x in (_user(f"u{n}word"), _said(f"<think>\nr{n}word\n</think>\n\na{n}word")))),  # fmt: skip
        "think_twice_beside": _chat(*(x for n in (1, 2) for x in (_user(f"u{n}word"), _said(f"a{n}word", reasoning_content=f"r{n}word")))),  # fmt: skip
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
        "marks_in_content": _chat(_user("u1word <|other|> ⟦x⟧"), _said("a1word \ue000\u2060 {{ x }} ⟦y⟧"), *_TURNS[2:4]),
        "long_lines": _chat(_user("u1word\n\n# u2word\n- u3word"), _said("a1word\n```py\nb1word()\n```\n\tc1word"), *_TURNS[2:4]),  # fmt: skip
    }  # fmt: skip


@functools.cache
def _core() -> Any:
    """Return a byte-level BPE tokenizer with merges of the words of the situations."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    core = Tokenizer(models.BPE())
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    lines = [
        "user assistant system model tool name arguments functions to= commentary json word value argvalue \n\n \n "
    ] * 50
    how = trainers.BpeTrainer(vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    core.train_from_iterator(lines, how)
    return core


def tokenizer_of(template: Template) -> Any:
    """Return a small tokenizer that knows the markers of a template."""
    from tokenizers import AddedToken
    from transformers import PreTrainedTokenizerFast

    family = template.family
    named = {"eos_token": family.eos, **({"bos_token": family.bos} if family.bos else {})}
    made = PreTrainedTokenizerFast(tokenizer_object=copy.deepcopy(_core()), **named)
    # Tokens of reasoning and calls are no special tokens in the field.
    plain = ("think", "tool_", "arg_")
    markers = sorted({*_MARKER.findall(template.text)})
    made.add_tokens([AddedToken(marker, special=not marker.strip("</").startswith(plain)) for marker in markers])
    made.chat_template = template.text
    return made


@functools.cache
def _byte_of() -> dict[str, int]:
    """Return the byte that each letter of a byte-level vocabulary stands for."""
    printed = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in printed]
    return {chr(byte): byte for byte in printed} | {chr(256 + place): byte for place, byte in enumerate(rest)}


def spelled(tokenizer: Any, ids: list[int], mask: list[bool]) -> tuple[str, list[bool]]:
    """Return the text of the tokens, and for every character whether all of its bytes carry loss."""
    added = {place: str(token) for place, token in tokenizer.added_tokens_decoder.items()}
    data, flags = bytearray(), []
    for place, trained in zip(ids, mask, strict=True):
        if place in added:
            piece = added[place].encode()
        else:
            piece = bytes(_byte_of()[letter] for letter in tokenizer.convert_ids_to_tokens(place))
        data += piece
        flags += [trained] * len(piece)
    text, start, trained_chars = data.decode(), 0, []
    for letter in text:
        size = len(letter.encode())
        trained_chars.append(all(flags[start : start + size]))
        start += size
    return text, trained_chars


@dataclass
class Words:
    """The words of a record: which the assistant says, which are earlier reasoning, and which others there are."""

    said: set[str] = field(default_factory=set)
    reasons: dict[str, int] = field(default_factory=dict)  # the word, and the place of its message
    given: set[str] = field(default_factory=set)
    names: set[str] = field(default_factory=set)  # of calls: they stand in the descriptions and results of tools too


_REASONING = ("reasoning_content", "thinking", "reasoning")


def words_of(row: Row) -> Words:
    found = Words()
    for place, message in enumerate(row["messages"]):
        words = {*_WORD.findall(str(message.get("content") or ""))}
        if message["role"] != "assistant":
            found.given |= words
            continue
        calls = message.get("tool_calls") or []
        called = {call["function"]["name"] for call in calls}
        arguments = {
            word
            for call in calls
            for word in _WORD.findall(json.dumps(call["function"]["arguments"], ensure_ascii=False))
        }
        beside = {word for key in _REASONING for word in _WORD.findall(message.get(key) or "")}
        found.names |= called
        found.said |= words | called | arguments | beside
        found.reasons |= {word: place for word in words | beside if word.startswith("r")}
    described = {*_WORD.findall(json.dumps(row.get("tools") or []))}
    found.given |= {word for word in described if not word.startswith("arg")}
    found.given -= found.said
    return found


def renderings(tokenizer: Any, row: Row) -> Iterator[str]:
    """Yield every way to render a record: forms of arguments, empty contents, lists of parts and names of reasoning."""
    tools = row.get("tools")
    messages = row["messages"]
    calls = any(message.get("tool_calls") for message in messages)
    thinks = any(key in message for message in messages for key in _REASONING)
    forms = itertools.product(
        ("object", "text") if calls else ("object",),
        ("", None, "absent") if calls else ("",),
        (False, True),
        ((), *((name,) for name in _REASONING), _REASONING) if thinks else ((),),
        (False, True) if calls else (False,),
    )
    seen = set()
    for arguments, empty, parts, names, kept in forms:
        chat = [_formed(message, arguments, empty, parts, names, kept) for message in messages]
        try:
            text = tokenizer.apply_chat_template(chat, tools=tools, tokenize=False)
        except Exception:  # any error of the template: this form is not for it
            continue
        if text not in seen:
            seen.add(text)
            yield text


def _formed(message: Row, arguments: str, empty: str | None, parts: bool, names: tuple[str, ...], kept: bool) -> Row:
    made = {key: value for key, value in copy.deepcopy(message).items() if key not in _REASONING}
    reasoning = next((message[key] for key in _REASONING if key in message), None)
    if reasoning is not None:
        made |= dict.fromkeys(names, reasoning)
    for call in made.get("tool_calls") or []:
        value = call["function"]["arguments"]
        value = json.loads(value) if isinstance(value, str) else value
        # Text that the record has stays as it is written.
        text = message["tool_calls"][0]["function"]["arguments"]
        call["function"]["arguments"] = (text if isinstance(text, str) and len(made["tool_calls"]) == 1 else json.dumps(value, ensure_ascii=not kept)) if arguments == "text" else value  # fmt: skip
    if not made.get("content") and made.get("tool_calls"):
        made["content"] = empty
        if empty == "absent":
            del made["content"]
    elif parts:
        made["content"] = [{"type": "text", "text": made["content"]}]
    return made


@dataclass(frozen=True)
class Verdict:
    """`kind`: ok, refused (nothing else was possible), REFUSED (it could be rendered whole), or WRONG."""

    kind: str
    what: str = ""

    def __str__(self) -> str:
        return f"{self.kind}: {self.what}" if self.what else self.kind


class Bed:
    """One template with its tokenizer and the encoder under test."""

    def __init__(self, template: Template) -> None:
        self.template, self.family = template, template.family
        self.tokenizer = tokenizer_of(template)
        # The author of the template may count the header as generated.
        self.generation = "endgeneration" in template.text
        self.encoder = Encoder(copy.deepcopy(self.tokenizer), seq_length=4096, train_on="answer")

    def verdict(self, row: Row) -> Verdict:
        try:
            sample = to_sample(copy.deepcopy(row))
            ids, mask = self.encoder.answers(sample)
        except (UserError, ValueError) as error:
            return self._refusal(row, str(error))
        except Exception as error:
            return Verdict("WRONG", f"{type(error).__name__}: {error}")
        if len(ids) != len(mask):
            return Verdict("WRONG", f"{len(ids)} tokens and {len(mask)} flags")
        text, trained = spelled(self.tokenizer, ids, mask)
        if not any(text in (one, one + self.family.eos) for one in renderings(self.tokenizer, row)):
            return Verdict("WRONG", f"the tokens are no rendering of the chat: {text!r}")
        words = words_of(row)
        faults = [*self._lost(row, text, words), *self._flags(text, trained), *self._words(text, trained, words)]
        return Verdict("WRONG", "; ".join(dict.fromkeys(faults))) if faults else Verdict("ok")

    def _refusal(self, row: Row, error: str) -> Verdict:
        """Return whether a refusal was needed: no form of the record can be rendered with all of its words."""
        if "\n" in error or len(error) > 600:
            return Verdict("WRONG", f"the refusal is not one short line: {error!r}")
        words = words_of(row)
        every = words.said | words.given
        described = json.dumps(row.get("tools") or [])
        whole = any(
            every <= {*_WORD.findall(text.lower())}
            and all(text.count(name) > described.count(name) for name in words.names)
            for text in renderings(self.tokenizer, row)
        )
        return Verdict("REFUSED" if whole else "refused", error)

    def _lost(self, row: Row, text: str, words: Words) -> Iterator[str]:
        """Yield the words that the template left out without a report."""
        here = {*_WORD.findall(text.lower())}
        for word in sorted((words.said | words.given) - here):
            if word in words.reasons and self._later_turns_hide(row, word, words.reasons[word]):
                continue
            yield f"{word} is silently left out"

    def _later_turns_hide(self, row: Row, word: str, place: int) -> bool:
        """Return whether a word of reasoning is rendered where its message is the last: the template hides it by design."""
        cut = {**row, "messages": row["messages"][: place + 1]}
        return place + 1 < len(row["messages"]) and any(word in text for text in renderings(self.tokenizer, cut))

    def _flags(self, text: str, trained: list[bool]) -> Iterator[str]:
        """Yield what is trained outside of answers, and what is not trained within."""
        must, may = self._zones(text)
        for label, bad in (
            ("trained", [flag and not (a or b) for flag, a, b in zip(trained, must, may, strict=True)]),
            ("not trained", [a and not (flag or b) for flag, a, b in zip(trained, must, may, strict=True)]),
        ):
            for on, group in itertools.groupby(range(len(text)), lambda place: bad[place]):
                places = list(group)
                if on:
                    piece = text[places[0] : places[-1] + 1]
                    yield f"{label}: {piece if len(piece) < 80 else piece[:60] + '...' + piece[-15:]!r}"
        if self.family.no_end and must and must[-1] and not text.endswith(self.family.eos):
            yield "nothing ends the last answer"

    def _zones(self, text: str) -> tuple[list[bool], list[bool]]:
        """Return for every character whether it must carry loss, and whether it may or may not."""
        family = self.family
        must, may = [False] * len(text), [False] * len(text)
        where = 0
        last_end = -1
        header = re.compile(family.header)
        while match := header.search(text, where):
            end = re.compile(family.end, re.DOTALL).search(text, match.end())
            stop = end.end() if end else len(text)
            if self.generation or (family.chained and match.start() == last_end):
                may[match.start() : match.end()] = [True] * (match.end() - match.start())
            # A token of white space can reach from the header into the answer.
            blank = len(match[0]) - len(match[0].rstrip())
            may[match.end() - blank : match.end()] = [True] * blank
            must[match.end() : stop] = [True] * (stop - match.end())
            for pattern in (family.not_said,) if family.not_said else ():
                for inner in re.finditer(pattern, text[match.end() : stop], re.DOTALL):
                    a, b = match.end() + inner.start(), match.end() + inner.end()
                    must[a:b] = [False] * (b - a)
            for inner in re.finditer(family.optional, text[match.end() : stop]):
                a, b = match.end() + inner.start(), match.end() + inner.end()
                may[a:b] = [True] * (b - a)
            after = re.compile(r"\s*").match(text, stop)
            may[stop : after.end()] = [True] * (after.end() - stop)
            last_end = stop
            # The marker that ends an answer without an end of its own is a part of the next header.
            where = end.start() if family.no_end and end and end.start() > match.start() else stop
        if text.endswith(family.eos):
            may[-len(family.eos) :] = [True] * len(family.eos)
        return must, may

    def _words(self, text: str, trained: list[bool], words: Words) -> Iterator[str]:
        """Yield words that carry loss and must not, and words that must and do not."""
        for match in _WORD.finditer(text):
            flags = trained[match.start() : match.end()]
            if match[0] in words.given and any(flags):
                yield f"{match[0]} is trained"
            elif match[0] in words.said - words.names and not all(flags) and text.count(match[0]) == 1:
                yield f"{match[0]} is not trained"
        for word in words.names:
            places = [match.start() for match in re.finditer(re.escape(word), text)]
            if places and not any(all(trained[place : place + len(word)]) for place in places):
                yield f"{word} is not trained"


def main(names: list[str]) -> None:
    only_wrong = "--wrong" in names
    names = [name for name in names if not name.startswith("--")]
    totals: Counter[str] = Counter()
    for template in [*trl_templates(), *REDUCTIONS]:
        if names and template.name not in names:
            continue
        bed = Bed(template)
        for name, row in situations(template.family).items():
            verdict = bed.verdict(row)
            totals[verdict.kind] += 1
            if not only_wrong or verdict.kind in ("WRONG", "REFUSED"):
                print(f"{template.name:32} {name:24} {verdict}", flush=True)
    print(dict(totals))


if __name__ == "__main__":
    main(sys.argv[1:])
