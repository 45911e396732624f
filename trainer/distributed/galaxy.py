"""Several `torchrun --standalone` that are one run, as OpenDiLoCo starts them: what `--hv.*` say of it. No torch here."""

from __future__ import annotations

import re
from dataclasses import dataclass

from trainer.common.errors import UserError
from trainer.common.formats import quoted

# HOST:PORT with or without http://, or a multiaddress of libp2p, whose identity of a peer does not matter here.
_ADDRESS = re.compile(
    r"(?:http://)?(?P<host>[A-Za-z0-9][\w.-]*):(?P<port>\d{1,5})/?|/(?:ip4|dns|dns4)/(?P<name>[A-Za-z0-9][\w.-]*)/tcp/(?P<tcp>\d{1,5})(?:/p2p/\w+)?/?"
)
_NUMBER = re.compile(r"[0-9]{1,6}")


@dataclass(frozen=True)
class Galaxy:
    """Worker `rank` of `size` workers, which meet in the store at `host` and `port`. A worker is one torchrun."""

    size: int = 1
    rank: int = 0
    host: str = ""
    port: int = 0

    @classmethod
    def parse(cls, size: str | None, rank: str | None, peers: str | None) -> Galaxy:
        """Parse ``--hv.galaxy-size 2 --hv.world-rank 1 --hv.initial-peers /ip4/10.0.0.1/tcp/30001``; a galaxy of 1 needs no peer.

        Raises UserError: a value is invalid or missing.
        """
        if not (size or rank or peers):
            return cls()
        if not _NUMBER.fullmatch(size or "") or not int(size or 0):
            raise UserError(f"--hv.galaxy-size: got {quoted(size)}, expected the number of workers")
        count = int(size or 0)
        if count == 1:
            return cls()
        if not _NUMBER.fullmatch(rank or "") or int(rank or 0) >= count:
            raise UserError(
                f"--hv.world-rank: got {quoted(rank)}, expected the number of this worker, from 0 to {count - 1}"
            )
        first = (peers or "").replace(",", " ").split()[:1]
        return cls(count, int(rank or 0), *parse_address("--hv.initial-peers", first[0] if first else peers))

    @property
    def peer(self) -> str:
        return f"{self.host}:{self.port}"


def parse_address(flag: str, value: str | None, *, any_host: bool = False) -> tuple[str, int]:
    """Return the host and the port of an address. `any_host`: 0.0.0.0 is one, too. Raises UserError."""
    found = _ADDRESS.fullmatch((value or "").strip())
    port = int(found["port"] or found["tcp"]) if found else 0
    host = (found["host"] or found["name"]) if found else ""
    if not 0 < port < 65536 or (host == "0.0.0.0" and not any_host):
        raise UserError(
            f"{flag}: got {quoted(value)}, expected the address of a machine: 10.0.0.1:30001 or /ip4/10.0.0.1/tcp/30001"
        )
    return host, port
