"""The environment of this process, also as other processes read it from /proc. Standard library only."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from pathlib import Path


def replace_environment(values: Mapping[str, str], first: str) -> None:
    """Replace the environment of this process, and what /proc/PID/environ shows of it and of processes that it forks.

    The kernel shows the memory in which the program received its environment, and `os.environ` is a copy of that. This memory
    keeps its size, so it holds the variable `first` and as many others as fit. See proc(5), env_start in /proc/PID/stat.

    Args:
        values: the new environment.
        first: name of the variable in `values` that must be visible.

    Raises:
        OSError: the memory has no room for the variable `first`; nothing has changed.
    """
    fields = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
    start, end = int(fields[47]), int(fields[48])
    names = [first, *(name for name in values if name != first)]
    block = b""
    for name in names:
        entry = os.fsencode(f"{name}={values[name]}\0")
        if len(block) + len(entry) < end - start:
            block += entry
        elif name == first:
            raise OSError(f"the environment of this process has no room for {first}")
    # libc must refer to copies only before the memory is overwritten.
    copy = dict(values)
    os.environ.clear()
    os.environ.update(copy)
    ctypes.memmove(start, block.ljust(end - start, b"\0"), end - start)
