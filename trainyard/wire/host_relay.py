"""Pass files from host to host, in a chain, while they arrive: every port of the network carries them once.

The first host of the chain has the files already, or the controller copies them to it. A host that fails, and those
behind it, do not get the files; the caller sends these from the controller.
"""

from __future__ import annotations

import datetime
import functools
import hashlib
import ipaddress
import itertools
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainyard.wire.connection import FanOut, HostConnection

HIGH_PORTS = range(33000, 60900)  # ephemeral ports, on which gloo and NCCL listen
MINIMUM = 4 << 20  # bytes below which the start of a relay takes longer than a copy from the controller
CONNECT = 20.0  # s for a host to listen
IDLE = 30.0  # s without a byte after which a host gives up
MIN_RATE = 100_000  # bytes per second; a slower relay is given up
POLL = 0.05  # s between two checks of the hosts
START_LIMIT = 60.0  # s in addition to the time that the bytes take

_YEARS = (2000, 2100)  # of the certificate, which is used once: also valid on a host whose clock is wrong
_UPLOAD = ""  # the place of the controller's own copy among the requests to hosts


@dataclass(frozen=True)
class Copy:
    """A file that hosts of a relay lack."""

    dest: str  # path below the data directory of every host
    source: str  # path on the controller; empty if only hosts have the file
    size: int  # in bytes
    sha256: str
    mode: int  # mode of the source: others may read a copy only if they may read the source


@dataclass(frozen=True)
class Member:
    """A host that can be part of a relay. `lacks` are the `dest` of the files that it does not have."""

    host: str
    address: str
    data_dir: str
    lacks: frozenset[str]
    link_mbit: float = 0.0

    def temporary(self, copy: Copy, token: str) -> str:
        """Return where a file arrives; the token keeps simultaneous copies of the same file apart."""
        name = hashlib.sha256(copy.dest.encode()).hexdigest()[:16]  # two files may have the same content
        return f"{self.data_dir}/store/incoming/{name}-{token}"


def plan_relay(members: Sequence[Member], copies: Mapping[str, Copy]) -> list[Member]:
    """Return the chain of hosts, the first one first; empty if copies from the controller are as fast.

    A relay needs two machines. The first one is the one that lacks least; what it lacks, the controller must have. Then fast
    links come first, because a host delays those behind it.
    """
    chain = sorted((member for member in members if member.lacks), key=lambda member: -member.link_mbit)
    size = sum(copies[name].size for name in {name for member in chain for name in member.lacks})

    def upload(member: Member) -> tuple[int, float]:
        return sum(copies[name].size for name in member.lacks), -member.link_mbit

    possible = [member for member in members if all(copies[name].source for name in member.lacks)]
    if not chain or not possible:
        return []
    first = min(possible, key=upload)
    chain = [first, *(member for member in chain if member is not first)]
    addresses = {ipaddress.ip_address(member.address) for member in chain}
    if len(chain) < 2 or len(addresses) < len(chain) or size < MINIMUM:
        return []
    return chain


def run_relay(
    chain: Sequence[Member],
    copies: Mapping[str, Copy],
    connect: Callable[[str], HostConnection],
    token: str,
) -> dict[str, str]:
    """Copy the files that the hosts of the chain lack. Returns why a host failed, by host; such a host may have some of
    the files.

    `copies`: by `dest`. `connect`: makes the connection to a host by its name; called in this thread. `token`: token of
    this controller's transfers.
    """
    wanted = {name: copies[name] for name in sorted({name for member in chain for name in member.lacks})}
    first = chain[0]
    requests = _requests(chain, wanted, token)
    upload = [copy for name, copy in wanted.items() if name in first.lacks]
    connections = {member.host: connect(member.host) for member in chain}
    putting = connect(first.host)
    calls = {
        host: functools.partial(connection.call, "relay", requests[host]) for host, connection in connections.items()
    }
    done: FanOut[dict[str, Any]] = FanOut({**calls, _UPLOAD: functools.partial(_put, putting, first, upload, token)})
    deadline = time.monotonic() + START_LIMIT + sum(copy.size for copy in wanted.values()) / MIN_RATE
    while any(thread.is_alive() for thread in done.threads.values()) and time.monotonic() < deadline:
        time.sleep(POLL)
        for host in _waiting_in_vain(chain, done):
            connections[host].transport.abort()
    done.wait(POLL)
    return _failures(chain, done)


