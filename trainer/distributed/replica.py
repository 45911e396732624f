"""The replica of a run that this process belongs to, if every replica is started by its own torchrun. No torch here."""

import os
import re
from dataclasses import dataclass

from trainer.common.errors import UserError
from trainer.common.formats import quoted

# HOST:PORT with or without http://, or a multiaddress of libp2p, whose identity of a peer does not matter here.
_PEER = re.compile(
    r"(?:http://)?(?P<host>[A-Za-z0-9][\w.-]*):(?P<port>\d{1,5})/?|/(?:ip4|dns|dns4)/(?P<name>[A-Za-z0-9][\w.-]*)/tcp/(?P<tcp>\d{1,5})(?:/p2p/\w+)?/?"
)


@dataclass(frozen=True)
class Replica:
    """Replica `number` (from 0) of `count`; its first rank is `first_rank` of the run; `lighthouse` is HOST:PORT.

    `restarted`: this replica was restarted on its own while the run continued. `waits`: it was started by hand, so it waits for all
    other replicas as long as necessary, and the first one serves the lighthouse unless another process does.
    """

    number: int = 0
    count: int = 1
    first_rank: int = 0
    lighthouse: str = ""
    restarted: bool = False
    waits: bool = False

    @classmethod
    def of_opendiloco(cls, count: str | None, number: str | None, peers: str | None) -> "Replica":
        """Parse ``--hv.galaxy-size 2 --hv.world-rank 1 --hv.initial-peers /ip4/10.0.0.1/tcp/29600``; a galaxy of 1 has one torchrun.

        Raises:
            UserError: a value is invalid or missing.
        """
        if not re.fullmatch(r"[0-9]{1,6}", count or "") or not int(count or 0):
            raise UserError(f"--hv.galaxy-size: got {quoted(count)}, expected the number of replicas")
        if int(count or 0) == 1:
            return SINGLE_REPLICA
        if not re.fullmatch(r"[0-9]{1,6}", number or "") or int(number or 0) >= int(count or 0):
            raise UserError(
                f"--hv.world-rank: got {quoted(number)}, expected the number of this replica, from 0 to {int(count or 0) - 1}"
            )
        address = _PEER.fullmatch((peers or "").split(",")[0].strip())
        if not address or not 0 < int(address["port"] or address["tcp"]) < 65536:
            raise UserError(
                f"--hv.initial-peers: got {quoted(peers)}, expected the address of the first replica: 10.0.0.1:29600 or "
                "/ip4/10.0.0.1/tcp/29600"
            )
        words = address.groupdict()
        place, size = int(number or 0), int(os.environ.get("WORLD_SIZE", "1"))
        found = f"{words['host'] or words['name']}:{words['port'] or words['tcp']}"
        return cls(place, int(count or 0), place * size, found, _restarted(), waits=True)

    @classmethod
    def parse(
        cls, replica: str | None, first_rank: str | None, lighthouse: str | None, *opendiloco: str | None
    ) -> "Replica":
        """Parse ``--replica 1/3 --first-rank 2 --lighthouse 10.0.0.1:29501``; without them the run has one torchrun.

        Args:
            opendiloco: see `of_opendiloco`.

        Raises:
            UserError: a value is invalid or missing.
        """
        if any(opendiloco):
            if replica or lighthouse:
                raise UserError("--replica and --hv.galaxy-size say the same: omit one of them")
            return cls.of_opendiloco(*opendiloco)
        if not replica and not lighthouse:
            return SINGLE_REPLICA
        match = re.fullmatch(r"([0-9]{1,6})/([0-9]{1,6})", replica or "")
        if not match or not int(match[1]) < int(match[2]):
            raise UserError(
                f"--replica: got {quoted(replica)}, expected the replica's number (from 0) and their count: 0/2"
            )
        if (lighthouse or "").count(":") > 1:
            raise UserError(
                f"--lighthouse: got {quoted(lighthouse)}, but torchft requires an IPv4 address: set the IPv4 addresses "
                "of the hosts, or diloco_membership=fixed"
            )
        if not re.fullmatch(r"[^:/\s]+:[0-9]{1,5}", lighthouse or ""):
            raise UserError(f"--lighthouse: got {quoted(lighthouse)}, expected its address: 10.0.0.1:29501")
        if not re.fullmatch(r"[0-9]{1,6}", first_rank or match[1]):
            raise UserError(f"--first-rank: got {quoted(first_rank)}, expected an integer >= 0")
        return cls(int(match[1]), int(match[2]), int(first_rank or match[1]), lighthouse or "", _restarted())

    def check(self, separate: bool) -> None:
        """Check that replicas are started as the spec's strategy requires (`separate_launchers`). Raises UserError."""
        if separate and not self.lighthouse:
            raise UserError(
                "diloco_membership: with torchft every replica is started on its own and needs its number: set "
                "--replica 0/2 and --lighthouse HOST:PORT (docs/strategies.md), or diloco_membership=fixed"
            )
        if self.lighthouse and not separate:
            raise UserError(
                "--replica requires strategy=diloco and diloco_membership=torchft: set both, or remove --replica"
            )


def _restarted() -> bool:
    return any(int(os.environ.get(name, "0")) for name in ("TRAINYARD_RESTARTS", "TORCHELASTIC_RESTART_COUNT"))


SINGLE_REPLICA = Replica()
