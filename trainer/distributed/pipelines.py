"""The pipelines of a run: one over all ranks, or one for each replica of DiLoCo, which all hold the same layers."""

from __future__ import annotations

from dataclasses import dataclass

from trainer.common.errors import UserError
from trainer.distributed.world import World


@dataclass(frozen=True)
class Pipelines:
    """Which ranks form a pipeline."""

    world: World  # all ranks
    stages: World  # the ranks of this rank's pipeline; its `rank` is the number of the stage
    ranks: tuple[tuple[int, ...], ...]  # the ranks of every pipeline, in the order of the stages

    @classmethod
    def find(cls, hosts: int, world: World, timeout: float) -> Pipelines:
        """Divide the ranks into pipelines of `hosts` hosts each (0: all). Every rank calls it.

        Raises UserError: the pipelines would have different numbers of ranks.
        """
        everyone = tuple(range(world.size))
        if not hosts or world.size == 1:
            return cls(world, world, (everyone,))
        nodes = world.gather(world.node_rank)
        order = sorted(set(nodes))
        places = [order.index(node) // hosts for node in nodes]
        ranks = tuple(tuple(rank for rank in everyone if places[rank] == number) for number in range(max(places) + 1))
        sizes = [len(each) for each in ranks]
        if len(set(sizes)) > 1:
            raise UserError(
                f"strategy: pipelines of {hosts} hosts would have {', '.join(map(str, sizes))} ranks, which must be "
                "equal: set replica_hosts to a divisor of the number of hosts"
            )
        return cls(world, world if len(ranks) == 1 else world.subgroup(ranks, timeout), ranks)

    def group_of(self, stages: tuple[int, ...], timeout: float) -> World:
        """Return the ranks of these stages of this rank's pipeline. Every rank calls it."""
        return self.world.subgroup([[ranks[stage] for stage in stages] for ranks in self.ranks], timeout)

    def own(self, timeout: float) -> World:
        """Return the ranks of this rank's pipeline with a process group of their own. Every rank calls it."""
        return self.world.subgroup(self.ranks, timeout)
