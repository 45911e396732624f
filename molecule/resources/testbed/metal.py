"""What whole machines need besides the shared root: a disk image of it, and to know whether KVM can be used."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

from .machine import LabError, run
from .root import locked

SIZE = "8G"  # of a machine's disk; sparse


def image(root: Path) -> Path:
    """The disk image of a root, beside it; made where it is not there yet."""
    file = root.with_name(f"{root.name}.img")
    with locked(file.with_suffix(".img.lock")):
        if not file.exists():
            print("making the machines' disk image (once)", flush=True)
            unfinished = file.with_suffix(".img.unfinished")
            unfinished.unlink(missing_ok=True)
            run("mke2fs", "-q", "-t", "ext4", "-m", "0", "-d", root, unfinished, SIZE)
            unfinished.rename(file)
    return file


def accel(root: Path) -> str:
    """ "kvm" where this machine's KVM runs the root's kernel as far as its first process, else "tcg" (emulation).

    That /dev/kvm is there does not tell: inside some virtual machines a stock kernel hangs under it.
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
        raise LabError(f"{root}/boot has no kernel: remove {root} to have it built again") from None
    argv = ["qemu-system-x86_64", "-accel", "kvm", "-cpu", "host", "-m", "512", "-nodefaults", "-display", "none"]
    argv += ["-serial", "stdio", "-no-reboot", "-kernel", str(kernel), "-initrd", str(initrd)]
    argv += ["-append", "console=ttyS0 panic=-1 break=top"]
    with subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as qemu:
        assert qemu.stdout is not None
        os.set_blocking(qemu.stdout.fileno(), False)
        deadline, said = time.monotonic() + seconds, b""
        while time.monotonic() < deadline and qemu.poll() is None and b"Run /init" not in said:
            said += qemu.stdout.read() or b""
            time.sleep(0.05)
        said += qemu.stdout.read() or b""
        qemu.kill()
    return b"Run /init" in said
