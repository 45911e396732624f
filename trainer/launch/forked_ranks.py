"""Ranks that torchrun forks from itself, so that a host imports torch, transformers and peft once for all of its ranks.

These imports take about 7 s of a core, ten times as long as the rest of the start of a small run. torchrun itself needs
torch, which is a third of them. An elastic torchrun, which restarts its ranks, restarts them without any import. A standby
process (see standby.py) imports before it forks torchrun itself.

No CUDA context survives a fork. Therefore torch counts the GPUs through NVML while torchrun imports, and if a library has
initialized CUDA all the same, torchrun starts the ranks as separate programs.
"""

import contextlib
import ctypes
import gc
import importlib
import os
import select
import signal
import subprocess
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, NoReturn

import torch
from torch.distributed.elastic.multiprocessing import api
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

from trainer.__main__ import main, needs_bitsandbytes, take_places, take_spec
from trainer.common.errors import UserError
from trainer.common.imports import without_collector
from trainer.common.inputs import path_kind
from trainer.config import TINY, RunSpec
from trainer.distributed.worker_process import exit_code_of
from trainer.loop import unsloth_backend
from trainer.model_files.model_shape import model_type

RANK_COMMAND = ("-u", "-m", "trainer")  # what torchrun passes to Python for `-m trainer`
_INITIALIZED = {"/dev/nvidia-uvm", "/dev/kfd"}  # CUDA and ROCm open them when they are initialized, NVML does not
NVML_CHECK = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}  # count GPUs without initializing CUDA
_NVML_USERS = 100  # initializations of NVML to undo, at most
_HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)  # by torchrun


def import_for_ranks(arguments: Sequence[str]) -> bool:
    """Import what the ranks need, and let torchrun fork them. Return whether it does.

    Args:
        arguments: arguments of torchrun.
    """
    spec = _forkable_spec(arguments)
    if spec is None:
        return False
    os.environ.update(NVML_CHECK)
    sys.modules["bitsandbytes"] = None  # type: ignore[assignment]  # see trainer.__main__.train
    try:
        with without_collector():
            import_architecture(spec)
            importlib.import_module("trainer.loop.train")
    except Exception:
        return False  # the ranks report it
    if has_initialized_cuda():
        return False
    gc.freeze()  # the collector does not touch these objects: their pages stay shared
    api.get_subprocess_handler = _Handler
    return True


def import_architecture(spec: RunSpec) -> None:
    """Import the code of the spec's model. Most of that of Llama is needed by every architecture, and for an unknown one it is all."""
    importlib.import_module("transformers.models.llama.modeling_llama")
    if spec.model != TINY and path_kind(Path(spec.model).expanduser()) != "folder":
        return  # the configuration may not be on this host
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    with contextlib.suppress(UserError, LookupError):  # the ranks report it
        _ = MODEL_FOR_CAUSAL_LM_MAPPING[CONFIG_MAPPING[model_type(spec)]]  # which imports it


def may_fork(arguments: Sequence[str]) -> bool:
    """Return whether ranks with these arguments of torchrun may be forked, as far as their spec determines it."""
    return _forkable_spec(arguments) is not None


def _forkable_spec(arguments: Sequence[str]) -> RunSpec | None:
    """Return the spec of ranks that may be forked, else None."""
    try:
        rest = list(arguments[arguments.index("trainer") + 1 :])
        rest = rest[1:] if rest[:1] == ["train"] else rest
        take_places(rest)
        spec = take_spec(rest, None, quiet=True)
    except (UserError, ValueError):
        return None  # the ranks report it
    # A user's script may not need torch.
    other = spec.script or needs_bitsandbytes(spec) or unsloth_backend.may_use(spec)
    return None if other else spec


def has_initialized_cuda() -> bool:
    """Return whether this process has initialized CUDA or ROCm, so that no process that it forks can use a GPU."""
    return torch.cuda.is_initialized() or bool(_INITIALIZED & set(_open_files().values()))


def close_nvml() -> None:
    """End NVML, with which torch counts GPUs, before a fork: a forked process could not use the driver's files that it opened."""
    if not any(target.startswith("/dev/nvidia") for target in _open_files().values()):
        return
    with contextlib.suppress(OSError):
        library = ctypes.CDLL("libnvidia-ml.so.1")
        for _ in range(_NVML_USERS):
            if library.nvmlShutdown():  # it is not initialized any more
                return


