"""Which replica of a run this process belongs to, where every replica is a torchrun of its own. No torch here."""

import os
import re
from dataclasses import dataclass

from trainer.config import RunSpec
from trainer.errors import UserError
from trainer.strategy import plan_of


@dataclass(frozen=True)
class Member:
    """Replica `number` (from 0) of `count`, whose first rank is `first_rank` of the run; `lighthouse` is host:port.

    `again`: this replica was started again by itself while the run went on.
    """

    number: int = 0
    count: int = 1
    first_rank: int = 0
    lighthouse: str = ""
    again: bool = False

    @classmethod
    def parse(cls, replica: str | None, first_rank: str | None, lighthouse: str | None) -> "Member":
        """Read ``--replica 1/3 --first-rank 2 --lighthouse 10.0.0.1:29501``; a run without them has one torchrun.

        Raises:
            UserError: a value that cannot be, or one without the others.
        """
        if not replica and not lighthouse:
            return NO_MEMBER
        place = re.fullmatch(r"(\d+)/(\d+)", replica or "")
        if not place or not int(place[1]) < int(place[2]):
            raise UserError(f"--replica: got {replica!r}, takes a replica's number, from 0, and how many: 0/2")
        if not re.fullmatch(r"[^:/\s]+:\d+", lighthouse or ""):
            raise UserError(f"--lighthouse: got {lighthouse!r}, takes where the lighthouse listens: 10.0.0.1:29501")
        if not (first_rank or place[1]).isdigit():
            raise UserError(f"--first-rank: got {first_rank!r}, takes a whole number >= 0")
        again = any(int(os.environ.get(name, "0")) for name in ("TRAINYARD_RESTARTS", "TORCHELASTIC_RESTART_COUNT"))
        return cls(int(place[1]), int(place[2]), int(first_rank or place[1]), lighthouse or "", again)

    def check(self, spec: RunSpec) -> None:
        """Check that the spec is for a run of such parts. Raises UserError."""
        separate = plan_of(spec).separate_launchers(spec)
        if separate and not self.lighthouse:
            raise UserError(
                "diloco_membership: torchft starts every replica by itself and has to know its place: give --replica 0/2 and "
                "--lighthouse HOST:PORT (docs/strategies.md), or take diloco_membership=fixed"
            )
        if self.lighthouse and not separate:
            raise UserError(
                "--replica is for strategy=diloco with diloco_membership=torchft: set both, or leave --replica out"
            )


NO_MEMBER = Member()
