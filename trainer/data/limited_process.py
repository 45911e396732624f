"""A process of its own, with limits of memory and time, for work on hostile data: a decoder, or the functions of a reward.

A message is its length in 8 bytes, and JSON. In an answer, an object with one certain key is bytes; a request has none, so that no
record can pass for them.
"""

from __future__ import annotations

import base64
import json
import math
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, cast

import trainer

MAX_MESSAGE = 1 << 30  # bytes
_MIB = 1 << 20
_BYTES = "\0bytes"  # the key


class LimitError(Exception):
    """The process took too much memory or time, or ended for another reason. The message says which."""


class LimitedProcess:
    """A Python module that runs as a process and answers messages. Its `main` calls `limit_process` first."""

    def __init__(self, module: str, memory: int, seconds: int, *more: str, **how: Any) -> None:
        """Start it. `memory`: bytes that it may allocate. `seconds`: CPU time for one answer. `more`: further words of its command."""
        self.memory, self.seconds, self.owner = memory, seconds, os.getpid()
        root = str(Path(trainer.__file__).parents[1])  # a folder, or the archive on a host
        words = [sys.executable, "-P", "-m", module, str(memory), str(seconds), *more]
        how = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL} | how
        # The pool of the system returns memory; the others of pyarrow reserve more than they use.
        own = {"PYTHONPATH": root, "ARROW_DEFAULT_MEMORY_POOL": "system"}
        self._process = subprocess.Popen(words, env={**os.environ, **own}, **how)

    def ask(self, value: object) -> Any:
        """Send a message and return the answer. Raises LimitError."""
        self.send(value)
        return self.receive_sized()[0]

    def send(self, value: object) -> None:
        """Send a message. Raises LimitError if the process has ended."""
        try:
            write_message(cast(BinaryIO, self._process.stdin), value)
        except OSError:
            raise LimitError(self._reason()) from None

    def receive_sized(self) -> tuple[Any, int]:
        """Return the next answer, and its size in bytes. Raises LimitError."""
        data = _read(cast(BinaryIO, self._process.stdout))
        if data is None:
            raise LimitError(self._reason())
        try:
            return json.loads(data, object_hook=_with_bytes), len(data)
        except (TypeError, ValueError, RecursionError):
            raise LimitError("its process sent a damaged answer") from None

    def close(self) -> None:
        if self.owner != os.getpid():  # of the process that has forked this one
            return
        if self._process.returncode is None:
            self._process.kill()
        self._process.communicate()

    def _reason(self) -> str:
        try:
            code = self._process.wait(5)  # it closes its output before it ends
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        if code == OUT_OF_MEMORY:
            return f"it takes more than {self.memory // _MIB} MiB of memory"
        if code == -signal.SIGXCPU:
            return f"it takes more than {self.seconds} s of processor time"
        return f"its process ended with exit code {code}, which a limit of memory can cause"


# In the process --------------------------------------------------------------------------------------------------------

OUT_OF_MEMORY = 77  # exit code


def limit_process() -> int:
    """Limit the memory of this process, as its arguments say, and return the CPU seconds for one answer."""
    memory, seconds = (int(word) for word in sys.argv[1:3])
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
    return seconds


def limit_answer(seconds: int) -> None:
    used = resource.getrusage(resource.RUSAGE_SELF)
    soft = math.ceil(used.ru_utime + used.ru_stime) + seconds
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    resource.setrlimit(resource.RLIMIT_CPU, (soft if hard < 0 else min(soft, hard), hard))


def answer_messages(requests: BinaryIO, answers: BinaryIO, answer: Callable[[Any], tuple[str, Any]]) -> int:
    """Answer every message of the process that started this one; return the exit code of this one.

    `answer`: returns the error that the other process shows, or an empty text, and the answer.
    """
    try:
        while (request := read_message(requests)) is not None:
            write_message(answers, answer(request))
    except MemoryError:
        return OUT_OF_MEMORY
    except BrokenPipeError:
        pass  # it waits for no answer any more
    return 0


def read_message(file: BinaryIO) -> Any:
    """Return the next message of the process that started this one; None at its end."""
    data = _read(file)
    return None if data is None else json.loads(data)


def write_message(file: BinaryIO, value: object) -> None:
    """Write a message. Raises MemoryError if it is too long."""
    # As UTF-8: escapes of other scripts would count up to three times against the limits of a dataset.
    text = json.dumps(value, default=_plain, ensure_ascii=False, separators=(",", ":"))
    data = text.encode(errors="surrogatepass")
    if len(data) > MAX_MESSAGE:
        raise MemoryError
    file.write(len(data).to_bytes(8, "big"))
    file.write(data)
    file.flush()


def _read(file: BinaryIO) -> bytes | None:
    head = file.read(8)
    size = int.from_bytes(head, "big")
    if len(head) < 8 or size > MAX_MESSAGE:
        return None
    data = file.read(size)
    return data if len(data) == size else None


def _plain(value: object) -> object:
    return {_BYTES: base64.b64encode(value).decode()} if isinstance(value, bytes) else str(value)


def _with_bytes(found: dict[str, Any]) -> Any:
    return base64.b64decode(found[_BYTES]) if [*found] == [_BYTES] else found