def _waiting_in_vain(chain: Sequence[Member], done: FanOut) -> list[str]:
    """Return the hosts behind one that failed: they receive nothing more, and would wait for `IDLE`."""
    hosts = [member.host for member in chain]
    lost = [_UPLOAD in done.errors] + [
        host in done.errors or bool(done.answers.get(host, {}).get("receive_error")) for host in hosts
    ]
    behind = hosts[lost.index(True) :] if any(lost) else []
    return [host for host in behind if done.threads[host].is_alive()]


def _failures(chain: Sequence[Member], done: FanOut) -> dict[str, str]:
    """Return why hosts failed, in the order of the chain."""
    failed = dict(done.errors)
    for host, answer in done.answers.items():
        if why := answer.get("receive_error"):
            failed[host] = why
    if why := failed.get(_UPLOAD):
        failed[chain[0].host] = why
    # What a host could not send names the cause better than what the next one did not receive.
    for member, after in itertools.pairwise(chain):
        why = done.answers.get(member.host, {}).get("send_error")
        if why and after.host in failed and after.host not in done.errors:
            failed[after.host] = f"{member.host} cannot send to it: {why}"
    return {member.host: failed[member.host] for member in chain if member.host in failed}


def _put(connection: HostConnection, first: Member, upload: Sequence[Copy], token: str) -> dict[str, Any]:
    for copy in upload:
        connection.put(copy.source, first.temporary(copy, token))
    return {}


def _requests(chain: Sequence[Member], wanted: Mapping[str, Copy], token: str) -> dict[str, dict[str, Any]]:
    """Return the request of every host, see trainyard/remote/relay.py."""
    certificate, key = make_transfer_key()
    # The default range of ephemeral ports, where peers reach a host whose firewall is not ours, too.
    ports = random.sample(HIGH_PORTS, len(chain))
    addresses = [str(ipaddress.ip_address(member.address)) for member in chain]
    requests = {}
    for place, member in enumerate(chain):
        after = chain[place + 1] if place + 1 < len(chain) else None
        # Files for later hosts of the chain pass through this one, which already has them or keeps them.
        needed = {name for later in chain[place:] for name in later.lacks}
        files = [
            {
                "target": f"{member.data_dir}/{copy.dest}",
                "temporary": member.temporary(copy, token),
                "size": copy.size,
                "sha256": copy.sha256,
                "mode": copy.mode,
                "source": ("host" if place else "controller") if name in member.lacks else "here",
                "wanted": after is not None and name in after.lacks,
            }
            for name, copy in wanted.items()
            if name in needed
        ]
        requests[member.host] = {
            "files": files,
            "address": addresses[place],
            "port": ports[place],
            "previous": addresses[place - 1] if place else "",
            "next": addresses[place + 1] if after else "",
            "next_port": ports[place + 1] if after else 0,
            "certificate": certificate,
            "key": key,
            "cache": f"{member.data_dir}/store/digests.json",
            "connect": CONNECT,
            "idle": IDLE,
        }
    return requests


def make_transfer_key() -> tuple[str, str]:
    """Return a certificate that both sides of a transfer present and require, and its private key (EC P-256), both as PEM. No file holds them."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "trainyard transfer")])
    first, last = (datetime.datetime(year, 1, 1, tzinfo=datetime.UTC) for year in _YEARS)
    builder = x509.CertificateBuilder(issuer_name=name, subject_name=name, public_key=key.public_key())
    builder = builder.serial_number(x509.random_serial_number()).not_valid_before(first).not_valid_after(last)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    certificate = builder.sign(key, hashes.SHA256())
    encoding, pkcs8 = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    private = key.private_bytes(encoding, pkcs8, serialization.NoEncryption())
    return certificate.public_bytes(encoding).decode(), private.decode()
