"""Reading datasets: every supported form of a record, and ``file:line`` errors for anything else."""

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tables import table
from trainer_runs import TOP, write_jsonl

from trainer.common.errors import UserError
from trainer.data.data_report import BEYOND, DataReport, Dropped
from trainer.data.dataset_files import is_hub_dataset, is_hub_id
from trainer.data.samples import Sample, read_samples
from trainer.data.shapes import to_sample
from trainer.spec import make_spec

USER, ASSISTANT = {"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}


@pytest.mark.parametrize(("row", "form"), table("data")["forms"])
def test_every_form(row: dict[str, Any], form: dict[str, Any], tmp_path: Path) -> None:
    sample = Sample(tuple(form.get("messages", ())), pieces=tuple(map(tuple, form.get("pieces", ()))))
    assert to_sample(row) == sample
    assert read_samples(write_jsonl(tmp_path / "d.jsonl", [row])) == [sample]


@pytest.mark.parametrize(("row", "messages"), table("chat_forms"))
def test_every_form_of_a_chat(row: dict[str, Any], messages: list[Any]) -> None:
    assert to_sample(row).messages == tuple(messages)


def test_columns_map_the_names_of_a_shape() -> None:
    row = {"text": "no", "q": "Q", "a": "A", "ctx": "C"}
    assert to_sample(row, {"prompt": "q", "completion": "a"}) == Sample(pieces=(("Q", False), ("A", True)))
    assert to_sample(row | {"output": "A"}, {"instruction": "q", "input": "ctx"}).messages[0]["content"] == "Q\n\nC"
    with pytest.raises(ValueError, match=r"has no column 'zzz' .columns maps prompt to it.; has the keys text, q"):
        to_sample(row, {"prompt": "zzz"})
    with pytest.raises(ValueError, match="has the keys text, q, a, ctx; columns must also map completion"):
        to_sample(row, {"prompt": "q"})
    tools = to_sample({"messages": [USER, ASSISTANT], "functions": '[{"name": "f"}]'}, {"tools": "functions"}).tools
    assert tools == ({"name": "f"},)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        *((line.encode(), why) for line, why in table("invalid_lines")),
        (b'{"text": "\xff"}', "not JSON: not UTF-8 text"),
        (b"[" * 200_000, "not JSON: nested too deeply"),
        (b'{"text": ' + b"9" * 5000 + b"}", "not JSON: Exceeds the limit"),
    ],
)
def test_an_invalid_line_is_reported_by_number(line: bytes, why: str, tmp_path: Path) -> None:
    file = tmp_path / "d.jsonl"
    file.write_bytes(b'{"text": "good"}\n\n' + line + b'\n{"text": "good"}\n')
    with pytest.raises(UserError) as caught:
        read_samples(file)
    assert str(caught.value).startswith(f"{file}:3: ")
    assert why in str(caught.value)
    assert str(caught.value).isprintable()


def test_a_json_list(tmp_path: Path) -> None:
    file = tmp_path / "d.json"
    file.write_text('[{"text": "a"},\n {"text": "b"}]')
    assert len(read_samples(file)) == 2
    for text, why in (
        ('[{"text": "a"},\n {"text"}]', f"{file}:2: not JSON"),
        ('{"text": "a"}', f"{file}: contains a dict, expected a list of samples"),
        ('[{"text": "a"}, {"txt": "b"}]', f"{file}:2: has the keys txt; expected"),
        ('[{"prompt": "a", "completion": "b"}, {"prompt": "c"}]', "correct this record, or remove it"),
        ('[{"prompt": "c"}]', "prompt and completion; text; it lacks completion"),
        ("[" * 200_000, f"{file}:1: not JSON: nested too deeply"),
        ("[]", "is empty"),
    ):
        file.write_text(text)
        with pytest.raises(UserError, match=re.escape(why)):
            read_samples(file)
    file.write_bytes(b'[{"text": "\xff"}]')
    with pytest.raises(UserError, match="not UTF-8 text"):
        read_samples(file)


@pytest.mark.parametrize("data", [b"", b"\n \n"])
def test_an_empty_file(data: bytes, tmp_path: Path) -> None:
    file = tmp_path / "d.jsonl"
    file.write_bytes(data)
    with pytest.raises(UserError, match=r"d\.jsonl is empty: expected one JSON object per line"):
        read_samples(file)


