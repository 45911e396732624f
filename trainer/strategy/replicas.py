"""Which ranks make a replica: those of a host, or of neighbouring hosts. Gradients are averaged inside a replica alone."""

from dataclasses import dataclass

from trainer.config.run_spec import RunSpec
from trainer.distributed.world import World
from trainer.errors import UserError

_WORTH = 1.15  # an uneven division has to make a round this much shorter


@dataclass(frozen=True)
class Replicas:
    """The replicas of a run, in the order of their hosts. `ranks[i]`: those of replica i, as they count over all hosts."""

    ranks: list[list[int]]
    mine: int

    @classmethod
    def find(cls, spec: RunSpec, world: World) -> "Replicas":
        """Find out how the ranks stand on hosts. Every rank calls it.

        Raises:
            UserError: there are more replicas than rows in a step.
        """
        nodes = world.gather(world.node_rank)
        places = [node // spec.replica_hosts for node in nodes]
        ranks = [[rank for rank, place in enumerate(places) if place == number] for number in sorted(set(places))]
        check_rows(spec, len(ranks))
        return cls(ranks, next(number for number, members in enumerate(ranks) if world.rank in members))

    def __len__(self) -> int:
        return len(self.ranks)


def check_rows(spec: RunSpec, count: int) -> None:
    """Check that every step has a row for each of `count` replicas. Raises UserError."""
    if count > spec.rows_per_step:
        raise UserError(
            f"strategy: {spec.strategy} has {count} replicas, and a step has {spec.rows_per_step} rows: "
            f"set total_batch_size to {count} or more"
        )


def by_speed(shares: list[float], costs: list[float]) -> list[float]:
    """Return shares by speed, if the round is so much shorter with them than with `shares` that it cannot be noise.

    Args:
        costs: seconds that a portion takes each; 0: unknown.
    """
    if not all(costs):
        return shares
    slowest = max(share * cost for share, cost in zip(shares, costs, strict=True)) / sum(shares)
    speeds = [1 / cost for cost in costs]
    return speeds if slowest > _WORTH / sum(speeds) else shares


def deal(turns: int, shares: list[float]) -> list[int]:
    """Return who takes each of `turns` portions of work, in proportion to `shares` and as evenly as can be.

    Equal shares take turns in order. (Webster's method: the next one goes to whoever is furthest behind.)
    """
    taken = [0] * len(shares)
    owners = []
    for _ in range(turns):
        owner = min(range(len(shares)), key=lambda place: ((taken[place] + 0.5) / shares[place], place))
        taken[owner] += 1
        owners.append(owner)
    return owners
