"""The replica of a run that this process belongs to, if every replica is started by its own torchrun. No torch here."""

import os
import re
from dataclasses import dataclass

from trainer.common.errors import UserError
from trainer.common.formats import quoted


@dataclass(frozen=True)
class Replica:
    """Replica `number` (from 0) of `count`; its first rank is `first_rank` of the run; `lighthouse` is HOST:PORT.

    `restarted`: this replica was restarted on its own while the run continued.
    """

    number: int = 0
    count: int = 1
    first_rank: int = 0
    lighthouse: str = ""
    restarted: bool = False

    @classmethod
    def parse(cls, replica: str | None, first_rank: str | None, lighthouse: str | None) -> "Replica":
        """Parse ``--replica 1/3 --first-rank 2 --lighthouse 10.0.0.1:29501``; without them the run has one torchrun.

        Raises:
            UserError: a value is invalid or missing.
        """
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
