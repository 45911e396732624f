"""The first process of a lab. Every process of the lab runs in its namespaces and ends with it.

It is PID 1 of a PID namespace. When it ends, even by kill -9, the kernel kills every process of the lab. The mount namespace
(overlays, disks), the network namespace (bridge, NAT) and the cable to this machine end with them. The kernel does not remove the
cgroups: the holder removes them when it exits, and `down` removes them if the holder was killed.

Usage: unshare --mount --net --pid --fork --kill-child --mount-proc python -m testbed.holder OWNER_FD FOLDER CGROUP...
OWNER_FD is a pipe. A byte on it means that the lab may outlive the process that started it; its end means that this process died.
FOLDER is the folder of the lab, which the holder removes if that process died.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from .machine import remove_cgroups, restore_limits


def main(owner: int, folder: Path, cgroups: list[Path]) -> None:
    """Hold the namespaces until a signal arrives or the owner dies, then end all processes and remove the cgroups."""
    stop_read, stop_write = os.pipe()
    os.set_blocking(stop_write, False)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(number, lambda *_: None)
    signal.set_wakeup_fd(stop_write)
    watched = [owner, stop_read]
    orphaned = False
    while True:
        ready, _, _ = select.select(watched, [], [])
        if owner in ready:
            orphaned = not os.read(owner, 1)
            if orphaned:
                break
            watched.remove(owner)
        if stop_read in ready:
            got = os.read(stop_read, 64)
            if set(got) - {signal.SIGCHLD}:
                break
            reap(block=False)
    for group in cgroups:
        # A frozen process cannot be killed.
        for frozen in group.glob("*/cgroup.freeze"):
            frozen.write_text("0")
    with contextlib.suppress(ProcessLookupError):
        os.kill(-1, signal.SIGKILL)
    reap(block=True)
    for group in cgroups:
        remove_cgroups(group)
    if orphaned:
        mounted = [line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()]
        for mount in reversed([name for name in mounted if name.startswith(f"{folder}/")]):
            subprocess.run(["umount", mount], check=True)
        shutil.rmtree(folder, ignore_errors=True)
        restore_limits()


def reap(block: bool) -> None:
    """Collect the exit status of every ended child; with `block`, wait until no child is left."""
    while True:
        try:
            if os.waitpid(-1, 0 if block else os.WNOHANG)[0] == 0:
                return
        except ChildProcessError:
            return


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), [Path(name) for name in sys.argv[3:]])
