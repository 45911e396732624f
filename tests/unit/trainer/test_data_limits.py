"""A small dataset that decodes to much is refused with file, record and remedy, and takes little memory."""

import bz2
import codecs
import gzip
import json
import resource
import threading
from pathlib import Path

import pytest
from tables import table

from trainer.common.errors import UserError
from trainer.common.text_encoding import not_utf8
from trainer.config import read_yaml
from trainer.data.json_files import json_records
from trainer.data.samples import check_source, source_of
from trainer.data.table_files import csv_records

ROWS, VALUE = 100_000, "x" * 13_700


def refusal(path: Path) -> str:
    """Return why the check of a dataset refuses it; it must not take much memory of this process."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(UserError) as caught:
        check_source(source_of(path))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 512 * 1024
    assert str(path) in str(caught.value) and str(caught.value).isprintable()
    return str(caught.value)


def _repeated(rows: int, lists: bool) -> object:
    pa = pytest.importorskip("pyarrow")
    values = pa.DictionaryArray.from_arrays(pa.array([0] * rows, pa.int32()), pa.array([VALUE]))
    return pa.table({"text": pa.ListArray.from_arrays(pa.array([0, rows], pa.int32()), values) if lists else values})


@pytest.mark.slow
@pytest.mark.parametrize(("lists", "reason"), table("data_limits")["a_small"], ids=["many records", "one record"])
def test_a_small_parquet_file_of_many_gigabytes(lists: bool, reason: str, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "small.parquet"
    parquet.write_table(_repeated(ROWS, lists), path, store_schema=False)
    assert path.stat().st_size < 10_000
    assert reason in (said := refusal(path))
    assert "convert it to .jsonl" in said


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.json.gz", "a.csv.bz2"])
def test_a_small_compressed_file_of_much_text(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.data.json_files.MIN_DECODED", 1 << 20)
    line = f"text\n{VALUE}\n" if ".csv" in name else json.dumps({"text": VALUE}) + "\n"
    path = tmp_path / name
    path.write_bytes((gzip if name.endswith("gz") else bz2).compress(line.encode() * 400))
    assert f"{name}: decompresses to more than" in refusal(path)


def test_a_json_list_is_decoded_item_by_item(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text("[" + ", ".join(json.dumps({"text": "é" * size}) for size in (1, 70_000, 300_000)) + " , 12 ]\n")
    sizes = [len(record["text"]) if isinstance(record, dict) else record for _, record in json_records(path)]
    assert sizes == [1, 70_000, 300_000, 12]


@pytest.mark.parametrize(
    "text", ["[]", " [ ] ", "[1, 2]", '["a]"]', "[1,]", "[1 2]", "[1", "[", "", "[1] 2", "[[1], {}]"]
)
def test_a_json_list_is_read_as_the_standard_library_does(text: str, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(text)
    try:
        expected = json.loads(text)
    except json.JSONDecodeError as error:
        with pytest.raises(UserError, match="not JSON") as caught:
            list(json_records(path))
        # Python 3.13 names a trailing comma, which a decoder of single items sees as a missing value.
        said = "" if "trailing comma" in error.msg else f" {error.msg} at column {error.colno}"
        assert f"a.json:{error.lineno}: not JSON:{said}" in str(caught.value)
    else:
        assert [item for _, item in json_records(path)] == expected


def test_a_record_of_a_json_list_has_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.data.json_files.MAX_LINE", 1 << 20)
    path = tmp_path / "a.json"
    path.write_text('[{"text": "a"}, [' + "[]," * 1_500_000 + "0]]")
    assert "item 2 is longer than 1 MiB" in refusal(path)


@pytest.mark.parametrize("name", ["../secret.arrow", "/etc/hostname", "link.arrow", 3, None])
def test_a_saved_dataset_outside_of_its_folder(name: object, tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    folder = tmp_path / "saved"
    folder.mkdir()
    (tmp_path / "secret.arrow").write_bytes(b"")
    (folder / "link.arrow").symlink_to("../secret.arrow")
    (folder / "dataset_info.json").write_text("{}")
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name}]}))
    assert "which is not in the folder of the dataset" in refusal(folder)


@pytest.mark.parametrize("name", ["../other", "/etc", "linked", ".", 3])
def test_a_split_outside_of_the_folder_of_a_saved_dataset(name: object, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    folder = tmp_path / "saved"
    datasets.Dataset.from_dict({"text": ["secret"]}).save_to_disk(str(tmp_path / "other"))
    folder.mkdir()
    (folder / "linked").symlink_to("../other")
    (folder / "dataset_dict.json").write_text(json.dumps({"splits": [name]}))
    said = refusal(folder)
    assert "which is not in the folder of the dataset" in said or (name == "." and "state.json" in said)


def test_a_reader_that_stops_early_leaves_no_process(tmp_path: Path) -> None:
    from trainer.data.table_files import table_records

    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "small.parquet"
    parquet.write_table(_repeated(1000, False), path)
    children = Path("/proc/self/task", str(threading.get_native_id()), "children")
    before = set(children.read_text(encoding="utf-8").split())
    rows = table_records(path, {})
    assert next(rows)[0] == 1
    (pid,) = set(children.read_text(encoding="utf-8").split()) - before
    del rows  # closes the generator
    assert not Path("/proc", pid).exists()


@pytest.mark.parametrize("size", [5, 30, 60])
def test_a_damaged_compressed_table(size: int, tmp_path: Path) -> None:
    path = tmp_path / "a.csv.gz"
    path.write_bytes(gzip.compress(b"text\n" + bytes(range(97, 123)) * 20)[:size] + b"\xff" * 9)
    assert "a.csv.gz: damaged .gz file" in refusal(path)


# Text that is not UTF-8 ----------------------------------------------------------------------------------------------

RECORDS = [{"text": "plain"}, {"text": "Grüße, señor, voilà"}, {"text": "more"}]
LINES = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in RECORDS)
LIST = json.dumps(RECORDS, ensure_ascii=False, indent=0)
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
def test_another_encoding_is_named(tmp_path: Path, name: str, text: str, line: int, encoding: str) -> None:
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
    assert [record for _, record in records] == RECORDS


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
