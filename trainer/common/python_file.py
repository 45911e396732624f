"""A Python file that a user names, which is checked before it runs. Standard library only: the controller also uses this module."""

import ast
from pathlib import Path

from trainer.common.errors import UserError
from trainer.common.formats import mib, printable
from trainer.common.inputs import read_regular, user_path

MAX_FILE = 1 << 20  # bytes


def parse_python_file(name: str, what: str) -> tuple[Path, ast.Module]:
    """Return the absolute path of a Python file, and its syntax tree. It is not run.

    `what`: the name of the setting; it begins the error message. Raises UserError: it is missing, not a regular file,
    too large, or not Python.
    """
    path = user_path(name, what)
    try:
        content = read_regular(path, MAX_FILE)
    except OSError as error:
        raise UserError(
            f"{what}: cannot read {printable(path)}: {error.strerror}: give a Python file of at most {mib(MAX_FILE)} MiB"
        ) from None
    try:
        return path.absolute(), ast.parse(content)
    except SyntaxError as error:
        where = f":{error.lineno}" if error.lineno else ""
        raise UserError(f"{what}: {printable(path)}{where}: {error.msg}: give a Python file") from None
    except (ValueError, RecursionError, MemoryError) as error:
        raise UserError(f"{what}: {printable(path)}: {error}: give a Python file") from None
