"""Text that is not UTF-8: the message names the line and the remedy, for every format."""

from __future__ import annotations

import codecs
import json
from pathlib import Path

import pytest

from trainer.common.errors import UserError
from trainer.common.text_encoding import not_utf8
from trainer.config import read_yaml
from trainer.data.json_files import json_records
from trainer.data.table_files import csv_records

ROWS = [{"text": "plain"}, {"text": "Grüße, señor, voilà"}, {"text": "more"}]
LINES = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS)
LIST = json.dumps(ROWS, ensure_ascii=False, indent=0)
TABLE = 'text\nplain\n"Grüße, señor, voilà"\nmore\n'
# The line of the first character that is not UTF-8; of the file where the first bytes tell the encoding.
WIDE = ["utf-16", "utf-16-le", "utf-16-be", "utf-32"]
NAMES = {"utf-16": "UTF-16", "utf-16-le": "UTF-16LE", "utf-16-be": "UTF-16BE", "utf-32": "UTF-32"}


def error_of(path: Path) -> str:
    read = csv_records(path, {}) if path.suffix == ".csv" else json_records(path)
    with pytest.raises(UserError) as caught:
        list(read)
    return str(caught.value)


@pytest.mark.parametrize("encoding", [*WIDE, "cp1252"])
@pytest.mark.parametrize(("name", "text", "line"), [("a.jsonl", LINES, 2), ("a.csv", TABLE, 3), ("a.json", LINES, 2)])
def test_another_encoding_is_named_with_its_line_and_the_remedy(
    tmp_path: Path, name: str, text: str, line: int, encoding: str
) -> None:
    path = tmp_path / name
    path.write_bytes(text.encode(encoding))
    message = error_of(path)
    assert message.startswith(f"{path}:{1 if encoding in WIDE else line}: ")
    assert f"iconv -f {NAMES.get(encoding, 'WINDOWS-1252')} -t UTF-8 FILE > NEW" in message


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
@pytest.mark.parametrize(("name", "text"), [("a.jsonl", LINES), ("a.csv", TABLE), ("a.json", LIST), ("a.json", LINES)])
def test_utf8_is_read_with_and_without_a_byte_order_mark(tmp_path: Path, name: str, text: str, encoding: str) -> None:
    path = tmp_path / name
    path.write_bytes(text.encode(encoding))
    records = csv_records(path, {}) if path.suffix == ".csv" else json_records(path)
    assert [record for _, record in records] == ROWS


def test_a_spec_in_utf16_names_the_remedy(tmp_path: Path) -> None:
    path = tmp_path / "run.yml"
    path.write_bytes("model: tiny\n".encode("utf-16"))
    with pytest.raises(UserError, match=r"run.yml:1: not UTF-8 text, but UTF-16: iconv -f UTF-16"):
        read_yaml(path)
    path.write_bytes(codecs.BOM_UTF8 + b"model: tiny\n")
    assert read_yaml(path) == {"model": "tiny"}


@pytest.mark.parametrize("line", ["Grüße 😀".encode(), b"zeros at the end" + bytes(64)])
def test_utf8_is_no_other_encoding(line: bytes) -> None:
    assert not_utf8(line) == ""