def test_a_missing_file_and_a_folder(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"dataset: no such file: .*none\.jsonl: set a JSONL file"):
        read_samples(tmp_path / "none.jsonl")
    with pytest.raises(UserError, match="has no file of JSONL, JSON, CSV, TSV, Parquet or Arrow"):
        read_samples(tmp_path)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters()),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(
                ["messages", "instruction", "input", "output", "prompt", "completion", "text", "role", "content"]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@given(json_values)
def test_any_json_is_a_sample_or_a_one_line_error(value: Any) -> None:
    try:
        sample = to_sample(json.loads(json.dumps(value)))
    except ValueError as error:
        assert "\n" not in str(error).replace(repr(value), "")
    else:
        assert bool(sample.messages) != bool(sample.pieces)


@pytest.mark.parametrize(
    ("name", "hub"),
    [("org/name-1.5_x", True), ("name", False), ("a/b/c", False), ("./rel", False), ("data/train.jsonl", False)],
)
def test_hub_ids(name: str, hub: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert is_hub_id(name) is hub
    assert is_hub_dataset(name) is (hub or name == "name")
    if hub:
        (tmp_path / name).mkdir(parents=True)
        assert not is_hub_id(name) and not is_hub_dataset(name), "an existing path takes precedence"
    assert not is_hub_dataset("ansible-docs") and not is_hub_dataset("observatory")


def test_the_examples_of_the_documentation() -> None:
    """Every record on the page is read, and every column mapping of its table is what the error message suggests."""
    page = (TOP / "docs" / "datasets.md").read_text()
    blocks = re.findall(r"```json\n(.*?)```", page, re.S)
    assert len(blocks) == 6 and all(len(block.splitlines()) in (2, 3) for block in blocks)
    for line in "".join(blocks).splitlines():
        assert to_sample(json.loads(line)) != Sample()
    rows = re.findall(r"^\| `(\{.*?\})` \| `columns=(.*?)` \|$", page, re.M)
    assert len(rows) == 5
    for text, columns in rows:
        row = json.loads(text.replace("[...]", '[{"role": "user", "content": "Q"}]'))
        with pytest.raises(ValueError) as caught:
            to_sample(row)
        (suggested,) = re.findall("use columns=(.*?)(?:, or columns=.*)?$", str(caught.value))
        assert {*suggested.split(",")} == {*columns.split(",")}
        assert to_sample(row, make_spec({"columns": columns}, "").columns) != Sample()


@pytest.mark.parametrize("name", ["notes.txt", "README.md", "notes.txt.gz"])
def test_plain_text_is_refused_with_the_way_to_use_it(name: str, tmp_path: Path) -> None:
    path, text = tmp_path / name, b"A note.\nAnother one.\n"
    path.write_bytes(gzip.compress(text) if name.endswith(".gz") else text)
    with pytest.raises(UserError, match=r":1: not JSON: .*; to train on plain text, write a \.jsonl .* \{\"text\": "):
        read_samples(path)
    path.write_bytes(gzip.compress(b'{"text": "a"}') if name.endswith(".gz") else b'{"text": "a"}\n')
    assert len(read_samples(path)) == 1, "JSON lines are read under any name"


# What a dataset may lose ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kept", "lost", "loud", "stops"),
    [(10, 0, False, False), (9, 1, False, False), (8, 1, True, False), (1, 1, True, False), (1, 2, True, True), (0, 1, True, True)],
)  # fmt: skip
def test_a_tenth_is_loud_and_a_half_stops(kept: int, lost: int, loud: bool, stops: bool) -> None:
    dropped = Dropped("samples", kept, {"too long": lost}, "increase seq_length")
    line = f"{lost} of {kept + lost} samples are not trained ({lost} too long)"
    assert dropped.warning() == (f"WARNING: {line}: increase seq_length" if loud else "")
    for allowed in (False, True):
        if not stops or (allowed and kept):
            dropped.check(allowed)
            continue
        with pytest.raises(UserError, match="more than half: increase seq_length") as error:
            dropped.check(allowed)
        assert line in str(error.value)
        assert ("or set keep_going=dropped" in str(error.value)) == bool(kept)


def test_the_most_frequent_reason_comes_first() -> None:
    assert Dropped("answers", 1, {"empty": 1, "cut off": 3, "other": 0}).by_reason == "3 cut off, 1 empty"


def test_reports_are_added_and_kept() -> None:
    one = DataReport(10, 12, 100, 1, {"too long": 4}, {"changed": 1})
    both = one + DataReport(10, 3, 20, 0, {"no answer": 1, "too long": 1}, unread=5)
    assert DataReport.of(both.as_dict() | {"later": 1}) == both
    assert both.lines() == table("data_report")["reports_are_added"]
    assert DataReport(1, 1, 1).lines() == ["1 sample: 1 answer and 1 token with loss, 0 truncated, 0 dropped"]
    warning = DataReport(4, dropped={BEYOND: 2}).loss.warning()
    assert "(2 with all answers beyond seq_length): increase seq_length" in warning


def test_lost_tokens_are_loud_from_one_in_a_hundred() -> None:
    """All answers of a dataset can lose their end while every sample is trained."""
    assert not any("WARNING" in line for line in DataReport(9, 9, 9, 9, kept_tokens=990, lost_tokens=10).lines())
    [line] = [line for line in DataReport(9, 9, 9, 9, kept_tokens=900, lost_tokens=100).lines() if "WARNING" in line]
    assert line.startswith("WARNING: 100 of 1,000 tokens (10%) are lost")


# Keys of records and messages ----------------------------------------------------------------------------------------

CHAT = {"messages": [USER, ASSISTANT]}
PAIR = {"prompt": "Q", "completion": "A"}
SHARE = {"conversations": [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "A"}]}


@pytest.mark.parametrize(
    ("record", "key"), [*table("data")["keys_with_a_meaning"], ({"text": "T", "image": {"bytes": b"x"}}, "image")]
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
