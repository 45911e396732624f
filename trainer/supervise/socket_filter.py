"""Attach a packet filter to a socket. Standard library only: the controller asks hosts whether their kernel permits it."""

from __future__ import annotations

import ctypes
import socket
import struct
from collections.abc import Iterable

Instruction = tuple[int, int, int, int]  # opcode, jump if true, jump if false, operand

RETURN = 0x06  # linux/bpf_common.h
ACCEPT: Instruction = (RETURN, 0, 0, 0xFFFFFFFF)

_SO_ATTACH_FILTER = 26  # asm-generic/socket.h


def attach_filter(target: socket.socket, instructions: Iterable[Instruction]) -> None:
    """Let a program of classic BPF (socket(7)) decide which packets reach a socket.

    Raises OSError; PermissionError if the kernel reserves socket filters for privileged processes.
    """
    program = b"".join(struct.pack("HBBI", *instruction) for instruction in instructions)
    buffer = ctypes.create_string_buffer(program)
    fprog = struct.pack("HP", len(program) // 8, ctypes.addressof(buffer))  # struct sock_fprog
    target.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, fprog)


def permits_socket_filter() -> bool:
    """Return whether this kernel lets this user attach a packet filter to a socket."""
    with socket.socket() as probe:
        try:
            attach_filter(probe, [ACCEPT])
        except OSError:
            return False
    return True
