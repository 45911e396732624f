"""The pipelines of a run: one over all ranks, or several that hold the same layers and share the rows of a step."""

from __future__ import annotations

from dataclasses import dataclass

from trainer.common.errors import UserError
from trainer.config import RunSpec
from trainer.distributed.world import World


@dataclass(frozen=True)
class Pipelines:
    """Which ranks form a pipeline.

    Attributes:
        world: all ranks.
        stages: the ranks of this rank's pipeline; its `rank` is the number of the stage.
        ranks: the ranks of every pipeline, in the order of the stages.
    """

    world: World
    stages: World
    ranks: tuple[tuple[int, ...], ...]

    @classmethod
    def find(cls, spec: RunSpec, world: World) -> Pipelines:
        """Divide the hosts into pipelines of `pipeline_hosts` each. Every rank calls it.

        Raises:
            UserError: the pipelines would have different numbers of ranks.
        """
        everyone = tuple(range(world.size))
        if not spec.pipeline_hosts or world.size == 1:
            return cls(world, world, (everyone,))
        nodes = world.gather(world.node_rank)
        order = sorted(set(nodes))
        places = [order.index(node) // spec.pipeline_hosts for node in nodes]
        ranks = tuple(tuple(rank for rank in everyone if places[rank] == number) for number in range(max(places) + 1))
        sizes = [len(each) for each in ranks]
        if len(set(sizes)) > 1:
            raise UserError(
                f"strategy: pipelines of {spec.pipeline_hosts} hosts would have {', '.join(map(str, sizes))} ranks, which must be "
                "equal: set pipeline_hosts (of diloco: replica_hosts) to a divisor of the number of hosts"
            )
        stages = world if len(ranks) == 1 else world.subgroup(ranks, spec.collective_timeout)
        return cls(world, stages, ranks)

    @property
    def mine(self) -> int:
        """The number of this rank's pipeline."""
        return next(number for number, ranks in enumerate(self.ranks) if self.world.rank in ranks)

    def group_of(self, stages: tuple[int, ...], timeout: float) -> World:
        """Return the ranks of these stages of this rank's pipeline. Every rank calls it."""
        return self.world.subgroup([[ranks[stage] for stage in stages] for ranks in self.ranks], timeout)

    def own(self, timeout: float) -> World:
        """Return the ranks of this rank's pipeline with a process group of their own. Every rank calls it."""
        return self.world.subgroup(self.ranks, timeout)

    def replicas(self, timeout: float) -> World:
        """Return the ranks that hold the same stage as this one. Every rank calls it."""
        return self.world.subgroup(list(zip(*self.ranks, strict=True)), timeout)

    def holders(self, stages: tuple[int, ...]) -> list[int]:
        """Return all ranks that hold one of these stages."""
        return sorted(ranks[stage] for ranks in self.ranks for stage in stages)
