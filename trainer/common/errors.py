"""Errors that a user can fix, reported as one line. Every other exception is a bug and keeps its traceback."""

import contextlib
import difflib
import errno
import re
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path

from trainer.common.formats import printable

_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NO_ACCESS = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST, errno.EISDIR)
# torch.save reports any failed write with one of these.
_TORCH_WRITE_ERRORS = ("inline_container", "iostream error", "PytorchStreamWriter")


MAX_MESSAGE = 2000  # characters
_PACKAGES = re.compile(r"/(trainer|trainyard)/")
_MAX_NAME = 100  # characters; no name in a schema is longer


class TrainyardError(Exception):
    """An error whose message is one line: what is wrong, where, and what to do."""


class UserError(TrainyardError):
    """One line that says what is wrong, where, and what to do. Shown without a traceback.

    The message may quote data: its control characters are escaped, so that it stays one line on any terminal.
    """

    def __init__(self, message: object = "") -> None:
        super().__init__(printable(message, MAX_MESSAGE))


class DiskError(UserError):
    """The disk of this host is full or not writable. Other hosts may be able to continue."""


class NonFiniteError(UserError):
    """The loss, the gradient or the weights are not finite. The same spec fails again at the same step."""

    def __init__(self, what: str, step: int, lr: float) -> None:
        """`what` begins the message, such as "weights are not finite"; `step` counts from 1; `lr` is that of the spec."""
        super().__init__(
            f"{what} at step {step}: decrease lr (now {lr:g}), increase warmup, or set precision=32-true or bf16-mixed, "
            "and set another run name with run="
        )


class ScriptError(RuntimeError):
    """The script of this rank failed; `log` is the end of its output."""

    def __init__(self, message: str, log: str = "") -> None:
        super().__init__(message)
        self.log = log


def nearest(name: str, known: Iterable[str]) -> str:
    """Return ``; did you mean 'x'?`` for the known name closest to `name`, or an empty string if none is close."""
    if len(name) > _MAX_NAME:
        return ""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"; did you mean {close[0]!r}?" if close else ""


@contextlib.contextmanager
def model_errors(model: str) -> Iterator[None]:
    """Raise UserError for every error in this block, which creates the model: transformers checks only a part of its config.json."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"model: cannot create {printable(model, 80)}: {first_line(error)}") from None


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's message, or the name of its type if it has no message."""
    lines = str(error).strip().splitlines()
    if "trust_remote_code" in str(error):  # of transformers
        return "its files need Python code of their own, which never runs here: use a model whose type transformers has"
    return printable(lines[0]) if lines else type(error).__name__


def memory_failure(error: MemoryError) -> str:
    """Return what to say of a lack of memory on this machine: where it was, and what to do."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _PACKAGES.search(frame.filename)]
    place = f" in {Path(frames[-1].filename).stem}.{frames[-1].name}" if frames else ""
    said = f" ({first_line(error)})" if str(error).strip() else ""
    return (
        f"not enough memory on this machine{place}{said}: end other programs on it, or use a smaller dataset, model or "
        "seq_length"
    )


def disk_failure(error: BaseException) -> str:
    """Return why a write to a disk failed, or an empty string if `error` is of another kind.

    The Rust writers (safetensors, tokenizers) raise their own errors, which contain only ``os error 28``.
    """
    number = getattr(error, "errno", None)
    if number in _DISK_FULL or any(f"os error {full}" in str(error) for full in _DISK_FULL):
        return "no space left on the disk"
    if isinstance(error, RuntimeError) and any(text in str(error) for text in _TORCH_WRITE_ERRORS):
        return "the disk is full or not writable"
    if number in _NO_ACCESS:
        return f"{getattr(error, 'filename', None) or 'the disk'}: {getattr(error, 'strerror', error)}"
    return ""
