"""Listening sockets at one address of this host. Standard library only."""

import contextlib
import errno
import ipaddress
import socket


def listen(host: str, port: int) -> socket.socket:
    """Return a TCP socket that listens at an address of this host.

    It listens at all addresses if `host` is a name, which /etc/hosts may map to loopback, or if no network device has
    the address, such as behind a NAT. `port`: 0 for any free port. Raises OSError: the port is in use.
    """
    with contextlib.suppress(ValueError):
        family = socket.AF_INET6 if ipaddress.ip_address(host).version == 6 else socket.AF_INET
        try:
            return socket.create_server((host, port), family=family, backlog=socket.SOMAXCONN)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    return socket.create_server(("", port), family=family, backlog=socket.SOMAXCONN, dualstack_ipv6=dual)
