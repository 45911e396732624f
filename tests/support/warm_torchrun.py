"""torchruns that a warm process forks, so that tests of many short runs import torch, transformers and peft once.

Each one runs trainer.launch.torchrun, which forks its ranks here. The playbooks' tests and `Cluster(..., cold=True)` start
them as programs, as it does for users.
"""

import contextlib
import functools
import gc
import json
import os
import select
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

TOP = Path(__file__).parents[2]
_POLL = 0.01  # s between two checks of the children


class WarmTorchrun:
    """A forked torchrun with the methods of subprocess.Popen that tests use."""

    def __init__(self, arguments: list[str], folder: Path, log: Path, env: dict[str, str]) -> None:
        """Start it with the arguments of torchrun, in a folder, and append its output to a log."""
        self._server = _server()
        self.args, self.returncode = arguments, None
        self.pid = self._server.start(arguments=arguments, folder=str(folder), log=str(log), env=env)

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._server.code(self.pid)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline = time.monotonic() + (1e9 if timeout is None else timeout)
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            time.sleep(_POLL)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class _Server:
    """The warm process. It ends when this process does, because its standard input ends."""

    def __init__(self) -> None:
        env = os.environ | {"PYTHONPATH": str(TOP), "GLOO_SOCKET_IFNAME": "lo"}
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env, text=True
        )
        self._codes: dict[int, int] = {}

    def start(self, **request: Any) -> int:
        assert self._process.stdin
        print(json.dumps(request), file=self._process.stdin, flush=True)
        while "started" not in (message := self._read()):
            pass
        return int(message["started"])

    def code(self, pid: int) -> int | None:
        while pid not in self._codes and select.select([self._process.stdout], [], [], 0)[0]:
            self._read()
        return self._codes.get(pid)

    def _read(self) -> dict[str, int]:
        assert self._process.stdout
        # One line at a time without a buffer: select must see what is left.
        line = b""
        while not line.endswith(b"\n"):
            part = os.read(self._process.stdout.fileno(), 1)
            assert part, "the warm process has ended"
            line += part
        message: dict[str, int] = json.loads(line)
        if "ended" in message:
            self._codes[message["ended"]] = message["code"]
        return message


@functools.cache
def _server() -> _Server:
    return _Server()


def serve() -> NoReturn:
    """Import everything, then fork a torchrun for every line of standard input, and report how each one ends."""
    from torch.distributed.elastic.multiprocessing import api

    from trainer.launch.torchrun import main

    api.get_subprocess_handler = forking_handler(api.SubprocessHandler)
    __import__("trainer.loop.train")
    __import__("transformers.models.llama.modeling_llama")
    while True:
        if select.select([0], [], [], _POLL)[0]:
            line = sys.stdin.readline()
            if not line:
                os._exit(0)
            request = json.loads(line)
            pid = os.fork()
            if pid == 0:
                _run(main, **request)
            print(json.dumps({"started": pid}), flush=True)
        with contextlib.suppress(ChildProcessError):
            while (dead := os.waitpid(-1, os.WNOHANG))[0]:
                print(json.dumps({"ended": dead[0], "code": os.waitstatus_to_exitcode(dead[1])}), flush=True)


def _run(main: Any, arguments: list[str], folder: str, log: str, env: dict[str, str]) -> NoReturn:
    """Be torchrun."""

    def program() -> None:
        sink = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        null = os.open(os.devnull, os.O_RDONLY)
        for number, file in enumerate((null, sink, sink)):
            os.dup2(file, number)
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(env)
        main(arguments)

    end_with(program)


def end_with(program: Callable[[], int | None]) -> NoReturn:
    """Run a program in a forked process, and end the process as Python would; an exception prints its traceback."""
    try:
        code = program() or 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def forking_handler(plain: Any) -> Any:
    """Return torchrun's class for the record of one rank, which forks the ranks of the trainer instead of starting Python anew."""

    class Handler(plain):
        def _popen(self, args: tuple[str, ...], env: dict[str, str]) -> Any:
            if tuple(args[1:4]) != ("-u", "-m", "trainer") or self._stdout or self._stderr:
                return super()._popen(args, env)
            return ForkedRank(args[4:], env)

    return Handler


class ForkedRank:
    """A forked rank with the methods of subprocess.Popen that torchrun calls."""

    def __init__(self, arguments: Sequence[str], env: dict[str, str]) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            end_with(lambda: be_rank(arguments, env))

    def poll(self) -> int | None:
        if self.returncode is None and (dead := os.waitpid(self.pid, os.WNOHANG))[0]:
            self.returncode = os.waitstatus_to_exitcode(dead[1])
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline = time.monotonic() + (1e9 if timeout is None else timeout)
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("a rank", timeout or 0.0)
            time.sleep(_POLL)
        return code


def be_rank(arguments: Sequence[str], env: dict[str, str]) -> NoReturn:
    """Do what `python -u -m trainer ARGUMENTS` does in a process that torchrun starts."""
    import torch

    from trainer.__main__ import main
    from trainer.distributed.world import leave

    gc.freeze()  # torchrun's objects must not be destroyed here: they would close files that this process opens
    os.setsid()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL if number != signal.SIGINT else signal.default_int_handler)
    null = os.open(os.devnull, os.O_RDWR)
    for number in [int(entry.name) for entry in Path("/proc/self/fd").iterdir()]:
        if number > 2 and number != null:  # the store's sockets must close with torchrun
            os.dup2(null, number, inheritable=False)
    os.environ.clear()
    os.environ.update(env)
    torch.set_num_threads(int(env.get("OMP_NUM_THREADS", "1")))  # torch has read it in torchrun
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True, write_through=True)  # type: ignore[union-attr]
    sys.argv = [str(TOP / "trainer/__main__.py"), *arguments]
    sys.modules.pop("bitsandbytes", None)  # a rank decides anew whether it imports it
    leave(main(arguments))


if __name__ == "__main__":
    sys.modules["bitsandbytes"] = None  # type: ignore[assignment]  # see trainer.__main__.train
    serve()
