"""Limits of CPU time for processes of a benchmark, by cgroups of version 1 or 2. Requires root."""

from __future__ import annotations

import contextlib
import os
import shlex
import time
from collections.abc import Iterator, Sequence

from testbed.machine import cgroup_of

PERIOD = 50_000  # microseconds
_SHARES, _WEIGHT = 1024, 100  # the defaults of versions 1 and 2
_PRIORITY = 16  # times the CPU time of other processes, so that the quota is the limit on a busy machine


class CpuGroup:
    """A cgroup whose processes together get at most `cores` of CPU time; None for no limit."""

    def __init__(self, name: str, cores: float | None) -> None:
        top, unified = cgroup_of("cpu")
        self.path = top / f"trainyard-bench-{os.getpid()}-{name}"
        if unified:
            (top / "cgroup.subtree_control").write_text("+cpu")
        self.path.mkdir()
        quota = round((cores or 0) * PERIOD)
        if unified:
            self._write("cpu.weight", _WEIGHT * _PRIORITY)
            self._write("cpu.max", f"{quota or 'max'} {PERIOD}")
        else:
            self._write("cpu.shares", _SHARES * _PRIORITY)
            self._write("cpu.cfs_period_us", PERIOD)
            self._write("cpu.cfs_quota_us", quota or -1)

    def _write(self, name: str, value: object) -> None:
        (self.path / name).write_text(str(value))

    def command(self, words: Sequence[str]) -> list[str]:
        """Return a command that runs `words` in this group."""
        return ["sh", "-c", f"echo $$ > {shlex.quote(str(self.path / 'cgroup.procs'))}; exec {shlex.join(words)}"]

    def enter(self) -> None:
        """Move this process into the group."""
        self._write("cgroup.procs", os.getpid())

    def remove(self) -> None:
        """Remove the group, after its processes have ended."""
        for pid in (self.path / "cgroup.procs").read_text().split():
            with contextlib.suppress(OSError):
                (self.path.parent / "cgroup.procs").write_text(pid)
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                self.path.rmdir()
                return
            time.sleep(0.1)


@contextlib.contextmanager
def cpu_groups(**cores: float | None) -> Iterator[dict[str, CpuGroup]]:
    """Make groups by name, and remove them when the block ends. Raises OSError without permission."""
    with contextlib.ExitStack() as stack:
        groups = {}
        for name, limit in cores.items():
            groups[name] = CpuGroup(name, limit)
            stack.callback(groups[name].remove)
        yield groups
