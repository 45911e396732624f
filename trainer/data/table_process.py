"""Read tables in a process with limits: the formats compress, so a small file can hold more than the memory of a machine."""

import contextlib
from collections.abc import Iterator
from typing import Any

from trainer.common.errors import UserError
from trainer.data.limited_process import LimitedProcess, LimitError

MEMORY = 768 << 20  # bytes of the process; a third of it is the libraries
SECONDS = 60  # of CPU time between two parts
_PLAIN = (str, int, float, bool, bytes, type(None))
REMEDY = "convert it to .jsonl, one sample per line, or split it into smaller files"


def records_apart(
    reader: str, arguments: tuple[Any, ...], what: str, most: int | None, memory: int = MEMORY, seconds: int = SECONDS
) -> Iterator[tuple[int, Any]]:
    """Yield (record number, record) of a reader of `trainer.data.table_files`.

    `reader`: the name of the function; `arguments`: its arguments, as JSON. `what`: the dataset; it begins an error
    message. `most`: decoded bytes of all records; None for no limit. Raises UserError: of the reader, or the dataset
    exceeds a limit.
    """
    number = total = 0
    with contextlib.closing(LimitedProcess("trainer.data.table_reader", memory, seconds)) as process:
        try:
            process.send((reader, arguments))
            while True:
                (records, error), size = process.receive_sized()
                total += size
                if most is not None and total > most:
                    raise LimitError(f"the records up to here are {most >> 20} MiB, far more than the file")
                for number, record in records:
                    yield number, record
                if error is not None:
                    break
        except LimitError as limit:
            raise UserError(f"dataset: {what}: cannot read record {number + 1}: {limit}: {REMEDY}") from None
    if error:
        raise UserError(error)


def plain(value: Any) -> Any:
    """Return a nested value without keys that have null: Parquet gives every object of a column all keys.

    A scalar that JSON has not, such as a date, becomes bytes, which no shape accepts.
    """
    if isinstance(value, dict):
        return {key: plain(entry) for key, entry in value.items() if entry is not None}
    if isinstance(value, list):
        return [plain(entry) for entry in value]
    return value if type(value) in _PLAIN else str(value).encode()
