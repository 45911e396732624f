"""Small networks on this machine: network namespaces connected by a switch in another namespace. Requires root and ip."""

import contextlib
import ctypes
import itertools
import json
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
CLONE_NEWNET = 0x40000000
_numbers = itertools.count()


def why_no_lab() -> str:
    """Return the reason why this machine cannot create network namespaces; empty if it can."""
    if os.geteuid() != 0:
        return "network namespaces require root"
    if not shutil.which("ip"):
        return "network namespaces require `ip`: install the package iproute2"
    probe = f"typrobe{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True)
    if made.returncode:
        return f"cannot create a network namespace: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", probe], check=True)
    return ""


def in_namespace(name: str, function: Callable[[], T]) -> T:
    """Call `function` in a thread inside network namespace `name`; processes that it starts run there too."""
    result: list[Any] = []

    def enter() -> None:
        try:
            with Path(f"/run/netns/{name}").open() as namespace:
                libc = ctypes.CDLL(None, use_errno=True)
                if libc.setns(namespace.fileno(), CLONE_NEWNET):
                    raise OSError(ctypes.get_errno(), f"setns {name}")
            result.extend([function(), None])
        except BaseException as error:
            result.extend([None, error])

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    value, error = result
    if error is not None:
        raise error
    return value


def remove_stale() -> None:
    """Remove the namespaces of killed test processes: the names contain the process id."""
    for path in Path("/run/netns").glob("ty*-*"):
        if not Path("/proc", path.name[2:].partition("-")[0]).exists():
            subprocess.run(["ip", "netns", "del", path.name], check=False, capture_output=True)


class Lab:
    """A switch and the nodes connected to it, removed at the end of the `with` block."""

    def __init__(self) -> None:
        self.tag = f"ty{os.getpid()}-{next(_numbers)}"
        self.switch = f"{self.tag}-sw"
        self.ports = itertools.count()
        self.namespaces: list[str] = []

    def __enter__(self) -> "Lab":
        remove_stale()
        try:
            self._add_namespace(self.switch)
            self.ip(self.switch, "link add br0 type bridge", "link set br0 up")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for name in self.namespaces:
            subprocess.run(["ip", "netns", "del", name], check=False)

    def controller(self, *addresses: str) -> str:
        """Add the node that scans; return its namespace."""
        self.control = self.node("ctl", *addresses)
        return self.control

    def node(self, name: str, *addresses: str) -> str:
        """Add a node with one NIC that has all `addresses`; return its namespace."""
        namespace = f"{self.tag}-{name}"
        self._add_namespace(namespace)
        self.ip(namespace, "link set lo up")
        self.card(namespace, "eth0", *addresses)
        return namespace

    def card(self, namespace: str, device: str, *addresses: str) -> None:
        """Add a NIC to a node."""
        port = f"p{next(self.ports)}"
        self.ip(self.switch, f"link add {port} type veth peer name {device} netns {namespace}")
        self.ip(self.switch, f"link set {port} master br0 up")
        # No automatic link-local address: duplicate address detection would delay it by a second.
        commands = [f"link set {device} addrgenmode none"]
        commands += [f"addr add {a} dev {device} {'nodad' if ':' in a else ''}" for a in addresses]
        self.ip(namespace, *commands, f"link set {device} up")

    def wait_for_links(self, seconds: float = 10) -> None:
        """Wait until the switch forwards on every port. Raises TimeoutError."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            show = ["ip", "-netns", self.switch, "-json", "-details", "link", "show", "master", "br0"]
            ports = json.loads(subprocess.run(show, capture_output=True, check=True).stdout)
            if all(p["linkinfo"]["info_slave_data"]["state"] == "forwarding" for p in ports):
                return
            threading.Event().wait(0.02)
        raise TimeoutError(f"a port of {self.switch} does not forward after {seconds} s")

    def run(self, function: Callable[[], T]) -> T:
        """Call `function` on the node that scans."""
        return in_namespace(self.control, function)

    def _add_namespace(self, name: str) -> None:
        subprocess.run(["ip", "netns", "add", name], check=True)
        self.namespaces.append(name)

    def ip(self, namespace: str, *commands: str) -> None:
        """Run commands of `ip` in a namespace."""
        subprocess.run(["ip", "-netns", namespace, "-batch", "-"], input="\n".join(commands), text=True, check=True)


@contextlib.contextmanager
def daemon(namespace: str | None, command: list[str], log: Path):
    """Run a process in a namespace until the block ends."""
    prefix = ["ip", "netns", "exec", namespace] if namespace else []
    with log.open("w") as out:
        process = subprocess.Popen([*prefix, *command], stdout=out, stderr=subprocess.STDOUT)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
