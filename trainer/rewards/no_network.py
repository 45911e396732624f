"""Deny this process the network by a filter of system calls (seccomp(2)), which needs no privileges and cannot be removed.

Standard library only.
"""

import ctypes
import platform
import socket
import struct

# machine: (its AUDIT_ARCH, the number of socket(2)); from linux/audit.h and the tables of system calls
_MACHINES = {"x86_64": (0xC000003E, 41), "aarch64": (0xC00000B7, 198)}
_IO_URING_SETUP = 425  # on both; it creates sockets, too
_X32 = 0x40000000  # bit of the numbers of x32, the second table of x86_64
_LOCAL = (socket.AF_UNIX, socket.AF_NETLINK)  # name services of the C library open them
_LOAD, _EQUAL, _BITS, _RETURN = 0x20, 0x15, 0x45, 0x06  # linux/bpf_common.h
_ALLOW, _KILL, _DENY = 0x7FFF0000, 0x80000000, 0x00050001  # linux/seccomp.h; the last one is EPERM
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data, little endian
_PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS, _SECCOMP_MODE_FILTER = 22, 38, 2  # linux/prctl.h


def deny_network(*, kill: bool) -> None:
    """Let every new socket of this process and its children fail with EPERM.

    `kill`: end the process instead (SIGSYS) at a socket that is not local. Raises OSError: the kernel or the machine
    has no such filters.
    """
    found = _MACHINES.get(platform.machine())
    if found is None:
        raise OSError(f"no filter of system calls for the machine {platform.machine()}")
    architecture, create = found
    verdict = _KILL if kill else _DENY
    program = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, architecture),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
        (_BITS, 0, 1, _X32),
        (_RETURN, 0, 0, _KILL),
        (_EQUAL, 0, 1, _IO_URING_SETUP),
        (_RETURN, 0, 0, _DENY),
        (_EQUAL, 1, 0, create),
        (_RETURN, 0, 0, _ALLOW),
        (_LOAD, 0, 0, _FIRST_ARGUMENT),
        (_EQUAL, 1, 0, _LOCAL[0]),
        (_EQUAL, 0, 1, _LOCAL[1]),
        (_RETURN, 0, 0, _DENY),
        (_RETURN, 0, 0, verdict),
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *each) for each in program))
    fprog = ctypes.create_string_buffer(struct.pack("HP", len(program), ctypes.addressof(code)))  # struct sock_fprog
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    argument = ctypes.c_ulong(ctypes.addressof(fprog))
    zero = ctypes.c_ulong(0)
    if prctl(_PR_SET_NO_NEW_PRIVS, ctypes.c_ulong(1), zero, zero, zero) or prctl(
        _PR_SET_SECCOMP, ctypes.c_ulong(_SECCOMP_MODE_FILTER), argument, zero, zero
    ):
        number = ctypes.get_errno()
        raise OSError(number, "the kernel permits no filter of system calls")
