"""Every way between hosts tried at once: mesh.py on all of them."""

from __future__ import annotations

import functools
import random
import secrets
from collections.abc import Callable
from typing import Any

from trainyard.connection import FanOut, HostConnection

HIGH = range(33000, 60900)  # where the kernel hands out ports, and so where gloo and NCCL listen
_LIMIT = 8.0  # s, and half a second more a host


def high_ports() -> list[int]:
    """Return some of the ports that ranks listen on beside the rendezvous port."""
    return random.sample(HIGH, 3)


def check_mesh(hosts: list[dict[str, Any]], ports: list[int], link: Callable[[str], HostConnection]) -> None:
    """Put `mesh` (see mesh.measure) into every host's description: all at once, each to all others.

    Args:
        hosts: with `host`, `address` and `facts` with the `interface`; the head first. One machine as two hosts is one.
        ports: to listen on and to be reached at.
        link: makes a host's connection.
    """
    hosts = list({host["address"]: host for host in reversed(hosts)}.values())[::-1]
    if len(hosts) < 2:
        return
    limit, token = _LIMIT + len(hosts) / 2, secrets.token_hex(16)
    questions: dict[str, Callable[[], dict[str, Any]]] = {}
    for host in hosts:
        about = {
            "name": host["host"],
            "device": host["facts"]["interface"],
            "names": [other["host"] for other in hosts],
            "address": host["address"],
            "peers": {other["host"]: other["address"] for other in hosts if other is not host},
            "head": hosts[0]["host"],
            "ports": ports,
            "token": token,
            "limit": limit,
        }
        questions[host["host"]] = functools.partial(link(host["host"]).call, "mesh", about)
    asked = FanOut(questions).wait(limit + 10)
    for host in hosts:
        if host["host"] in asked.answers:
            host["mesh"] = asked.answers[host["host"]]
