"""What the command `data` prints of samples, and the check of all samples before a run starts."""

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from tables import table
from trainer_runs import chat, write_jsonl

from trainer.common.errors import UserError
from trainer.data import check
from trainer.data.check import check_samples
from trainer.data.encode import Encoder, encode_all
from trainer.data.samples import read_samples
from trainer.data.shapes import Sample
from trainer.data.show import View, check_shown, show
from trainer.spec import make_spec

ROWS = [
    {"messages": [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "a \u27e6dog\u27e7\nruns"}]},
    {"messages": [{"role": "user", "content": "the cat " * 40}, {"role": "assistant", "content": "lost"}]},
    {"messages": [{"role": "user", "content": "red"}, {"role": "assistant", "content": "blue " * 40}]},
    {"messages": [{"role": "user", "content": "\x1b[2J"}]},
]


@pytest.fixture
def samples(tmp_path: Path) -> list[Sample]:
    return read_samples(write_jsonl(tmp_path / "d.jsonl", ROWS))


@pytest.fixture
def encoder(tokenizer: Any) -> Encoder:
    return Encoder(tokenizer, seq_length=24, train_on="answer")


def test_trained_text_has_brackets(samples: list[Sample], encoder: Encoder, capsys: pytest.CaptureFixture[str]) -> None:
    show(samples, encoder, View.of(None, as_json=False))
    out, err = capsys.readouterr()
    assert not err
    where = samples[0].where
    first, second, third, rest = out.split("\n\n")
    assert first.splitlines()[0].startswith(f"{where}: ") and where.endswith("d.jsonl:1")
    # Brackets of the text are escaped: they are no marks.
    assert "<|user|>the cat<|assistant|>\u27e6a \\u27e6dog\\u27e7\nruns<|end|>\u27e7" in first
    assert "; truncated: " in second and "; dropped: with all answers beyond seq_length" in second
    assert "\u27e6" not in second
    assert "; truncated: " in third and "; dropped" not in third and third.count("\u27e6") == third.count("\u27e7") == 1
    hidden, totals, warning, lost = rest.splitlines()
    assert hidden.startswith(f"{samples[3].where}: ") and hidden.endswith("; dropped: without an answer with loss")
    assert totals.startswith("4 samples: 2 answers and ") and "2 truncated, 2 dropped (1 " in totals
    assert warning.startswith("WARNING: 2 of 4 samples of the dataset are not trained")
    assert lost.startswith("WARNING: 117 of 158 tokens (74%) are lost")


def test_a_terminal_executes_nothing(samples: list[Sample], encoder: Encoder, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    for name, begin in (("", "\x1b[30;42m"), ("NO_COLOR", "\u27e6")):
        terminal = Terminal()
        monkeypatch.setattr(sys, "stdout", terminal)
        if name:
            monkeypatch.setenv(name, "1")
        show(samples, encoder, View(4))
        shown = terminal.getvalue()
        assert f"<|assistant|>{begin}a " in shown and "\\x1b[2J" in shown and "\x1b[2J" not in shown


def test_json_has_the_tokens_of_the_corpus(
    samples: list[Sample], encoder: Encoder, capsys: pytest.CaptureFixture[str]
) -> None:
    report = show(samples, encoder, View.of("", as_json=True))
    out, err = capsys.readouterr()
    records = [json.loads(line) for line in out.splitlines()]
    assert [record["source"] for record in records] == [sample.where for sample in samples]
    assert err.splitlines() == report.lines()
    kept = [record for record in records if not record["dropped"]]
    corpus = encode_all(samples, encoder)
    assert corpus.report == report
    assert [token for record in kept for token in record["ids"]] == corpus.tokens.tolist()
    assert [flag for record in kept for flag in record["trained"]] == corpus.trained.astype(int).tolist()
    assert records[0]["text"] == "<|begin|><|user|>the cat<|assistant|>a \u27e6dog\u27e7\nruns<|end|>"
    assert records[2]["truncated"] > 0 and len(records[2]["ids"]) == 24 and records[0]["truncated"] == 0
    show(samples, encoder, View.of(1, as_json=True))
    assert len(capsys.readouterr().out.splitlines()) == 1


def test_arguments_that_cannot_be_shown() -> None:
    for text in ("-1", "x", "1.5", "9" * 30):
        with pytest.raises(UserError, match="--samples: expected a number of samples, got"):
            View.of(text, as_json=False)
    with pytest.raises(UserError, match="a run with fake_data reads no samples"):
        check_shown(make_spec({"fake_data": True, "model": "/m"}, "here"))


def test_all_samples_are_counted_in_time_and_a_part_is_not(encoder: Encoder, monkeypatch: pytest.MonkeyPatch) -> None:
    many = [chat("the cat", "a dog", *(["red", "blue"] * (n % 3))) for n in range(40)]
    whole = check_samples(many, encoder)
    assert whole == encode_all(many, encoder).report
    monkeypatch.setattr(check, "_PROBED", 4)
    part = check_samples(many, encoder, budget=0)
    assert (part.samples, part.unread) == (4, 36) and part.line().endswith("; 36 further samples were not counted")


@pytest.mark.parametrize("odd", table("show")["the_one_sample_of_another_structure_is_checked_even"], ids=str)
def test_the_one_sample_of_another_structure_is_checked_even_without_time(
    odd: dict[str, str], encoder: Encoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    many = [chat("the cat", "a dog", *(["red", "blue"] * (n % 5))) for n in range(300)]
    strange = Sample(messages=(odd, *many[0].messages), where="d.jsonl:151")
    seen, encode = [], encoder.encode

    def encode_and_note(sample: Sample) -> Any:
        seen.append(sample.where)
        return encode(sample)

    monkeypatch.setattr(check, "_PROBED", 8)
    monkeypatch.setattr(encoder, "encode", encode_and_note)
    check_samples([*many[:150], strange, *many[150:]], encoder, budget=0)
    assert len(seen) == 8 and strange.where in seen
