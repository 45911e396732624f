"""Text that is not UTF-8: the message names the line, the probable encoding and the remedy, for every format."""

from __future__ import annotations

import codecs
import json
from pathlib import Path

import pytest

from trainer.config import read_yaml
from trainer.data.json_files import json_records
from trainer.data.tables import csv_records
from trainer.errors import UserError
from trainer.text_encoding import not_utf8

ROWS = [{"text": "plain"}, {"text": "Grüße, señor, voilà"}, {"text": "more"}]
LINES = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS)
LIST = json.dumps(ROWS, ensure_ascii=False, indent=0)
TABLE = 'text\nplain\n"Grüße, señor, voilà"\nmore\n'
# The line of the first character that is not UTF-8; of the file where the first bytes tell the encoding.
WIDE = ["utf-16", "utf-16-le", "utf-16-be", "utf-32"]
NARROW = ["cp1252", "latin-1"]
NAMES = {"utf-16": "UTF-16", "utf-16-le": "UTF-16LE", "utf-16-be": "UTF-16BE", "utf-32": "UTF-32"}


def error_of(path: Path) -> str:
    read = csv_records(path, {}) if path.suffix == ".csv" else json_records(path)
    with pytest.raises(UserError) as caught:
        list(read)
    return str(caught.value)


@pytest.mark.parametrize("encoding", [*WIDE, *NARROW])
@pytest.mark.parametrize(("name", "text", "line"), [("a.jsonl", LINES, 2), ("a.csv", TABLE, 3), ("a.json", LINES, 2)])
def test_another_encoding_is_named_with_its_line_and_the_remedy(
    tmp_path: Path, name: str, text: str, line: int, encoding: str
) -> None:
    path = tmp_path / name
    path.write_bytes(text.encode(encoding))
    message = error_of(path)
    assert message.startswith(f"{path}:{1 if encoding in WIDE else line}: ")
    assert f"iconv -f {NAMES.get(encoding, 'WINDOWS-1252')} -t UTF-8 FILE > NEW" in message


@pytest.mark.parametrize("encoding", NARROW)
def test_a_json_list_names_the_line(tmp_path: Path, encoding: str) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(LIST.encode(encoding))
    line = LIST[: LIST.index("ü")].count("\n") + 1
    assert error_of(path).startswith(f"{path}:{line}: not JSON: not UTF-8 text, probably Windows-1252")


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
@pytest.mark.parametrize(("name", "text"), [("a.jsonl", LINES), ("a.csv", TABLE), ("a.json", LIST), ("a.json", LINES)])
def test_utf8_is_read_with_and_without_a_byte_order_mark(tmp_path: Path, name: str, text: str, encoding: str) -> None:
    path = tmp_path / name
    path.write_bytes(text.encode(encoding))
    records = csv_records(path, {}) if path.suffix == ".csv" else json_records(path)
    assert [record for _, record in records] == ROWS


def test_a_table_names_the_line(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(TABLE.encode("cp1252"))
    with pytest.raises(UserError, match=r"a.csv:3: not UTF-8 text, probably Windows-1252"):
        list(csv_records(path, {}))


def test_a_spec_in_utf16_names_the_remedy(tmp_path: Path) -> None:
    path = tmp_path / "run.yml"
    path.write_bytes("model: tiny\n".encode("utf-16"))
    with pytest.raises(UserError, match=r"run.yml:1: not UTF-8 text, but UTF-16: iconv -f UTF-16"):
        read_yaml(path)
    path.write_bytes(codecs.BOM_UTF8 + b"model: tiny\n")
    assert read_yaml(path) == {"model": "tiny"}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("Привет, мир".encode("cp1251"), "find its encoding"),
        ("日本語のテキスト".encode("shift_jis"), "find its encoding"),
        ("中文".encode("gb18030"), "find its encoding"),
        ("Müller, René".encode("cp850"), "find its encoding"),
        (b"caf\xe9 and na\xefve", "probably Windows-1252"),
        (b"\x93quoted\x94 \x80 5", "probably Windows-1252"),
        ("Grüße".encode() + b" caf\xe9", "correct this line"),
        ("Grüße und ä".encode()[:-1] + b'"}', "correct this line"),
        ("Grüße 😀".encode(), ""),
        (b"zeros at the end" + bytes(64), ""),
    ],
)
def test_the_guess(line: bytes, said: str) -> None:
    assert not_utf8(line).startswith("not UTF-8 text" if said else "")
    assert said in not_utf8(line)


def test_the_remedy_does_not_spoil_a_file_that_is_mostly_utf8(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes('{"text": "Grüße"}\n'.encode() + b'{"text": "caf\xe9"}\n')
    assert "a.jsonl:2: not JSON: not UTF-8 text from byte 14 of the line" in error_of(path)
    assert "iconv" not in error_of(path)
