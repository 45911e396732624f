"""The first process of a lab. Everything of a lab lives in its namespaces and ends with it.

It is PID 1 of a PID namespace: when it goes, even by kill -9, the kernel ends every process of the lab, and with them go the
mount namespace (overlays, disks), the network namespace (bridge, NAT) and the cable to the machine. What the kernel does not
take away, the cgroups, it removes itself on its way out; `down` does so when it was killed.

Usage: unshare --mount --net --pid --fork --kill-child --mount-proc python -m testbed.holder OWNER_FD FOLDER CGROUP...
OWNER_FD is a pipe: its end means that whoever wanted this lab has died; a byte means that the lab may outlive them.
FOLDER is the lab's: nobody is left to remove it when the owner died.
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
        # A paused host cannot die.
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
    """Take the exit of every child that has ended; with `block`, until there is none left."""
    while True:
        try:
            if os.waitpid(-1, 0 if block else os.WNOHANG)[0] == 0:
                return
        except ChildProcessError:
            return


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), [Path(name) for name in sys.argv[3:]])
