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
from trainer.data.dataset_files import is_hub_dataset, is_hub_id
from trainer.data.samples import Sample, read_samples
from trainer.data.shapes import to_sample
from trainer.spec import make_spec

USER, ASSISTANT = {"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}


@pytest.mark.parametrize(
    ("row", "sample"),
    [
        ({"instruction": "Q", "output": "A"}, Sample(messages=(USER, ASSISTANT))),
        ({"instruction": "Q", "input": "", "output": "A"}, Sample(messages=(USER, ASSISTANT))),
        (
            {"instruction": "Q", "input": "more", "output": "A"},
            Sample(messages=({"role": "user", "content": "Q\n\nmore"}, ASSISTANT)),
        ),
        ({"messages": [USER, ASSISTANT], "id": 7}, Sample(messages=(USER, ASSISTANT))),
        ({"messages": [{**USER, "name": "x"}, ASSISTANT]}, Sample(messages=({**USER, "name": "x"}, ASSISTANT))),
        ({"prompt": "Q", "completion": "A"}, Sample(pieces=(("Q", False), ("A", True)))),
        ({"prompt": [USER], "completion": [ASSISTANT]}, Sample(messages=(USER, ASSISTANT))),
        ({"text": "ünï 猫 🚂"}, Sample(pieces=(("ünï 猫 🚂", True),))),
    ],
)
def test_every_form(row: dict[str, Any], sample: Sample, tmp_path: Path) -> None:
    assert to_sample(row) == sample
    assert read_samples(write_jsonl(tmp_path / "d.jsonl", [row])) == [sample]


@pytest.mark.parametrize(("row", "messages"), table("chat_forms"))
def test_every_form_of_a_chat(row: dict[str, Any], messages: list[Any]) -> None:
    assert to_sample(row).messages == tuple(messages)


def test_columns_map_the_names_of_a_shape() -> None:
    row = {"text": "no", "q": "Q", "a": "A", "ctx": "C"}
    assert to_sample(row, {"prompt": "q", "completion": "a"}) == Sample(pieces=(("Q", False), ("A", True)))
    assert to_sample(row | {"output": "A"}, {"instruction": "q", "input": "ctx"}).messages[0]["content"] == "Q\n\nC"
    with pytest.raises(
        ValueError, match=r"has no column 'zzz' .columns maps prompt to it.; has the keys text, q, a, ctx"
    ):
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
        with pytest.raises(UserError) as caught:
            read_samples(file)
        assert why in str(caught.value)
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
        (suggested,) = re.findall("use columns=(.*)", str(caught.value))
        assert {*suggested.split(",")} == {*columns.split(",")}
        assert to_sample(row, make_spec({"columns": columns}, "").columns) != Sample()


@pytest.mark.parametrize("name", ["notes.txt", "README.md", "notes.txt.gz"])
def test_plain_text_is_refused_with_the_way_to_use_it(name: str, tmp_path: Path) -> None:
    path, text = tmp_path / name, b"A note.\nAnother one.\n"
    path.write_bytes(gzip.compress(text) if name.endswith(".gz") else text)
    with pytest.raises(
        UserError, match=r":1: not JSON: .*; to train on plain text, write a \.jsonl file .* \{\"text\": "
    ):
        read_samples(path)
    path.write_text('{"text": "a"}\n') if not name.endswith(".gz") else path.write_bytes(
        gzip.compress(b'{"text": "a"}')
    )
    assert len(read_samples(path)) == 1, "JSON lines are read under any name"
