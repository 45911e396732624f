"""The ranks of a replica: those of a host, or of consecutive hosts. Gradients are averaged only within a replica."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainer.common.errors import UserError

if TYPE_CHECKING:
    from trainer.config import RunSpec
    from trainer.distributed.world import World

CHUNK = 16 << 20  # numbers of one all-reduce between replicas
_MIN_SPEEDUP = 1.15  # minimum speedup of a round that justifies an uneven distribution


@dataclass(frozen=True)
class Replicas:
    """The replicas of a run, in the order of their hosts. `ranks[i]`: the global ranks of replica i."""

    ranks: list[list[int]]
    mine: int

    @classmethod
    def find(cls, spec: RunSpec, world: World) -> Replicas:
        """Determine the replicas from the hosts of the ranks. Every rank calls it.

        Raises UserError: there are more replicas than rows in a step.
        """
        nodes = world.gather(world.node_rank)
        places = [node // spec.replica_hosts for node in nodes]
        ranks = [[rank for rank, place in enumerate(places) if place == number] for number in sorted(set(places))]
        if len(ranks) > spec.rows_per_step:
            raise UserError(
                f"strategy: {spec.strategy} has {len(ranks)} replicas, but a step has {spec.rows_per_step} rows: "
                f"set total_batch_size to {len(ranks)} or more"
            )
        return cls(ranks, next(number for number, group in enumerate(ranks) if world.rank in group))

    def __len__(self) -> int:
        return len(self.ranks)


def by_speed(shares: list[float], costs: list[float]) -> list[float]:
    """Return shares by speed if they make a round shorter than `shares` by more than measurement noise.

    `costs`: seconds per portion of each replica; 0: unknown.
    """
    if not all(costs):
        return shares
    slowest = max(share * cost for share, cost in zip(shares, costs, strict=True)) / sum(shares)
    speeds = [1 / cost for cost in costs]
    return speeds if slowest > _MIN_SPEEDUP / sum(speeds) else shares


def apportion(turns: int, shares: list[float]) -> list[int]:
    """Assign `turns` portions of work in proportion to `shares`, spread as evenly as possible.

    With equal shares the assignment is round-robin. In general it is Webster's method: the next portion goes to the
    replica that is furthest behind. Returns the index of the share for each portion.
    """
    taken = [0] * len(shares)
    owners = []
    for _ in range(turns):
        owner = min(range(len(shares)), key=lambda place: ((taken[place] + 0.5) / shares[place], place))
        taken[owner] += 1
        owners.append(owner)
    return owners
