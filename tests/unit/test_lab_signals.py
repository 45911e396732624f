"""Signals to `python -m testbed up`, also where Python ignores the exception of their handler."""

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from testbed import __main__ as program


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Restore what the program sets for this process."""
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in kept.items():
        signal.signal(number, handler)
    program._caught.clear()


class Finalized:
    """An object whose end is interrupted by a signal."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __del__(self) -> None:
        os.kill(os.getpid(), self.number)
        for _ in range(1000):  # the handler runs between two instructions
            pass


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("was_up", [False, True])
def test_an_interrupted_up_leaves_no_new_lab(number: int, was_up: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    down: list[str] = []

    class FakeLab:
        def __init__(self, name: str) -> None:
            self.name, self.state = name, "running" if was_up else None

        def up(self, *_: Any, **__: Any) -> None:
            Finalized(number)

        def down(self) -> None:
            down.append(self.name)

    monkeypatch.setattr(program, "Lab", FakeLab)
    with pytest.raises(SystemExit) as ended:
        program.main(["--name", "one", "up"])
    assert ended.value.code == 128 + number
    assert down == ([] if was_up else ["one"])
