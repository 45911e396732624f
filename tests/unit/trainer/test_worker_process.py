"""The exit code of a program that a forked process runs."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest

from trainer.distributed.worker_process import exit_code_of


@pytest.mark.parametrize(
    ("program", "code", "printed"),
    [
        (lambda: None, 0, ""),
        (lambda: 3, 3, ""),
        (lambda: sys.exit(4), 4, ""),
        (lambda: sys.exit(), 0, ""),
        (lambda: sys.exit("message"), 1, ""),
        (lambda: 1 // 0, 1, "ZeroDivisionError"),
    ],
)
def test_the_exit_code_is_that_of_python(
    program: Callable[[], int | None], code: int, printed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code_of(program) == code
    errors = capsys.readouterr().err
    assert printed in errors and bool(errors) == bool(printed)
