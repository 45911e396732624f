"""The command line of the lab: `python -m testbed --help`, or the targets of molecule/lab.mk."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import NoReturn

from . import faults, machine
from .lab import Lab, lab_names
from .machine import LabError

_caught: list[int] = []  # signals of this process


def main(arguments: list[str] | None = None) -> int:
    """Run one command; return its exit code."""
    options = _parser().parse_args(arguments)
    # Both unwind the stack, so that an unfinished lab is removed. A shell ignores SIGINT for background processes: handle it there as well.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _end)
    try:
        options.run(Lab(options.name), options)
    except LabError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        return 141
    return 0


def _end(number: int, _: object) -> NoReturn:
    _caught.append(number)
    sys.exit(128 + number)


def up(lab: Lab, options: argparse.Namespace) -> None:
    """Start the lab, or change its number of hosts, and print its hosts."""
    start, was_up = time.monotonic(), lab.state is not None
    lab.up(options.hosts, options.kind, options.venv and options.venv.absolute(), releases=options.release)
    if _caught:  # in a finalizer or a callback of a weak reference, where Python ignores the exception of the handler
        if not was_up:
            lab.down()
        sys.exit(128 + _caught[0])
    if options.inventory:
        # A copy, not a link: the user may not read the cache.
        shutil.copy(lab.inventory, options.inventory)
        os.chown(options.inventory, int(os.environ.get("SUDO_UID", 0)), int(os.environ.get("SUDO_GID", 0)))
    print(
        f"lab {lab.name!r}: {', '.join(f'{host.name} {host.address}' for host in lab.hosts[:8])}"
        f"{' ...' if len(lab.hosts) > 8 else ''}; up after {time.monotonic() - start:.1f} s"
    )
    print(f"inventory: {options.inventory or lab.inventory}")


def down(lab: Lab, options: argparse.Namespace) -> None:
    """Stop the lab and remove its files."""
    machine.require("light")
    for name in lab_names() if options.all else [lab.name]:
        Lab(name).down()
    if options.inventory:
        options.inventory.unlink(missing_ok=True)


def clean(lab: Lab, options: argparse.Namespace) -> None:
    """Remove the cached root file systems. Raises LabError while a lab is running."""
    if lab_names():
        raise LabError(f"labs are running ({', '.join(lab_names())}): take them down first")
    shutil.rmtree(machine.CACHE / "roots", ignore_errors=True)


def status(lab: Lab, options: argparse.Namespace) -> None:
    """Print every lab with its hosts."""
    for name in lab_names():
        one = Lab(name)
        if not one.state:
            print(f"{name}: dead, run --name {name} down to remove its files")
            continue
        for host in one.hosts:
            print(f"{name}: {host.name} {host.address} {'on' if one.init_pid(host) else 'off'}")


def fault(lab: Lab, options: argparse.Namespace) -> None:
    """Inject a fault on a host."""
    faults.inject(lab, lab.host(options.host), options.fault, *options.arguments)


def undo(lab: Lab, options: argparse.Namespace) -> None:
    """Undo faults on a host."""
    faults.undo(lab, lab.host(options.host), *options.faults)


def reboot(lab: Lab, options: argparse.Namespace) -> None:
    """Reboot a host."""
    lab.reboot(lab.host(options.host))


def ssh(lab: Lab, options: argparse.Namespace) -> None:
    """Log in to a host, or run a command on it."""
    argv = [str(word) for word in lab.ssh(lab.host(options.host))]
    os.execvp("ssh", [*argv, *options.command])


def list_faults(lab: Lab, options: argparse.Namespace) -> None:
    """Print the faults and their arguments."""
    for name, fault in faults.FAULTS.items():
        print(f"{name + ' ' + fault.usage:<32} {fault.description}")


def _code_names(text: str) -> list[str]:
    names = list(dict.fromkeys(text.split(","))) if text else []
    if not all(re.fullmatch(r"[a-z]{2,20}", name) for name in names):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of code names such as bookworm,trixie")
    return names


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="testbed", description="Hosts on this machine, each with systemd, sshd, an address and a disk."
    )
    parser.add_argument("--name", default="lab", help="name of the lab (%(default)s)")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    one = commands.add_parser("up", help="start a lab, or change its number of hosts")
    one.add_argument("-n", "--hosts", type=int, default=3, help="number of hosts (%(default)s)")
    one.add_argument(
        "--kind", choices=["light", "metal"], default="light", help="light: namespaces; metal: qemu (%(default)s)"
    )
    one.add_argument(
        "--release",
        type=_code_names,
        default=[],
        metavar="NAME[,NAME]",
        help="code names that the hosts use in rotation, such as bookworm,trixie (default: the release of this machine)",
    )
    one.add_argument("--venv", type=Path, help="Python environment that the hosts mount read-only at the same path")
    one.add_argument("--inventory", type=Path, help="also write the inventory to this file")
    one.set_defaults(run=up)

    one = commands.add_parser("down", help="stop a lab and remove its files")
    one.add_argument("--all", action="store_true", help="all labs")
    one.add_argument("--inventory", type=Path, help="also remove this inventory file")
    one.set_defaults(run=down)

    commands.add_parser("clean", help="remove the cached root file systems").set_defaults(run=clean)
    commands.add_parser("status", help="list labs and hosts").set_defaults(run=status)
    commands.add_parser("faults", help="list faults").set_defaults(run=list_faults)

    one = commands.add_parser("fault", help="inject a fault on a host")
    one.add_argument("host")
    one.add_argument("fault")
    one.add_argument("arguments", nargs="*")
    one.set_defaults(run=fault)

    one = commands.add_parser("undo", help="undo the named faults, or all")
    one.add_argument("host")
    one.add_argument("faults", nargs="*")
    one.set_defaults(run=undo)

    one = commands.add_parser("reboot", help="reboot a host")
    one.add_argument("host")
    one.set_defaults(run=reboot)

    one = commands.add_parser("ssh", help="log in to a host, or run a command on it")
    one.add_argument("host")
    one.add_argument("command", nargs=argparse.REMAINDER)
    one.set_defaults(run=ssh)
    return parser


if __name__ == "__main__":
    sys.exit(main())
