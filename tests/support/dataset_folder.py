"""A folder of realistic datasets in all formats and shapes, with the expected result or error of each."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

USER, ANSWER = {"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}
GPT = [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "A"}]
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": [2]}}}
TOOL = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}
CALLS = [USER, {"role": "assistant", "tool_calls": [CALL]}, {"role": "tool", "name": "add", "content": "3"}, ANSWER]
ALPACA = {"instruction": "Q", "input": "", "output": "A"}
NEAREST_QA = "use columns=prompt=question,completion=answer"


@dataclass(frozen=True)
class Case:
    """One dataset.

    Attributes:
        name: name of the file or folder.
        write: writes it to a path.
        expect: the number of samples, or a part of the error message.
        columns: the mapping that reads a dataset which is refused without it; `expect` is then the message without it.
        samples: the number of samples with `columns`.
        needs_library: the controller cannot check it without `datasets`.
    """

    name: str
    write: Callable[[Path], Any]
    expect: int | str
    columns: dict[str, str] = field(default_factory=dict)
    samples: int = 0
    needs_library: bool = False


def _bytes(data: bytes) -> Callable[[Path], Any]:
    return lambda path: path.write_bytes(data)


def _lines(*rows: Any) -> bytes:
    return b"".join(json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in rows)


def _jsonl(*rows: Any) -> Callable[[Path], Any]:
    return _bytes(_lines(*rows))


def _csv(*rows: list[Any], delimiter: str = ",", bom: bool = False) -> Callable[[Path], Any]:
    text = io.StringIO()
    csv.writer(text, delimiter=delimiter).writerows(rows)
    return _bytes((b"\xef\xbb\xbf" if bom else b"") + text.getvalue().encode())


def _parquet(**columns: list[Any]) -> Callable[[Path], Any]:
    def write(path: Path) -> None:
        import pyarrow
        from pyarrow import parquet

        parquet.write_table(pyarrow.table(columns), path)

    return write


def _arrow(**columns: list[Any]) -> Callable[[Path], Any]:
    def write(path: Path) -> None:
        import pyarrow

        table = pyarrow.table(columns)
        with pyarrow.OSFile(str(path), "wb") as file, pyarrow.ipc.new_stream(file, table.schema) as writer:
            writer.write_table(table)

    return write


def _zst(data: bytes) -> Callable[[Path], Any]:
    def write(path: Path) -> None:
        import pyarrow

        with pyarrow.output_stream(str(path), compression="zstd") as file:
            file.write(data)

    return write


def _zst_cut(path: Path) -> None:
    _zst(_lines({"text": "a" * 999}))(path)
    path.write_bytes(path.read_bytes()[:-9])


def _saved(splits: bool) -> Callable[[Path], Any]:
    def write(path: Path) -> None:
        import datasets

        datasets.disable_progress_bars()
        rows = datasets.Dataset.from_dict({"messages": [[USER, ANSWER]] * 3, "id": [1, 2, 3]})
        (datasets.DatasetDict({"train": rows, "test": rows.select([0])}) if splits else rows).save_to_disk(str(path))

    return write


def _folder(**files: Callable[[Path], Any]) -> Callable[[Path], Any]:
    """A folder; in the names of its files, ``__`` represents a dot and ``___`` for a slash."""

    def write(path: Path) -> None:
        for name, write_file in files.items():
            file = path / name.replace("___", "/").replace("__", ".")
            file.parent.mkdir(parents=True, exist_ok=True)
            write_file(file)

    return write


CARD = b"""---
configs:
- config_name: default
  data_files:
  - {split: train, path: data/a*.parquet}
  - {split: test, path: data/b*.parquet}
