"""Run a playbook of the project, for what only roles do."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any

from trainer.common.errors import TrainyardError
from trainyard import front_end
from trainyard.cli.command_flags import Arguments
from trainyard.cli.output import Output
from trainyard.commands.table import Command

# Exit codes of ansible-playbook: after Ctrl-C, and for a wrong option.
_INTERRUPTED, _OPTIONS_ERROR = 99, 5
# ansible-core 2.19 waits without end if Ctrl-C ends a worker that holds the lock of the queue of results; it ends in 2 s otherwise.
_INTERRUPT_LIMIT = 10.0  # s


class PlaybookError(TrainyardError):
    """A playbook failed and has reported why. `code` is the exit code of the program."""

    def __init__(self, playbook: str, code: int) -> None:
        super().__init__(f"{playbook} failed: see the lines above")
        self.code = code


def run_playbook(
    command: Command,
    arguments: Arguments,
    launch: Mapping[str, Any],
    top: Path,
    output: Output,
    values: Mapping[str, Any] | None = None,
) -> None:
    """Run the playbook of a command; its output is the program's. Raises PlaybookError, and KeyboardInterrupt after Ctrl-C.

    ansible-playbook has the terminal, so that it can ask for passwords and Ctrl-C reaches it. `launch`: the launch
    options, of which a playbook takes `limit`. `top`: the project's folder. `values`: further values of `-e`; no
    secrets, because they are arguments.
    """
    program = Path(sys.executable).parent / "ansible-playbook"
    words = [str(program) if program.exists() else "ansible-playbook", str(top / command.playbook)]
    words += [word for source in arguments.inventory for word in ("-i", source)]
    words += [word for extra in arguments.extra_vars for word in ("-e", extra)]
    words += ["--limit", str(launch["limit"])] if "limit" in launch else []
    words += ["--check"] if arguments.switch("check") else []
    words += ["-e", json.dumps(values)] if values else []
    stdout = 2 if output.as_json else None  # sys.stderr of a notebook has no file descriptor
    code, interrupted = _wait(subprocess.Popen([*words, *arguments.rest], stdout=stdout))
    if code:
        # ansible-core 2.19 ends with another code and a traceback if the signal comes while it starts a worker.
        if code == _INTERRUPTED or interrupted:
            raise KeyboardInterrupt
        raise PlaybookError(front_end.playbook(command.name), 2 if code == _OPTIONS_ERROR else 1)


def _wait(process: subprocess.Popen[bytes]) -> tuple[int, bool]:
    """Return a process's exit code and whether Ctrl-C, which the terminal sends to it too, came; forward SIGTERM."""
    timers: list[threading.Timer] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        timers.append(threading.Timer(_INTERRUPT_LIMIT, process.terminate))
        timers[-1].start()

    before = {
        signal.SIGINT: signal.signal(signal.SIGINT, interrupt),
        signal.SIGTERM: signal.signal(signal.SIGTERM, lambda number, frame: process.terminate()),
    }
    try:
        return process.wait(), bool(timers)
    finally:
        for timer in timers:
            timer.cancel()
        for number, handler in before.items():
            signal.signal(number, handler)
