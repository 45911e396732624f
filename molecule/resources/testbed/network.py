"""The network of a lab: its namespaces, the switch, the cable to this machine, and NAT to the package registries."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from . import machine
from .machine import LabError, run

if TYPE_CHECKING:
    from .lab import Lab

HERE = Path(__file__).parent


def start_holder(lab: Lab, owner_fd: int) -> int:
    """Start the process that holds the namespaces of the lab, and return its PID on this machine.

    The holder ends when the other end of the pipe `owner_fd` closes. Raises LabError if it does not start.
    """
    argv = ["unshare", "--mount", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]
    argv += ["--propagation", "private", sys.executable, "-m", "testbed.holder", str(owner_fd), str(lab.folder)]
    log_file = lab.folder / "holder.log"
    outer = _start([*argv, *(str(top) for top in lab.cgroup_tops)], owner_fd, log_file)
    children = Path(f"/proc/{outer.pid}/task/{outer.pid}/children")
    lab.wait(
        lambda: outer.poll() is not None or children.read_text().strip() != "", "the holder of the lab did not start"
    )
    if outer.poll() is not None:
        raise LabError(f"the holder of the lab exited: {log_file.read_text()[-400:]}")
    return int(children.read_text())


def _start(argv: list[str], descriptor: int, log_file: Path) -> subprocess.Popen[bytes]:
    """Start a process that outlives this one, inherits the file descriptor, and writes its output to `log_file`."""
    with log_file.open("w") as log:
        return subprocess.Popen(
            argv,
            env={**os.environ, "PYTHONPATH": str(HERE.parent)},
            pass_fds=[descriptor],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            cwd="/",
        )


def connect_machine(holder: int) -> int:
    """Create a veth pair between this machine and the switch of the lab, on the first 10.231.N.0/24 without a route.

    Returns N. Raises LabError if no network is free or the kernel refuses the pair.
    """
    taken = machine.routes()
    for net in range(1, 255):
        if any(route.startswith(f"10.231.{net}.") for route in taken):
            continue
        name = f"trainyard{net}"
        argv = ["ip", "link", "add", name, "type", "veth", "peer", "name", "machine", "netns", str(holder)]
        created = subprocess.run(argv, capture_output=True, text=True)
        if created.returncode == 0:
            run("ip", "address", "add", f"10.231.{net}.254/24", "dev", name)
            run("ip", "link", "set", name, "up")
            return net
        if "File exists" not in created.stderr:
            raise LabError(f"cannot connect this machine to the lab: {created.stderr.strip()}")
    raise LabError("no free network in 10.231.0.0/16 for the lab: take other labs down")


def disconnect_machine(net: int) -> None:
    """Remove the veth pair of `connect_machine`, if it exists."""
    run("ip", "link", "del", f"trainyard{net}", check=False)


def start_switch(lab: Lab, net: int) -> None:
    """Create the bridge, which is also the gateway of the hosts. It forwards only to package registries and name servers."""
    dns = ", ".join(machine.resolvers()) or "127.0.0.1"
    web = ", ".join(str(port) for port in sorted({80, 443, *machine.proxy_ports()}))
    rules = f"""
        table inet lab {{
          chain out {{
            type filter hook forward priority filter; policy accept;
            iifname "br0" oifname "br0" accept
            ct state established,related accept
            iifname "br0" oifname "tap0" ip daddr {{ {dns} }} meta l4proto {{ tcp, udp }} th dport 53 accept
            iifname "br0" oifname "tap0" tcp dport {{ {web} }} accept
            reject with icmpx admin-prohibited
          }}
          chain nat {{
            type nat hook postrouting priority srcnat; policy accept;
            oifname "tap0" masquerade
          }}
        }}
    """
    lab.in_lab(
        *("sh", "-euc"),
        f"""
        ip link set lo up
        ip link add br0 type bridge
        ip address add 10.231.{net}.1/24 dev br0
        ip link set machine master br0 up
        ip link set br0 up
        echo 1 > /proc/sys/net/ipv4/ip_forward
        nft -f - <<'RULES'
{rules}
RULES
        """,
    )


def start_nat(lab: Lab, holder: int) -> None:
    """Start slirp4netns in the PID namespace of the lab, and wait until it is ready. Raises LabError if it exits.

    slirp4netns is an ordinary process of this machine that opens the connections, so neither the forwarding nor the firewall
    of this machine changes.
    """
    ready, write = os.pipe()
    argv = ["nsenter", f"--pid=/proc/{holder}/ns/pid", "slirp4netns", "--configure", "--mtu=1500"]
    argv += ["--disable-host-loopback", f"--ready-fd={write}", "--netns-type=path"]
    argv += [f"/proc/{holder}/ns/net", "tap0"]
    log_file = lab.folder / "nat.log"
    _start(argv, write, log_file)
    os.close(write)
    started = os.read(ready, 1)
    os.close(ready)
    if not started:
        raise LabError(f"slirp4netns cannot connect the lab to the network: {log_file.read_text()[-400:]}")
