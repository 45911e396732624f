"""Every way between hosts tried at once: pairs.py on all of them."""

from __future__ import annotations

import functools
import json
import random
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainyard.connection import FanOut, HostConnection

PAIRS = Path(__file__).parents[1].joinpath("remote/mesh.py").read_bytes()
HIGH = range(33000, 60900)  # where the kernel hands out ports, and so where gloo and NCCL listen
_LIMIT = 8.0  # s, and half a second more a host


def high_ports() -> list[int]:
    """Return some of the ports that ranks listen on beside the rendezvous port."""
    return random.sample(HIGH, 3)


def check_mesh(hosts: list[dict[str, Any]], ports: list[int], link: Callable[[str], HostConnection]) -> None:
    """Put `pairs` (see pairs.Pairs.result) into every host's description: all at once, each to all others.

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
        # On stdin, as the program is: the token is not for the list of processes.
        program = PAIRS.replace(b"json.loads(sys.argv[1])", f"json.loads({json.dumps(json.dumps(about))})".encode())
        questions[host["host"]] = functools.partial(link(host["host"]).ask, program)
    asked = FanOut(questions).wait(limit + 10)
    for host in hosts:
        if host["host"] in asked.answers:
            host["pairs"] = asked.answers[host["host"]]
