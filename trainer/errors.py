"""What a person did or can mend, said in one line; everything else is a bug and keeps its traceback."""

import difflib
import errno
from collections.abc import Iterable


class UserError(Exception):
    """One plain line: what is wrong, where, what to do. Shown without a traceback."""


class DiskError(UserError):
    """This host's disk is full or cannot be written: another host may well go on."""


def nearest(name: str, known: Iterable[str]) -> str:
    """Return ``; did you mean 'x'?`` for the known name closest to `name`, or an empty string if none is near."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"; did you mean {close[0]!r}?" if close else ""


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_TORCH = ("inline_container", "iostream error", "PytorchStreamWriter")  # what torch.save says of any write that failed
_CLOSED = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR)


def disk_trouble(error: BaseException) -> str:
    """Return in words what a disk refused, or an empty string if `error` is of another kind.

    The Rust writers (safetensors, tokenizers) raise errors of their own that only say ``os error 28``.
    """
    number = getattr(error, "errno", None)
    if number in _FULL or any(f"os error {full}" in str(error) for full in _FULL):
        return "no space left on the disk"
    if isinstance(error, RuntimeError) and any(word in str(error) for word in _TORCH):
        return "no space left on the disk, or it cannot be written"
    if number in _CLOSED:
        return f"{getattr(error, 'filename', None) or 'the disk'}: {getattr(error, 'strerror', error)}"
    return ""
