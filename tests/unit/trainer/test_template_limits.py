"""A chat template that does not end, or takes much memory, is stopped, and the error is one line."""

import datetime
import os
import resource
import time
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from trainer.common.errors import UserError
from trainer.data import template_process
from trainer.data.encode import Encoder
from trainer.data.hf_template import TemplateError
from trainer.data.plain_template import PLAIN_TEMPLATE
from trainer.data.shapes import Sample
from trainer.data.template_process import LimitedTemplate, limited_template
from trainer.data.text_tokenizer import TextTokenizer
from trainer.models.greedy import prompt_rows

TODAY = datetime.datetime(2026, 1, 2)
CHAT = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]
NESTED = "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{% endfor %}{% endfor %}{% endfor %}"
ENDLESS = {
    "loops": NESTED,
    "constant power": "{{ 9 ** (9 ** 9) }}",
}
LARGE = {
    "doubling": "{% set n = namespace(x='xx') %}{% for a in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}{{ n.x }}",
    "lists": "{% set n = namespace(x=[0]) %}{% for a in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "constant": "{{ 'x' * 3000000000 }}",
    "format": "{{ '%02999999999d' % 1 }}",
    "center": "{{ 'x' | center(2000000000) }}",
    "output": "{{ messages[0].content * 200000000 }}",
}


def refusal(source: str) -> str:
    """Return why a template is refused."""
    begun, before = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(TemplateError) as caught:
        LimitedTemplate(source, {}, TODAY).render(CHAT)
    assert time.monotonic() - begun < 60
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300 * 1024
    assert str(caught.value).startswith("chat template: ") and str(caught.value).isprintable()
    return str(caught.value)


@pytest.mark.parametrize("name", ENDLESS)
def test_a_template_without_end(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_process, "SECONDS", 1)
    said = refusal(ENDLESS[name])
    assert "takes more than 1 s of processor time" in said


@pytest.mark.parametrize("name", LARGE)
def test_a_template_that_takes_much_memory(name: str) -> None:
    said = refusal(LARGE[name])
    assert any(part in said for part in ("MiB of memory", "million characters", "rejects a conversation"))


def test_prompts_of_evaluate_and_deploy_are_rendered_with_limits() -> None:
    words = Tokenizer(models.WordLevel({"Q": 0, "<s>": 1, "?": 2}, unk_token="?"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>")
    tokenizer.chat_template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
    assert prompt_rows(tokenizer, [CHAT[:1], CHAT[:1]]) == [[1, 0]] * 2
    tokenizer.chat_template = {"default": tokenizer.chat_template, "tool_use": ""}
    assert prompt_rows(tokenizer, [CHAT[:1]]) == [[1, 0]]
    tokenizer.chat_template = LARGE["doubling"].replace("60", "31")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(TemplateError, match=r"chat template: it takes more than 512 MiB of memory"):
        prompt_rows(tokenizer, [CHAT[:1]])
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300 * 1024


def test_the_limits_of_a_process_that_renders() -> None:
    """Those in force: the other tests wait for a shorter time, and for whichever limit comes first."""
    limited = LimitedTemplate("{{ messages[0].content }}", {}, TODAY)
    assert limited.render(CHAT) == "Q" and limited._process is not None
    pid = limited._process._process.pid
    used = sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]))
    seconds = used / os.sysconf("SC_CLK_TCK")
    assert seconds < resource.prlimit(pid, resource.RLIMIT_CPU)[0] <= seconds + 12
    assert resource.prlimit(pid, resource.RLIMIT_DATA) == (512 << 20, 512 << 20)


def test_a_limit_is_exceeded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time is not waited for again with each sample or form of a chat, and the record is named."""
    monkeypatch.setattr(template_process, "SECONDS", 1)
    tokenizer = TextTokenizer(lambda text: ([0], [(0, 1)]), str, NESTED, {}, None, None, frozenset(), "")
    encoder = Encoder(tokenizer, seq_length=8, train_on="all")
    sample = Sample(messages=tuple(CHAT), where="a.jsonl:1")
    begun = time.monotonic()
    for _ in range(20):
        with pytest.raises(UserError, match=r"a\.jsonl:1: the chat template of the model takes more than 1 s"):
            encoder.encode(sample)
    assert time.monotonic() - begun < 30


def test_it_renders_as_without_limits() -> None:
    source = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% generation %}é\ud800{{ t }}{% endgeneration %}{% endfor %}"
    limited = LimitedTemplate(source, {"bos_token": "<s>"}, TODAY)
    plain = limited_template(PLAIN_TEMPLATE, {}, TODAY)
    assert type(plain) is not LimitedTemplate
    found = limited.render_blocks(CHAT, variables={"t": 1})
    assert (found.text, found.blocks) == ("<s>Qé\ud8001Aé\ud8001", ((4, 7), (8, 11)))
    with pytest.raises(TemplateError, match="no roles"):
        LimitedTemplate("{{ raise_exception('no roles') }}", {}, TODAY).render(CHAT)
    with pytest.raises(TemplateError, match="chat template: "):
        LimitedTemplate("{% if %}", {}, TODAY)


def test_a_forked_process_has_its_own() -> None:
    limited = LimitedTemplate("{{ messages[0].content }}", {}, TODAY)
    if not (child := os.fork()):
        os._exit(limited.render(CHAT) != "Q")
    assert os.waitpid(child, 0)[1] == 0
    assert limited.render(CHAT) == "Q"