class _Handler(SubprocessHandler):
    """torchrun's record of one rank."""

    def _popen(self, args: tuple[str, ...], env: dict[str, str]) -> subprocess.Popen[bytes]:
        if tuple(args[:4]) != (sys.executable, *RANK_COMMAND) or self._stdout or self._stderr:
            return super()._popen(args, env)
        return _ForkedRank(args[4:], env)  # type: ignore[return-value]  # the part of Popen that torchrun uses


class _ForkedRank:
    """A forked process with the methods of subprocess.Popen that torchrun calls.

    A rank that loses its peer fails within milliseconds after it. torchrun checks every 0.1 s and takes the lowest rank
    of those that have ended for the first failure. Therefore a rank counts as ended only after those that ended before it.
    """

    _ends: ClassVar[select.epoll]  # the kernel queues the ends in their order
    _owner: ClassVar[int] = 0  # the process that has made _ends: a forked torchrun must not read its parent's
    _ended: ClassVar[list[int]] = []  # pidfds of ranks whose end torchrun has not read, the first one first

    def __init__(self, arguments: Sequence[str], env: dict[str, str]) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        close_nvml()
        self.returncode: int | None = None
        with warnings.catch_warnings():
            # The threads of torchrun's store hold no lock that a rank needs; torch's own launcher also forks beside them.
            warnings.simplefilter("ignore", DeprecationWarning)
            self.pid = os.fork()
        if self.pid == 0:
            _run_rank(arguments, env)
        if _ForkedRank._owner != os.getpid():
            _ForkedRank._owner, _ForkedRank._ends = os.getpid(), select.epoll()
            self._ended.clear()
        self._pidfd = os.pidfd_open(self.pid)
        self._ends.register(self._pidfd, select.EPOLLIN | select.EPOLLONESHOT)

    def poll(self) -> int | None:
        """Return the exit code, or None while the rank runs or before the ends of others have been read."""
        self._ended.extend(pidfd for pidfd, _ in self._ends.poll(0))
        if self.returncode is None and self._ended[:1] == [self._pidfd]:
            return self._read_end()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the rank's end; return the exit code. Raises subprocess.TimeoutExpired after `timeout` seconds."""
        if self.returncode is not None:
            return self.returncode
        if not select.select([self._pidfd], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired("a rank", timeout or 0.0)
        self._ended.extend(pidfd for pidfd, _ in self._ends.poll(0))
        return self._read_end()

    def _read_end(self) -> int:
        self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        if self._pidfd in self._ended:
            self._ended.remove(self._pidfd)
        os.close(self._pidfd)
        return self.returncode


def _run_rank(arguments: Sequence[str], env: dict[str, str]) -> NoReturn:
    """Be a rank: what `python -u -m trainer ARGUMENTS` does in a process that torchrun starts."""

    def program() -> int:
        gc.freeze()  # torchrun's objects must not be destroyed here: they would close files that this process opens
        os.setsid()
        for number in _HANDLED:
            signal.signal(number, signal.SIG_DFL if number != signal.SIGINT else signal.default_int_handler)
        release_files()
        os.environ.clear()
        os.environ.update(env)
        # OpenMP and torch have read these variables in torchrun.
        if (threads := env.get("OMP_NUM_THREADS", "")).isdecimal() and int(threads):
            torch.set_num_threads(int(threads))
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(line_buffering=True, write_through=True)  # type: ignore[union-attr]
        sys.argv = [str(Path(__file__).parents[1] / "__main__.py"), *arguments]
        return main(arguments)

    code = exit_code_of(program)
    from trainer.distributed.world import leave

    leave(code)


def release_files() -> None:
    """Point every file but the standard streams to /dev/null: the store's sockets must close with torchrun.

    The numbers stay in use, so that no object of torchrun can close a file that the rank opens.
    """
    null = os.open(os.devnull, os.O_RDWR)
    for number in _open_files():
        if number > 2 and number != null:
            os.dup2(null, number, inheritable=False)


def _open_files() -> dict[int, str]:
    """Return the target of every open file by its number."""
    found = {}
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the folder that is listed
            found[int(entry.name)] = str(entry.readlink())
    return found
