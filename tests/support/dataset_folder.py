"""A folder of realistic datasets in all formats and shapes, with the expected result or error of each."""

import bz2
import csv
import gzip
import io
import json
import lzma
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tables import table


@dataclass(frozen=True)
class Case:
    """One dataset.

    Attributes:
        name: name of the file or folder.
        content: what `write` writes, by its format.
        expect: the number of samples, or a part of the error message.
        columns: the mapping that reads a dataset which is refused without it; `expect` is then the message without it.
        samples: the number of samples with `columns`.
        needs_library: the controller cannot check it without `datasets`.
    """

    name: str
    content: dict[str, Any]
    expect: int | str
    columns: dict[str, str] = field(default_factory=dict)
    samples: int = 0
    needs_library: bool = False


def encoded(kind: str, text: str) -> bytes:
    """Return text of the table as it is, or compressed."""
    data = text.encode("latin-1")
    if kind == "zstd":
        import pyarrow

        sink = pyarrow.BufferOutputStream()
        with pyarrow.CompressedOutputStream(sink, "zstd") as file:
            file.write(data)
        return bytes(sink.getvalue())
    return {"text": bytes, "gzip": gzip.compress, "bz2": bz2.compress, "lzma": lzma.compress}[kind](data)


def write(path: Path, content: dict[str, Any]) -> None:
    """Write a file or a folder."""
    (kind, value), *_ = content.items()
    if kind == "jsonl":
        path.write_bytes(b"".join(json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in value))
    elif kind == "csv":
        text = io.StringIO()
        csv.writer(text, delimiter=content.get("delimiter", ",")).writerows(value)
        path.write_bytes((b"\xef\xbb\xbf" if "bom" in content else b"") + text.getvalue().encode())
    elif kind in ("parquet", "arrow"):
        import pyarrow
        from pyarrow import parquet

        rows = pyarrow.table(value)
        if kind == "parquet":
            parquet.write_table(rows, path)
            return
        with pyarrow.OSFile(str(path), "wb") as file, pyarrow.ipc.new_stream(file, rows.schema) as writer:
            writer.write_table(rows)
    elif kind == "saved":
        import datasets

        datasets.disable_progress_bars()
        chat = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]
        made = datasets.Dataset.from_dict({"messages": [chat] * 3, "id": [1, 2, 3]})
        (datasets.DatasetDict({"train": made, "test": made.select([0])}) if value else made).save_to_disk(str(path))
    elif kind == "folder":
        for name, inner in value.items():
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            write(path / name, inner)
    else:
        path.write_bytes(encoded(kind, value)[: content.get("cut")])


CASES = [Case(**row) for row in table("datasets")]


def write_cases(folder: Path) -> dict[str, Path]:
    """Write all datasets to `folder`; return their paths by name."""
    paths = {}
    folder.mkdir(exist_ok=True)
    for case in CASES:
        paths[case.name] = folder / case.name
        write(paths[case.name], case.content)
    return paths
