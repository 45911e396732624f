"""The lab's commands. `python -m testbed --help`, or the targets of molecule/lab.mk."""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import time
from pathlib import Path

from . import faults, machine
from .lab import Lab, names
from .machine import LabError


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    # Also where the shell had it ignored, as it does for what runs in the background.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # SIGTERM unwinds as Ctrl+C does: a half-made lab is taken down.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        options.run(Lab(options.name), options)
    except LabError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        return 141
    return 0


def up(lab: Lab, options: argparse.Namespace) -> None:
    begun = time.monotonic()
    lab.up(options.hosts, options.kind, options.venv and options.venv.absolute())
    if options.inventory:
        # A link would break for whoever may not read the cache; the file is small.
        shutil.copy(lab.inventory, options.inventory)
        os.chown(options.inventory, int(os.environ.get("SUDO_UID", 0)), int(os.environ.get("SUDO_GID", 0)))
    print(
        f"lab {lab.name!r}: {', '.join(f'{host.name} {host.address}' for host in lab.hosts[:8])}"
        f"{' ...' if len(lab.hosts) > 8 else ''}; up after {time.monotonic() - begun:.1f} s"
    )
    print(f"inventory: {options.inventory or lab.inventory}")


def down(lab: Lab, options: argparse.Namespace) -> None:
    machine.require("light")
    for name in names() if options.all else [lab.name]:
        Lab(name).down()
    if options.inventory:
        options.inventory.unlink(missing_ok=True)


def forget(lab: Lab, options: argparse.Namespace) -> None:
    if names():
        raise LabError(f"labs are up ({', '.join(names())}): take them down first")
    shutil.rmtree(machine.CACHE / "roots", ignore_errors=True)


def status(lab: Lab, options: argparse.Namespace) -> None:
    for name in names():
        one = Lab(name)
        if not one.state:
            print(f"{name}: dead (down --name {name} clears it away)")
            continue
        for host in one.hosts:
            print(f"{name}: {host.name} {host.address} {'on' if one.init_pid(host) else 'off'}")


def fault(lab: Lab, options: argparse.Namespace) -> None:
    faults.inject(lab, lab.host(options.host), options.fault, *options.arguments)


def undo(lab: Lab, options: argparse.Namespace) -> None:
    faults.undo(lab, lab.host(options.host), *options.faults)


def reboot(lab: Lab, options: argparse.Namespace) -> None:
    lab.reboot(lab.host(options.host))


def ssh(lab: Lab, options: argparse.Namespace) -> None:
    argv = [str(word) for word in lab.ssh(lab.host(options.host))]
    os.execvp("ssh", [*argv, *options.command])


def list_faults(lab: Lab, options: argparse.Namespace) -> None:
    for name, fault in faults.FAULTS.items():
        print(f"{name + ' ' + fault.usage:<32} {fault.does}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="testbed", description="Real hosts on this machine: systemd, sshd, address, disk."
    )
    parser.add_argument("--name", default="lab", help="which lab (%(default)s)")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    one = commands.add_parser("up", help="bring up a lab, or bring it to this number of hosts")
    one.add_argument("-n", "--hosts", type=int, default=3, help="how many (%(default)s)")
    one.add_argument("--kind", choices=["light", "metal"], default="light", help="metal: whole machines under qemu")
    one.add_argument("--venv", type=Path, help="Python environment that light hosts see, read-only, at the same path")
    one.add_argument("--inventory", type=Path, help="where to write the inventory, too")
    one.set_defaults(run=up)

    one = commands.add_parser("down", help="take a lab down, or clear away what is left of a dead one")
    one.add_argument("--all", action="store_true", help="every lab")
    one.add_argument("--inventory", type=Path, help="the inventory to remove, too")
    one.set_defaults(run=down)

    commands.add_parser("forget", help="remove the cached root file systems").set_defaults(run=forget)
    commands.add_parser("status", help="which labs and hosts there are").set_defaults(run=status)
    commands.add_parser("faults", help="which faults there are").set_defaults(run=list_faults)

    one = commands.add_parser("fault", help="let a fault happen on a host")
    one.add_argument("host")
    one.add_argument("fault")
    one.add_argument("arguments", nargs="*")
    one.set_defaults(run=fault)

    one = commands.add_parser("undo", help="take faults back: those named, or all")
    one.add_argument("host")
    one.add_argument("faults", nargs="*")
    one.set_defaults(run=undo)

    one = commands.add_parser("reboot", help="reboot a host in an orderly way")
    one.add_argument("host")
    one.set_defaults(run=reboot)

    one = commands.add_parser("ssh", help="log in on a host, or run a command there")
    one.add_argument("host")
    one.add_argument("command", nargs=argparse.REMAINDER)
    one.set_defaults(run=ssh)
    return parser


if __name__ == "__main__":
    sys.exit(main())
