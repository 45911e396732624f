"""Hosts under qemu: the disk image of the shared root file system, and whether KVM works on this machine."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

from .machine import LabError, locked, run

SIZE = "8G"  # of a disk image; sparse


def image(root: Path) -> Path:
    """Return the disk image of a root file system; create it if it is missing."""
    file = root.with_name(f"{root.name}.img")
    with locked(file.with_suffix(".img.lock")):
        if not file.exists():
            print("creating the disk image of the hosts (once)", flush=True)
            unfinished = file.with_suffix(".img.unfinished")
            unfinished.unlink(missing_ok=True)
            run("mke2fs", "-q", "-t", "ext4", "-m", "0", "-d", root, unfinished, SIZE)
            unfinished.rename(file)
    return file


def share(folder: Path, file: Path, label: str) -> None:
    """Write a disk image with the files of a folder, which hosts under qemu mount read-only by its label."""
    # No journal: nothing is written to the disk, and a kernel refuses to replay one on a read-only device.
    run("mke2fs", "-q", "-t", "ext4", "-m", "0", "-O", "^has_journal", "-L", label, "-d", folder, file, SIZE)


def accel(root: Path) -> str:
    """Return "kvm" if this machine's KVM boots the kernel of the root file system to its first process, else "tcg" (emulation).

    The presence of /dev/kvm is not enough: inside some virtual machines a stock kernel hangs under it.
    """
    known = root.with_name(f"{root.name}.accel")
    if known.exists():
        return known.read_text()
    found = "kvm" if os.access("/dev/kvm", os.R_OK | os.W_OK) and _kvm_boots(root) else "tcg"
    known.write_text(found)
    return found


def _kvm_boots(root: Path, seconds: float = 10.0) -> bool:
    try:
        kernel, initrd = (next((root / "boot").glob(f"{name}-*")) for name in ("vmlinuz", "initrd.img"))
    except StopIteration:
        raise LabError(f"{root}/boot has no kernel: remove {root} to rebuild it") from None
    argv = ["qemu-system-x86_64", "-accel", "kvm", "-cpu", "host", "-m", "512", "-nodefaults", "-display", "none"]
    argv += ["-serial", "stdio", "-no-reboot", "-kernel", str(kernel), "-initrd", str(initrd)]
    argv += ["-append", "console=ttyS0 panic=-1 break=top"]
    with subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as qemu:
        assert qemu.stdout is not None
        os.set_blocking(qemu.stdout.fileno(), False)
        deadline, output = time.monotonic() + seconds, b""
        while time.monotonic() < deadline and qemu.poll() is None and b"Run /init" not in output:
            output += qemu.stdout.read() or b""
            time.sleep(0.05)
        output += qemu.stdout.read() or b""
        qemu.kill()
    return b"Run /init" in output
