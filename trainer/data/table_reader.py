"""The process of `trainer.data.table_process`: it reads a table with the limits of a process, and writes its records."""

import contextlib
import os
import sys
from typing import Any

from trainer.common.errors import UserError
from trainer.data.limited_process import OUT_OF_MEMORY, limit_answer, limit_process, read_message, write_message

_PART = 64  # records of a part


def main() -> int:
    """Read the table of the request on standard input, and write its records to standard output in parts."""
    seconds = limit_process()
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints
    try:
        from trainer.data import table_files as tables

        name, arguments = read_message(sys.stdin.buffer)
        limit_answer(seconds)
        part: list[tuple[int, Any]] = []
        error = ""
        try:
            for number, record in getattr(tables, name)(*arguments):
                part.append((number, record))
                if len(part) >= _PART or _size(record) > 1 << 20:
                    write_message(answers, (part, None))
                    limit_answer(seconds)
                    part = []
        except UserError as refused:
            error = str(refused)
        write_message(answers, (part, error))
    except MemoryError:
        return OUT_OF_MEMORY
    except BrokenPipeError:  # the other process has read enough
        return 0
    return 0


def _size(record: dict[str, Any]) -> int:
    """Return the characters of the longest column that is text, without a look into the others."""
    return max((len(value) for value in record.values() if isinstance(value, str | bytes)), default=0)


if __name__ == "__main__":
    code = main()
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    os._exit(code)  # not through the destructors of libraries
