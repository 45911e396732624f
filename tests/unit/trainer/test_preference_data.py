"""Records of preferences: the formats of TRL and of ShareGPT pairs, what carries loss, what is dropped, and what the command `data` shows."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tables import table
from trainer_runs import write_jsonl

from trainer.common.errors import UserError
from trainer.config.dataset_source import columns_error
from trainer.data.corpus import joined, load_corpus, preferred, save_corpus, select
from trainer.data.encode import Encoder, encode_all
from trainer.data.preferences import to_labelled, to_pair
from trainer.data.samples import check_source, read_source, source_of
from trainer.data.shapes import Sample, to_sample
from trainer.data.show import View, show

USER, GOOD = {"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}
BAD = {"role": "assistant", "content": "B"}
CHAT_PAIR = ((USER, GOOD), (USER, BAD))
SHARE = {"conversations": [{"from": "human", "value": "Q"}]}
PAIRS: list[dict[str, Any]] = table("preference_data")["pairs"]


@pytest.mark.parametrize("record", PAIRS, ids=[str(index) for index in range(len(PAIRS))])
def test_every_format_of_a_pair_of_chats(record: dict[str, Any]) -> None:
    sample = to_pair(record)
    assert sample.rejected and (sample.messages, sample.rejected.messages) == CHAT_PAIR
    assert not sample.silent and not sample.rejected.silent


def test_only_the_answers_carry_loss() -> None:
    early = {"role": "assistant", "content": "E"}
    for prompt in ({"prompt": [USER, early, USER]}, {}):
        chosen, rejected = [GOOD], [BAD]
        if not prompt:
            chosen, rejected = [USER, early, USER, GOOD], [USER, early, USER, BAD]
        sample = to_pair({**prompt, "chosen": chosen, "rejected": rejected, "system": "S"})
        assert sample.rejected and sample.messages[0]["content"] == sample.rejected.messages[0]["content"] == "S"
        assert sample.silent == sample.rejected.silent == {2}


@pytest.mark.parametrize(
    ("chosen", "rejected"),
    [("The sky is blue.", "The sky is green."), ("The grass", "The gravel"), ("a bc", "a bcd"), ("ab", "ac")],
)
def test_an_implicit_prompt_of_texts_is_that_of_trl(chosen: str, rejected: str) -> None:
    from trl.data_utils import extract_prompt

    theirs = extract_prompt({"chosen": chosen, "rejected": rejected})
    sample = to_pair({"chosen": chosen, "rejected": rejected})
    assert sample.rejected
    assert sample.pieces == ((theirs["prompt"], False), (theirs["chosen"], True))
    assert sample.rejected.pieces == ((theirs["prompt"], False), (theirs["rejected"], True))


def test_an_implicit_prompt_of_chats_is_that_of_trl() -> None:
    from trl.data_utils import extract_prompt

    more = {"role": "user", "content": "Q2"}
    record = {"chosen": [USER, GOOD, more, GOOD], "rejected": [USER, GOOD, more, BAD]}
    theirs, sample = extract_prompt(record), to_pair(record)
    assert list(sample.messages) == theirs["prompt"] + theirs["chosen"]
    assert sample.silent == {1}


@pytest.mark.parametrize(("record", "said"), table("preference_data")["no_pairs"], ids=lambda value: str(value)[:40])
def test_a_record_that_is_no_pair_is_refused(record: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said) as error:
        to_pair(record)
    assert "\n" not in str(error.value)


def test_columns_and_ignored_keys_of_a_pair() -> None:
    row = {"question": "Q", "good": "A", "poor": "B", "prompt": "other", "margin": 2}
    columns = {"prompt": "question", "chosen": "good", "rejected": "poor"}
    assert not columns_error(columns) and not columns_error({"completion": "x", "label": "y"})
    sample = to_pair(row, columns, ["margin"])
    assert sample.pieces == (("Q", False), ("A", True))
    assert columns_error({"chosen": "a", "completion": "b"})
    with pytest.raises(ValueError, match="columns maps completion, which a pair does not have"):
        to_pair(row | {"answer": "C"}, {"completion": "answer"}, ["margin"])
    with pytest.raises(ValueError, match="columns maps chosen and prompt of preferences: set method"):
        to_sample({"a": "x", "b": "y"}, {"chosen": "a", "prompt": "b"})
    kept = to_pair({"prompt": "X", "chosen": [USER, GOOD], "rejected": [USER, BAD]}, ignored=["prompt"])
    assert kept.messages == CHAT_PAIR[0]


@pytest.mark.parametrize("label", [True, 1, "true", "1", False, 0, "False", 0.0])
@pytest.mark.parametrize("key", ["label", "kto_tag"])
def test_labels(label: Any, key: str) -> None:
    wanted = str(label).lower() in ("true", "1")
    assert to_labelled({"prompt": "Q", "completion": "A", key: label}).desirable is wanted
    sample = to_labelled({"messages": [USER, GOOD, USER, BAD], key: label})
    assert sample.desirable is wanted and sample.silent == {1}
    assert to_labelled({"prompt": "Q", "completion": "A", "thumb": label}, {"label": "thumb"}).desirable is wanted


@pytest.mark.parametrize(("record", "said"), table("preference_data")["a_record_without_a_label_is_refused"])
def test_a_record_without_a_label_is_refused(record: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        to_labelled(record)


def encode(rows: list[dict[str, Any]], tokenizer: Any, length: int = 64) -> Any:
    encoder = Encoder(tokenizer, seq_length=length, train_on="answer", data="pairs")
    return encode_all([to_pair(row) for row in rows], encoder)


def test_both_sequences_are_encoded_as_wholes(tokenizer: Any) -> None:
    """A token across the end of the prompt belongs to the answer, in each sequence its own: no prefix is cut out."""
    corpus = encode([{"prompt": "the su", "chosen": "n runs", "rejected": "per cat"}], tokenizer)
    texts, answers = [], []
    for span in corpus.sequences(0):
        tokens, trained = corpus.tokens[span], corpus.trained[span]
        texts.append(tokenizer.decode(tokens, skip_special_tokens=True))
        answers.append(tokenizer.decode(tokens[trained], skip_special_tokens=True).strip())
    assert texts == ["the sun runs", "the super cat"]
    assert answers[0].endswith("n runs") and answers[1].endswith("per cat")
    assert corpus.trained[corpus.sequences(0)[1]][-1], "EOS carries loss"


def test_a_pair_is_dropped_as_a_whole(tokenizer: Any) -> None:
    rows = table("preference_data")["rows"]
    corpus = encode(rows, tokenizer, 24)
    assert len(corpus) == 1
    assert dict(corpus.report.dropped) == {
        "with all answers beyond seq_length": 1,
        "with a chosen answer that equals the rejected one within seq_length": 1,
    }
    assert corpus.report.truncated == 2 and corpus.report.samples == 3


def test_pairs_and_labels_are_kept_joined_and_selected(tokenizer: Any, tmp_path: Path) -> None:
    one = encode([{"prompt": "a ", "chosen": "cat", "rejected": f"dog {index}"} for index in range(3)], tokenizer)
    save_corpus(one, tmp_path / "c.npz")
    again = load_corpus(tmp_path / "c.npz")
    assert again and again.digest() == one.digest()
    both = joined([one, again])
    part = select(both, [4, 0])
    assert part.splits is not None and one.splits is not None
    assert part.splits.tolist() == [one.splits[1], one.splits[0]]
    for place, sample in enumerate((1, 0)):
        for mine, other in zip(part.sequences(place), one.sequences(sample), strict=True):
            assert (part.tokens[mine] == one.tokens[other]).all()
    other_split = np.array([2, 2, 2])
    assert one.digest() != type(one)(one.tokens, one.trained, one.starts, splits=other_split).digest()


def test_a_merge_evaluates_the_preferred_answers(tokenizer: Any) -> None:
    rows = [{"prompt": "a ", "chosen": f"cat {index}", "rejected": "dog runs"} for index in range(3)]
    pairs = encode(rows, tokenizer)
    chosen = preferred(pairs)
    assert [tokenizer.decode(chosen.tokens[s:e], skip_special_tokens=True) for s, e in zip(chosen.starts, chosen.starts[1:], strict=False)] == [
        "a cat 0", "a cat 1", "a cat 2"
    ]  # fmt: skip
    assert chosen.splits is None
    assert chosen.trained.sum() == sum(pairs.trained[pairs.sequences(i)[0]].sum() for i in range(3))
    encoder = Encoder(tokenizer, seq_length=64, train_on="answer", data="labels")
    made = [to_labelled({"prompt": "a ", "completion": word, "label": word == "cat"}) for word in ("dog", "cat")]
    good = preferred(encode_all(made, encoder))
    assert len(good) == 1 and tokenizer.decode(good.tokens, skip_special_tokens=True) == "a cat"
    assert preferred(good) is good


def test_the_cache_of_answers_is_not_that_of_labels(tokenizer: Any) -> None:
    encoders = [Encoder(tokenizer, seq_length=9, train_on="answer", data=data) for data in ("answers", "labels")]
    assert len({each.fingerprint() for each in encoders}) == 2


def test_the_command_data_shows_pairs_and_labels(tokenizer: Any, capsys: pytest.CaptureFixture[str]) -> None:
    encoder = Encoder(tokenizer, seq_length=64, train_on="answer")
    sample = to_pair({"prompt": "the ", "chosen": "cat", "rejected": "dog runs"}).at("d.jsonl:1")
    show([sample], encoder, View())
    out = capsys.readouterr().out
    assert out.startswith("d.jsonl:1: chosen: ") and "; rejected: " in out
    chosen, rejected = out.partition("chosen:\n")[2].split("rejected:\n")
    assert "the" in chosen and "cat" in chosen.partition("\u27e6")[2] and "dog runs" in rejected.partition("\u27e6")[2]
    assert "1 sample: 2 answers and " in out
    show([sample], encoder, View(as_json=True))
    record = json.loads(capsys.readouterr().out)
    assert record["rejected"]["text"].startswith("the dog") and record["rejected"]["source"] == "d.jsonl:1"
    labelled = to_labelled({"prompt": "the ", "completion": "cat", "label": False})
    show([labelled], encoder, View())
    assert "bad answer: " in capsys.readouterr().out
    show([labelled], encoder, View(as_json=True))
    assert json.loads(capsys.readouterr().out)["label"] is False


def test_errors_name_the_line(tmp_path: Path) -> None:
    good = {"prompt": "a", "chosen": "b", "rejected": "c"}
    path = write_jsonl(tmp_path / "d.jsonl", [good, {"prompt": "a", "chosen": "b"}])
    with pytest.raises(UserError, match=r"d\.jsonl:2: has the keys prompt, chosen; .* as the records before it have"):
        read_source(source_of(path), data="pairs")
    found = check_source(source_of(write_jsonl(tmp_path / "e.jsonl", [good])), data="pairs")
    assert found and isinstance(found[0], Sample) and found[0].rejected and found[0].rejected.where == found[0].where


def test_hostile_records_are_one_line(tmp_path: Path) -> None:
    """Random values under the keys of preferences are refused as ValueError, or read."""
    draw = random.Random(7)
    keys = ["prompt", "chosen", "rejected", "messages", "conversations", "instruction", "label", "completion", "system"]
    keys += ["role", "content", "from", "value", "tools", "history", "input"]

    def value(depth: int) -> Any:
        kind = draw.randrange(8 if depth else 5)
        plain = [
            None,
            "A",
            draw.choice([USER, GOOD, BAD]),
            draw.choice([0, True, 1.5, "", "[{", "\ud800"]),
            [USER, GOOD],
        ]
        if kind < 5:
            return plain[kind]
        if kind == 5:
            return [value(depth - 1) for _ in range(draw.randrange(3))]
        return {draw.choice(keys): value(depth - 1) for _ in range(draw.randrange(4))}

    read = 0
    for _ in range(2000):
        valid = draw.choice([*PAIRS, {"prompt": "Q", "completion": "A", "label": True}, {}])
        row = valid | {draw.choice(keys): value(2) for _ in range(draw.randrange(1, 4))}
        for reader in (to_pair, to_labelled):
            try:
                sample = reader(row)
            except ValueError as error:
                assert "\n" not in str(error)
            else:
                read += 1
                assert bool(sample.rejected) == (reader is to_pair)
    assert read > 20
