"""A process that imports what torchrun and its ranks need, and then forks a torchrun whenever the supervisor requests
one.

    python -m trainer.launch.standby_process DESCRIPTOR ARGUMENTS...

DESCRIPTOR is a socket that only the supervisor has; ARGUMENTS are those of the first torchrun. Each request is a line of JSON:
`arguments`, `env` and `log` of a torchrun. Each answer is a line with its `pid`, or with `refused`, why it was not started.

No CUDA context survives a fork, so this process never initializes CUDA. It ends with its supervisor.
"""

import contextlib
import gc
import json
import os
import socket
import sys
import time
from collections.abc import Sequence
from typing import Any, NoReturn

from trainer.common.imports import without_collector
from trainer.distributed.worker_process import die_with_launcher, exit_code_of
from trainer.supervise.process_environment import replace_environment
from trainer.supervise.processes import RUN_VARIABLE

with without_collector():
    from trainer.launch.forked_ranks import (
        NVML_CHECK,
        close_nvml,
        has_initialized_cuda,
        import_for_ranks,
        may_fork,
        release_files,
    )
    from trainer.launch.torchrun import run_torchrun

_POLL = 0.001  # s


def main(descriptor: int, arguments: Sequence[str]) -> None:
    """Import for torchruns with these arguments, then answer requests until the supervisor closes the socket."""
    forks_ranks = import_for_ranks(arguments)
    gc.freeze()
    supervisor = os.getppid()
    with socket.socket(fileno=descriptor) as channel, channel.makefile("rb") as lines:
        for line in lines:
            request = json.loads(line)
            if has_initialized_cuda():
                answer: dict[str, Any] = {"refused": "it has initialized CUDA"}
            elif forks_ranks != may_fork(request["arguments"]):
                answer = {"refused": "the run needs other imports"}
            else:
                answer = _start(request, supervisor, forks_ranks)
            channel.sendall(json.dumps(answer).encode() + b"\n")


def _start(request: dict[str, Any], supervisor: int, forks_ranks: bool) -> dict[str, Any]:
    """Fork a torchrun as a child of the supervisor; return the answer."""
    close_nvml()
    read, write = os.pipe()
    try:
        middle = os.fork()
    except OSError as error:  # such as for lack of memory
        os.close(read)
        os.close(write)
        return {"refused": f"cannot fork: {error.strerror}"}
    if middle == 0:
        # The supervisor adopts what its descendants leave behind: torchrun becomes its child when this process ends.
        with contextlib.suppress(OSError):
            pid = os.fork()
            if pid == 0:
                _be_torchrun(request, supervisor, forks_ranks)
            os.write(write, b"%d" % pid)
        os._exit(0)
    os.close(write)
    os.waitpid(middle, 0)
    with os.fdopen(read, "rb") as pipe:
        pid_text = pipe.read(32)
    return {"pid": int(pid_text)} if pid_text else {"refused": "cannot fork"}


def _be_torchrun(request: dict[str, Any], supervisor: int, forks_ranks: bool) -> NoReturn:
    """Do what `python -m trainer.launch.torchrun ARGUMENTS` does in a process that the supervisor starts."""

    def program() -> None:
        middle = os.getppid()
        while middle not in (1, supervisor) and os.getppid() == middle:
            time.sleep(_POLL)
        die_with_launcher()
        if os.getppid() != supervisor:
            os._exit(1)
        release_files()
        log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        for number in (1, 2):
            os.dup2(log, number)
        replace_environment(request["env"] | (NVML_CHECK if forks_ranks else {}), RUN_VARIABLE)
        run_torchrun(request["arguments"])

    code = exit_code_of(program)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