---
# A dataset
"""
CASES = [
    # JSONL: shapes
    Case("messages.jsonl", _jsonl({"messages": [USER, ANSWER]}), 1),
    Case("sharegpt.jsonl", _jsonl({"conversations": GPT, "id": "x"}, {"conversations": GPT, "system": "S"}), 2),
    Case("parts.jsonl", _jsonl({"messages": [{**USER, "content": [{"type": "text", "text": "Q"}]}, ANSWER]}), 1),
    Case("tools.jsonl", _jsonl({"messages": CALLS, "tools": [TOOL]}, {"messages": CALLS, "tools": "[]"}), 2),
    Case("alpaca.jsonl", _jsonl(ALPACA, ALPACA), 2),
    Case("completion.jsonl", _jsonl({"prompt": "Q", "completion": "A"}, {"prompt": [USER], "completion": [ANSWER]}), 2),
    Case("text.ndjson", _jsonl({"text": "T"}), 1),
    Case("date.jsonl", _jsonl({"text": "2024-01-31"}), 1),
    Case("mixed.jsonl", _jsonl({"text": "T"}, ALPACA, {"messages": [USER, ANSWER]}), 3),
    Case("calls.jsonl", _jsonl({"conversations": [GPT[0], {"from": "function_call", "value": '{"name": "f"}'}]}), 1),
    # JSONL: to map
    Case("qa.jsonl", _jsonl({"question": "Q", "answer": "A"}), NEAREST_QA, {"prompt": "question", "completion": "answer"}, 1),
    Case("dolly.jsonl", _jsonl({"instruction": "Q", "context": "C", "response": "A"}),
         "nearest: instruction and output: use columns=output=response,input=context", {"output": "response"}, 1),
    Case("dialog.jsonl", _jsonl({"dialog": GPT}), "use columns=messages=dialog", {"messages": "dialog"}, 1),
    Case("speakers.jsonl", _jsonl({"messages": [{"speaker": "user", "text": "Q"}, {"speaker": "assistant", "text": "A"}]}),
         "message 0 of 'messages' must have role and content; it has the keys speaker, text: use columns=role=speaker,content=text",
         {"role": "speaker", "content": "text"}, 1),
    Case("foreign.jsonl", _jsonl({"spam": "Q", "eggs": "A"}), "has the keys spam, eggs; expected messages",
         {"prompt": "spam", "completion": "eggs"}, 1),
    # JSONL: refused
    Case("unknown-from.jsonl", _jsonl({"conversations": GPT}, {"conversations": [{"from": "alien", "value": "Q"}]}),
         ".jsonl:2: message 0 of 'conversations' has from 'alien', expected one of human, gpt, system, tool"),
    Case("image.jsonl", _jsonl({"messages": [{**USER, "content": [{"type": "image_url", "image_url": {}}]}]}),
         "message 0 of 'messages' has a part of type 'image_url': only text can be trained"),
    Case("lists.jsonl", _jsonl([USER, ANSWER]), 'is a list, expected an object with messages; conversations'),
    Case("number.jsonl", _jsonl({"text": "T"}, {"text": 7}), "number.jsonl:2: 'text' is int, expected a string"),
    Case("escapes.jsonl", _jsonl({"\x1b[2J\n": 1}), r"has the keys \x1b[2J\n; expected messages"),
    Case("broken.jsonl", _bytes(b'{"text": "a"}\n{"text": \n'), "broken.jsonl:2: not JSON: Expecting value at column 9"),
    Case("pretty.jsonl", _bytes(b'[\n{"text": "a"}\n]'), "pretty.jsonl:1: not JSON: Expecting value at column 2 (a file with one list needs"),
    # Other platforms, compressed
    Case("bom-crlf.jsonl", _bytes(b'\xef\xbb\xbf{"text": "a"}\r\n\r\n{"text": "b"}\r\n'), 2),
    Case("text.jsonl.gz", _bytes(gzip.compress(_lines({"text": "a"}, {"text": "b"}))), 2),
    Case("text.jsonl.zst", _zst(_lines({"text": "a"})), 1, needs_library=True),
    Case("text.jsonl.bz2", _bytes(bz2.compress(_lines({"text": "a"}))), 1),
    Case("text.json.xz", _bytes(lzma.compress(b'[{"text": "a"}]')), 1),
    Case("cut.jsonl.gz", _bytes(gzip.compress(_lines({"text": "a" * 99}))[:-9]), "cut.jsonl.gz: damaged .gz file"),
    Case("no.jsonl.gz", _jsonl({"text": "a"}), "no.jsonl.gz: damaged .gz file (Not a gzipped file"),
    # JSON
    Case("list.json", _bytes(json.dumps([ALPACA, {"text": "T"}], indent=1).encode()), 2),
    Case("lines.json", _jsonl({"text": "a"}, {"text": "b"}), 2),
    Case("nested.json", _bytes(b'{"version": 1, "data": [{"text": "a"}]}'),
         "contains a dict, expected a list of samples (or use .jsonl, one sample per line); its key 'data' has one: jq .data"),
    # CSV and TSV
    Case("alpaca.csv", _csv(["instruction", "input", "output"], ["Q", "", "A"], ["Q, \"x\"\nline", "NA", "007"]), 2),
    Case("qa.csv", _csv(["id", "question", "answer"], [1, "Q", "A"]), NEAREST_QA, {"prompt": "question", "completion": "answer"}, 1),
    Case("half.csv", _csv(["prompt", "response"], ["Q", "A"]), "use columns=completion=response", {"completion": "response"}, 1),
    Case("half.parquet", _parquet(prompt=["Q"], response=["A"], number=[1]), "has the keys prompt, response, number; expected", {"completion": "response"}, 1, True),
    Case("excel.csv", _csv(["prompt", "completion"], ["Q", "A"], ["R", "1,5"], delimiter=";", bom=True), 2),
    Case("tabs.tsv", _csv(["text", "n"], ["a, b", 1], delimiter="\t"), 1),
    Case("chat.csv", _csv(["messages"], [json.dumps([USER, ANSWER])]), 1),
    Case("repr.csv", _csv(["messages"], [str([USER, ANSWER])]), "record 1: 'messages' is text that is not JSON: write it with double"),
    Case("text.csv.gz", _bytes(gzip.compress(b"text\nT\n")), 1),
    Case("text.tsv.xz", _bytes(lzma.compress(b"text\tn\nT\t1\n")), 1),
    Case("text.csv.zst", _zst(b"text\nT\n"), 1, needs_library=True),
    Case("twice.csv", _csv(["text", "text"], ["a", "b"]), "twice.csv:1: two columns have the name 'text': rename one"),
    Case("wide.csv", _bytes(b"prompt,completion\na,b\na,b,c\n"), "wide.csv: record 2: has more cells than the header has names"),
    Case("narrow.csv", _bytes(b"prompt,completion\na,b\na\n"), "narrow.csv: record 2: has fewer cells than the header has names"),
    Case("quote.csv", _bytes(b'prompt,completion\n"a ""b""\n",c\n\n"d,e\nf,g\n'), "quote.csv:5: not CSV: unexpected end of data: a cell that begins"),
    Case("inch.tsv", _bytes(b'prompt\tcompletion\na\tb\n"5 foot" or 6?\tc\n'), "inch.tsv:3: not CSV: '\\t' expected after"),
    Case("quote-header.csv", _bytes(b'text,"n\na,b\n'), "quote-header.csv:1: not CSV: unexpected end of data"),
    Case("null.csv", _csv(["prompt", "completion"], ["Q", "A"], ["Q", ""]), "null.csv: record 2: 'completion' is NoneType, expected a string: this record"),
    Case("returns.csv", _bytes(b"text\ra\rb\r"), "returns.csv:1: not CSV: new-line character seen in unquoted field"),
    Case("empty.csv", _bytes(b""), "empty.csv is empty: expected a first line with the names of the columns"),
    # Parquet, Arrow
    Case("chat.parquet", _parquet(messages=[[USER, ANSWER], [USER, ANSWER]], n=[1, 2]), 2, needs_library=True),
    Case("calls.parquet", _parquet(messages=[CALLS]), 1, needs_library=True),
    Case("gpt.parquet", _parquet(conversations=[GPT], id=[7]), 1, needs_library=True),
    Case("image.parquet", _parquet(conversations=[GPT], image=[b"\x89PNG"]), "record 1: has 'image', which is not text", needs_library=True),
    Case("qa.parquet", _parquet(question=["Q"], answer=["A"]), NEAREST_QA, {"prompt": "question", "completion": "answer"}, 1, True),
    Case("null.parquet", _parquet(prompt=["Q", "Q"], completion=["A", None]),
         "null.parquet: record 2: 'completion' is NoneType, expected a string", needs_library=True),
    Case("numbers.parquet", _parquet(prompt=["Q"], completion=[7]), "record 1: 'completion' is int", needs_library=True),
    Case("binary.parquet", _parquet(prompt=["Q"], completion=[b"A"]), "record 1: 'completion' is bytes", needs_library=True),
    Case("lists.parquet", _parquet(prompt=[["Q"]], completion=[["A"]]), "'prompt' is list, expected a string", needs_library=True),
    Case("cut.jsonl.zst", _zst_cut, "cut.jsonl.zst: damaged .zst file", needs_library=True),
    Case("bad.parquet", _bytes(b"PAR1" + bytes(99)), "cannot read", needs_library=True),
    Case("rows.arrow", _arrow(text=["a", "b"]), 2, needs_library=True),
    # Folders
    Case("saved", _saved(False), 3, needs_library=True),
    Case("saved-splits", _saved(True), 3, needs_library=True),
    Case("parts", _folder(b__jsonl=_jsonl({"text": "b"}), a__csv=_csv(["text"], ["a"]), README__md=_bytes(b"# x"), sub___c__json=_bytes(b'[{"text": "c"}]')), 3),
    Case("names", _folder(a__jsonl=_jsonl({"text": "a"}), readme_questions__jsonl=_jsonl({"text": "b"}), _part2__jsonl=_jsonl({"text": "c"}), LICENSE=_bytes(b"x")), 3),
    Case("splits", _folder(train__jsonl=_jsonl({"text": "a"}), test__jsonl=_jsonl({"text": "b"}, {"text": "c"})), 1),
    Case("only-test", _folder(test__jsonl=_jsonl({"text": "b"})), "has no split 'train': set dataset_split to test"),
    Case("card", _folder(README__md=_bytes(CARD), data___a0__parquet=_parquet(text=["x", "y"]), data___b0__parquet=_parquet(text=["z"])), 2, needs_library=True),
    Case("bad-part", _folder(a__jsonl=_jsonl({"text": "b"}), b__jsonl=_jsonl({"txt": 1})), "b.jsonl:1: has the keys txt"),
    Case("sheets", _folder(a__xlsx=_bytes(b"PK")), "a.xlsx is not JSONL, JSON, CSV, TSV, Parquet or Arrow: convert it"),
    Case("nothing", _folder(README__md=_bytes(b"# x")), "has no file of JSONL, JSON"),
]  # fmt: skip


def write_cases(folder: Path) -> dict[str, Path]:
    """Write all datasets to `folder`; return their paths by name."""
    paths = {}
    folder.mkdir(exist_ok=True)
    for case in CASES:
        paths[case.name] = folder / case.name
        case.write(paths[case.name])
    return paths
