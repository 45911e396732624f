"""Listening sockets that only the hosts of the run can reach. Standard library only.

The stores of torch, gloo, NCCL and torchft do not authenticate their peers. A socket filter (classic BPF, socket(7)) on each listening
socket drops packets from other machines, so that they cannot even connect. Connections that the socket accepts inherit it. Most
kernels ask for no privileges. Some reserve such filters for privileged processes: then only a warning remains.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import ipaddress
import os
import socket
import stat
import struct
import sys
from collections.abc import Iterable
from pathlib import Path

from trainer.supervise.socket_filter import ACCEPT, RETURN, Instruction, attach_filter

PEERS = "TRAINYARD_PEERS"  # addresses of the run's hosts, separated by commas; without it, nothing is filtered

_NETWORK_HEADER = 0xFFF00000  # SKF_NET_OFF of linux/filter.h
_LOAD, _LOAD_BYTE, _JUMP, _JUMP_EQUAL = 0x20, 0x30, 0x05, 0x15  # linux/bpf_common.h
_AND, _SHIFT_RIGHT = 0x54, 0x74
_DROP = (RETURN, 0, 0, 0)


def run_peers() -> list[str]:
    """Return the addresses of the run's hosts as the environment names them; empty if nothing is filtered."""
    return [address for address in os.environ.get(PEERS, "").split(",") if address]


def listen(host: str, port: int) -> socket.socket:
    """Return a TCP socket that listens at an address of this host, for the hosts of the run only.

    It listens at all addresses if `host` is a name, which /etc/hosts may map to loopback, or if no network device has
    the address, such as behind a NAT.

    Args:
        port: 0 for any free port.

    Raises:
        OSError: the port is in use, or the filter cannot be attached.
    """
    with contextlib.suppress(ValueError):
        family = socket.AF_INET6 if ipaddress.ip_address(host).version == 6 else socket.AF_INET
        try:
            return _listen(family, (host, port))
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
    return _listen(socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET, ("", port))


def _listen(family: socket.AddressFamily, place: tuple[str, int]) -> socket.socket:
    server = socket.socket(family, socket.SOCK_STREAM)
    try:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            server.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        restrict(server)
        server.bind(place)
        server.listen(socket.SOMAXCONN)
    except OSError:
        server.close()
        raise
    return server


def restrict(server: socket.socket) -> bool:
    """Drop packets that do not come from a host of the run; return whether the kernel permits it. Raises OSError."""
    peers = run_peers()
    if not peers:
        return False
    try:
        attach_filter(server, peer_filter(peers))
    except PermissionError:
        _warn_unfiltered()
        return False
    return True


@functools.cache
def _warn_unfiltered() -> None:
    """Print once that the kernel reserves filters for privileged processes; the firewall and the unit still apply."""
    print(
        "warning: this kernel permits no packet filter without privileges: only a firewall or the unit of the run "
        "(isolate=always) keeps other machines from its ports",
        file=sys.stderr,
        flush=True,
    )


def restrict_listeners() -> int:
    """Restrict every TCP socket on which this process listens, such as those of gloo; return how many are filtered."""
    found = 0
    if not run_peers():
        return found
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            if not stat.S_ISSOCK(os.fstat(int(entry.name)).st_mode):
                continue
            with socket.socket(fileno=os.dup(int(entry.name))) as each:
                inet = each.family in (socket.AF_INET, socket.AF_INET6) and each.type == socket.SOCK_STREAM
                if inet and each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    found += restrict(each)
    return found


def peer_filter(addresses: Iterable[str]) -> list[Instruction]:
    """Return the program that accepts packets from `addresses` and from this host, over IPv4 and IPv6."""
    found = {ipaddress.ip_address(address.partition("%")[0]) for address in addresses}
    four = [int(address) for address in found if address.version == 4]
    six = [address.packed for address in found | {ipaddress.ip_address("::1")} if address.version == 6]
    program: list[Instruction] = [(_LOAD, 0, 0, _NETWORK_HEADER + 12)]  # source address
    for number in sorted(four):
        program += [(_JUMP_EQUAL, 0, 1, number), ACCEPT]
    program += [(_AND, 0, 0, 0xFF000000), (_JUMP_EQUAL, 0, 1, 0x7F000000), ACCEPT, _DROP]
    begin = [(_LOAD_BYTE, 0, 0, _NETWORK_HEADER), (_SHIFT_RIGHT, 0, 0, 4), (_JUMP_EQUAL, 1, 0, 4)]
    program = [*begin, (_JUMP, 0, 0, len(program)), *program]
    for packed in sorted(six):
        for place, word in enumerate(struct.unpack(">4I", packed)):
            load = (_LOAD, 0, 0, _NETWORK_HEADER + 8 + 4 * place)
            program += [load, (_JUMP_EQUAL, 0, 7 - 2 * place, word)]  # else to the next address
        program.append(ACCEPT)
    return [*program, _DROP]
